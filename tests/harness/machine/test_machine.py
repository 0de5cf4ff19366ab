"""Test the readings of NVML (a stand-in), torch's files and the environment, and doctor's conclusions from them."""

import json
import types
from pathlib import Path
from typing import Any

import pynvml
import pytest
from conftest import cases, parametrized

from vramsweep.harness.config import compose
from vramsweep.harness.machine import machine
from vramsweep.harness.process import attempt
from vramsweep.harness.verbs import doctor

MIG = "MIG-5a16ef8d-7d73-5e67-b4a4-0f6f6e4f0f3c"  # the form of "nvidia-smi -L"
OLD_MIG = "MIG-GPU-4b4a5c1e-7d73-5e67-b4a4-0f6f6e4f0f3c/1/0"  # before driver 470


STATE = ("PersistenceMode", "EccMode", "TotalEccErrors", "RemappedRows", "MemoryAffinity", "CpuAffinity")


class Driver:
    """NVML with some cards: values by query name, an exception to raise, or a table by handle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cards: list[dict[str, Any]], **system: Any) -> None:
        self.cards = cards
        self.handles = {card["UUID"]: card for card in cards if isinstance(card.get("UUID"), str)}
        self.slices = {s["UUID"]: s for card in cards for s in card.get("slices", ())}
        self.open = self.loads = 0  # sessions now, and how often the first one was opened
        answers = {
            "nvmlInit": lambda: self.opened(1),
            "nvmlShutdown": lambda: self.opened(-1),
            "nvmlSystemGetDriverVersion": lambda: system.get("driver", "580.95.05"),
            "nvmlSystemGetCudaDriverVersion_v2": lambda: system.get("cuda", 13000),
            "nvmlDeviceGetCount": lambda: len(cards),
            "nvmlDeviceGetHandleByIndex": self.by_index,
            "nvmlDeviceGetHandleByUUID": self.by_uuid,
            "nvmlDeviceGetMigMode": lambda card: (1, 1) if "slices" in card else given(card.get("MigMode", missing())),
            "nvmlDeviceGetMaxMigDeviceCount": lambda card: 7,
            "nvmlDeviceGetMigDeviceHandleByIndex": self.slice,
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda s: next(c for c in cards if s in c["slices"]),
            "nvmlDeviceGetIndex": lambda card: cards.index(card),
        }
        for query in (*("Name", "UUID", "MemoryInfo", "ComputeRunningProcesses", "CudaComputeCapability"), *STATE):
            answers[f"nvmlDeviceGet{query}"] = lambda card, *_, query=query: given(card.get(query, missing()))
        for name, stand_in in answers.items():
            monkeypatch.setattr(pynvml, name, stand_in)

    def opened(self, change: int) -> None:
        self.loads += self.open == 0 and change == 1
        self.open += change
        assert self.open >= 0

    def by_index(self, index: int) -> Any:
        return given(self.cards[index].get("handle", self.cards[index]))

    def by_uuid(self, uuid: str) -> Any:
        if uuid in self.slices:
            return given(self.slices[uuid].get("handle", self.slices[uuid]))
        return self.handles[uuid] if uuid in self.handles else given(pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND))

    def slice(self, card: dict[str, Any], number: int) -> Any:
        if number >= len(card["slices"]):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return card["slices"][number]


def missing() -> Exception:
    return pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def given(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


def card(number: int = 0, **over: Any) -> dict[str, Any]:
    return {
        "Name": "NVIDIA H100 80GB HBM3", "UUID": f"GPU-{number}4b4a5c1e",
        "MemoryInfo": types.SimpleNamespace(total=81559 << 20, used=4 << 20), "ComputeRunningProcesses": [],
        "CudaComputeCapability": (9, 0),
    } | over  # fmt: skip


def in_mig_mode(**over: Any) -> dict[str, Any]:
    """A card in MIG mode as a container sees it, which may read neither its memory nor its processes."""
    refused = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
    part = card() | {
        "Name": "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "UUID": MIG,
        "MemoryInfo": types.SimpleNamespace(total=40448 << 20, used=16 << 20),
        "CudaComputeCapability": missing(),  # of a slice NVML does not say it
    }
    return card(MemoryInfo=refused, ComputeRunningProcesses=refused, slices=[part | over])


def levels(checks: list[doctor.Check], name: str) -> list[tuple[str, str]]:
    return [(check.level, check.text) for check in checks if check.name == name]


def test_a_lost_card_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lost = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    Driver(monkeypatch, [card(0), card(1, handle=lost), card(2, MemoryInfo=lost, ComputeRunningProcesses=lost)])
    whole, gone, half = machine.gpus()
    assert (whole.name, whole.memory_total, whole.processes, whole.problem) == (
        "NVIDIA H100 80GB HBM3", 81559 << 20, (), None,
    )  # fmt: skip
    assert (gone.index, gone.name, gone.uuid, gone.memory_total, gone.processes) == (1, None, None, None, None)
    assert gone.problem == half.problem == "GPU is lost"
    assert half.name == whole.name and half.memory_total is None and half.processes is None
    checks = doctor.doctor(tmp_path, {})
    assert [level for level, _ in levels(checks, "gpu 0")] == ["ok"]
    assert [level for level, _ in levels(checks, "gpu 1")] == ["problem"]
    assert "GPU is lost" in levels(checks, "gpu 1")[0][1]
    assert [one.index for one in machine.visible_gpus({"CUDA_VISIBLE_DEVICES": "0,2"})] == [0, 2]
    assert machine.uuids(machine.visible_gpus({"CUDA_VISIBLE_DEVICES": "0"})) == ["GPU-04b4a5c1e"]
    assert machine.uuids([whole, gone]) == []


@pytest.mark.parametrize("named", [{}, {"CUDA_VISIBLE_DEVICES": MIG}, {"CUDA_VISIBLE_DEVICES": "0"}])
def test_a_mig_slice_is_a_device_with_its_own_name_and_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: dict[str, str]
) -> None:
    Driver(monkeypatch, [in_mig_mode()])
    (seen,) = machine.visible_gpus(named)
    assert (seen.uuid, seen.name, seen.memory_total) == (MIG, "NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40448 << 20)
    assert (seen.index, seen.capability, seen.problem) == (0, (9, 0), None)
    assert machine.uuids([seen]) == [MIG]
    assert machine.again([seen]) == [seen]
    checks = doctor.doctor(tmp_path, named)
    assert [level for level, _ in levels(checks, "gpu 0")] == ["note", "note"]
    assert "Insufficient Permissions" in levels(checks, "gpu 0")[0][1]
    assert MIG in levels(checks, "gpu 0")[1][1]
    assert "1 slice(s): NVIDIA H100 80GB HBM3 MIG 3g.40gb of 39.5 GiB" in levels(checks, "gpu 0")[1][1]


@pytest.mark.parametrize("name", [MIG, OLD_MIG])
def test_a_mig_slice_that_may_not_be_asked_is_still_a_cuda_device(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    Driver(monkeypatch, [in_mig_mode(UUID=name, handle=pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION))])
    (seen,) = machine.visible_gpus({"CUDA_VISIBLE_DEVICES": name})
    assert (seen.uuid, seen.name, seen.memory_total, seen.processes) == (name, None, None, None)
    assert seen.problem is not None and "Insufficient Permissions" in seen.problem
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
    monkeypatch.setattr(machine, "torch_cuda", lambda: "12.8")
    compose.detect.cache_clear()
    assert compose.detect() == "cuda"
    compose.detect.cache_clear()


def test_nvml_is_opened_once_while_trials_run_and_closed_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = Driver(monkeypatch, [card()])
    with attempt.Launcher("cold", tmp_path / "templates") as launcher:
        for _ in range(3):
            (seen,) = machine.again(machine.visible_gpus({}))
            assert launcher.occupancy.taken([seen], set, lambda seconds: None) is None
        assert (driver.loads, driver.open) == (1, 1)
    assert (driver.loads, driver.open) == (1, 0)


@pytest.mark.parametrize(("told", "level", "said"), cases("gpu_states"))
def test_doctor_says_what_state_a_card_is_in_and_where_nvml_says_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str, level: str, said: str
) -> None:
    Driver(monkeypatch, [card(**json.loads(told))])
    ((found, text),) = levels(doctor.doctor(tmp_path, {}), "gpu 0 state")
    assert found == level and said in text
    Driver(monkeypatch, [card(CpuAffinity=[0x3, 1])])
    assert machine.cpus_near(machine.gpus()[0]) == (0, 1, 64)


def test_without_a_driver_nothing_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", none)
    assert machine.gpus() == machine.visible_gpus({"CUDA_VISIBLE_DEVICES": MIG}) == []


def test_an_outdated_module_of_the_same_name_is_said_with_its_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """pynvml 8 and nvidia-ml-py3 have no compute capability and return bytes."""
    Driver(monkeypatch, [card(Name=b"Tesla T4", UUID=b"GPU-1")])
    assert machine.nvml_problem() is None
    monkeypatch.delattr(pynvml, "nvmlDeviceGetCudaComputeCapability")
    monkeypatch.delattr(pynvml, "nvmlDeviceGetMigMode")
    (seen,) = machine.gpus()
    assert (seen.name, seen.uuid, seen.capability) == ("Tesla T4", "GPU-1", None)
    found = levels(doctor.doctor(tmp_path, {}), "nvml")
    assert [level for level, _ in found] == ["problem"]
    assert "pip uninstall -y pynvml" in found[0][1]
    monkeypatch.delattr(pynvml, "nvmlInit")
    assert machine.gpus() == []


@parametrized("visible_gpus")
def test_ranks_beyond_the_visible_cards(visible: int, ranks: int, reason: str | None) -> None:
    assert machine.too_many_ranks(visible, ranks) == reason


@pytest.mark.parametrize(("driver", "driver_cuda", "torch", "cuda", "capability", "said"), cases("drivers"))
def test_driver_torch_and_card_go_together_or_doctor_says_why_not(
    driver: str, driver_cuda: str, torch: str, cuda: str, capability: str, said: str
) -> None:
    """Any driver of the same major version does; 535 with CUDA 13 is the forward compatibility package's."""
    major, _, minor = capability.partition(".")
    one = machine.Gpu(0, "x", "GPU-1", driver, 1, 0, (), None if major == "-" else (int(major), int(minor)))
    known = None if driver_cuda == "-" else int(driver_cuda)
    found = doctor.compatible(driver, known, torch, None if cuda == "-" else cuda, [one])
    assert " ".join(f"{check.name.replace(' ', '_')}={check.level}" for check in found) == said
    assert all("install" in check.text for check in found if check.level == "problem")


@parametrized("torch_version_files")
def test_torch_is_read_without_being_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, version: str, cuda: str | None
) -> None:
    (tmp_path / "version.py").write_text(text)
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: spec)
    assert machine.torch_version() == version
    assert machine.torch_cuda() == cuda


def test_the_installed_torch_says_the_same_of_itself() -> None:
    torch = pytest.importorskip("torch", reason="compared with the torch that is installed")
    assert machine.torch_version() == torch.__version__
    assert machine.torch_cuda() == torch.version.cuda


def test_doctor_survives_what_a_machine_does_not_give(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(machine.psutil, "getloadavg", refuse)
    monkeypatch.setattr(machine.psutil, "virtual_memory", refuse)
    checks = doctor.doctor(tmp_path / "no" / "such" / "deep" / "folder", {})
    assert levels(checks, "disk")[0][1].endswith("folder")
    monkeypatch.setattr(doctor.shutil, "disk_usage", refuse)
    assert levels(doctor.doctor(tmp_path, {}), "disk")[0][0] == "problem"


def test_doctor_names_the_variables_that_no_worker_gets(tmp_path: Path) -> None:
    assert levels(doctor.doctor(tmp_path, {"PATH": "/bin"}), "environment") == []
    environ = {"CUDA_LAUNCH_BLOCKING": "1", "RANK": "0", "WORLD_SIZE": "1"}
    found = levels(doctor.doctor(tmp_path, environ), "environment")
    assert [level for level, _ in found] == ["note", "note"]
    assert any("CUDA_LAUNCH_BLOCKING" in text for _, text in found)
    assert any("RANK, WORLD_SIZE" in text for _, text in found)


def test_a_name_that_leaves_no_gpu_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Driver(monkeypatch, [card()])
    assert levels(doctor.doctor(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}), "visible")[0][0] == "problem"
    assert levels(doctor.doctor(tmp_path, {"CUDA_VISIBLE_DEVICES": "0"}), "visible")[0][0] == "ok"


def test_a_mixed_node_s_cards_are_counted_as_nvml_does_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CUDA by itself would call the H100 device 0."""
    Driver(monkeypatch, [card(0, Name="NVIDIA T400"), card(1)])
    fastest = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    for environ in ({}, {"CUDA_VISIBLE_DEVICES": "1"}, fastest):
        said = machine.counted_otherwise(environ)
        assert said and "0 is NVIDIA T400 (GPU-04b4a5c1e), 1 is NVIDIA H100 80GB HBM3 (GPU-14b4a5c1e)" in said
        assert levels(doctor.doctor(tmp_path, environ), "order") == [("note", said)]
    for environ in ({"CUDA_VISIBLE_DEVICES": "GPU-1"}, fastest | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}):
        assert machine.counted_otherwise(environ) is None
    Driver(monkeypatch, [card(0), card(1)])
    assert machine.counted_otherwise({}) is None


def test_a_card_is_told_by_the_uuid_that_cuda_says(monkeypatch: pytest.MonkeyPatch) -> None:
    own, body, part = "11111111-7d73", "4b4a5c1e-7d73-5e67-b4a4-0f6f6e4f0f3c", MIG.removeprefix("MIG-")
    Driver(monkeypatch, [in_mig_mode() | {"UUID": f"GPU-{own}"}])
    assert machine.is_same_gpu(f"GPU-{body}", body) is machine.is_same_gpu("GPU-4b4a", body.upper()) is True
    assert machine.is_same_gpu(MIG, part) is machine.is_same_gpu(MIG, own) is machine.is_same_gpu(OLD_MIG, body) is True
    for name, uuid in ((f"GPU-{own}", body), (MIG, body), (OLD_MIG, own)):
        assert machine.is_same_gpu(name, uuid) is False
    for name, uuid in (("0", body), ("MIG-unlisted", body), ("GPU-4b4a", "00000000-0000")):
        assert machine.is_same_gpu(name, uuid) is None


def test_of_several_cards_in_mig_mode_a_process_sees_one_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    slices = [machine.Gpu(n, "A100 MIG 1g.10gb", f"MIG-{n}", "580", 1, 0, ()) for n in range(2)]
    cards = [machine.Gpu(n, "A100", f"GPU-{n}", "580", 1, 0, (), slices=(f"MIG-{n}",)) for n in range(2)]
    monkeypatch.setattr(machine, "gpus", lambda: cards)
    monkeypatch.setattr(machine, "_slice", lambda uuid, found: slices[int(uuid[-1])])
    assert machine.visible_gpus({}) == slices[:1]
    assert machine.visible_gpus({"CUDA_VISIBLE_DEVICES": "1,0"}) == slices[1:]
    assert machine.too_many_ranks(len(machine.visible_gpus({})), 2) is not None
