"""The CUDA branches of the instruments, on a stand-in for the card, so that the first run on one meets no typo.

Only the lowest calls are replaced (torch._C where torch's own wrapper can run without a card, else torch.cuda; NVML's
functions by their names, which must exist). What a card answers is made up; what the meter makes of it is tested.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch
from conftest import parametrized, tiny

from vramsweep.harness.machine import machine
from vramsweep.harness.messages.errors import EnvironmentFault
from vramsweep.harness.process.attempt import read_result
from vramsweep.harness.rows import outcome
from vramsweep.harness.rows.quality_flags import flags
from vramsweep.harness.rows.schema import complete_row
from vramsweep.harness.spec import trial as trials
from vramsweep.harness.spec import trial_parser
from vramsweep.runners.loops import torch_loop
from vramsweep.runners.measure import counters, flop_step
from vramsweep.runners.measure.counters import Clock, Nvml
from vramsweep.runners.measure.rank_instruments import Gauges
from vramsweep.runners.measure.step_meter import REPLAYED, Meter, StepMeter, meter_spec
from vramsweep.runners.worker import run_rank, worker

MIB = 1 << 20
UUID = "GPU-stand-in"


class Card:
    """Counters that move as an allocator's would, and what was asked of it."""

    def __init__(self) -> None:
        self.current, self.peak, self.marks, self.energy = 100 * MIB, 100 * MIB, 0, 5000
        self.calls: list[Any] = []
        self.devices: set[Any] = set()  # whose memory, stream and end were asked for
        self.memory = types.SimpleNamespace(total=80 << 30, used=200 * MIB, free=79 << 30)  # NVML's, others' use
        self.pids = [os.getpid()]
        self.waits = False  # every step waits for the device

    def touch(self) -> None:
        """Whoever first does anything on a device makes a context there."""
        self.memory.used = 700 * MIB

    def use(self, size: int) -> None:
        """Something is allocated and freed again."""
        self.peak = max(self.peak, self.current + size)

    def stats(self, device: Any = None) -> dict[str, Any]:
        self.devices.add(device)
        names = ("allocated", "active", "requested", "reserved", "inactive_split")
        return {f"{n}_bytes": {"all": {"current": self.current, "peak": self.peak}} for n in names} | {
            "num_alloc_retries": 2,
            "num_ooms": 0,
        }

    def reset(self, device: Any = None) -> None:
        self.devices.add(device)
        self.peak = self.current

    def snapshot(self, *_: Any) -> dict[str, Any]:
        self.calls.append("snapshot")
        settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": False}
        return {"segments": [], "device_traces": [[]], "allocator_settings": settings}


class Event:
    """torch.cuda.Event; `issued` and `reached` are the times of a mark on the host and on the GPU, in seconds."""

    made, synchronized = 0, 0.0
    issued, reached = staticmethod(lambda mark: 0.375 * mark), staticmethod(lambda mark: 0.625 * mark)

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.number = -1

    def record(self, stream: Any = None) -> None:
        self.number = Event.made
        Event.made += 1

    def synchronize(self) -> None:
        assert self.number >= 0
        Event.synchronized = self.reached(self.number)

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (self.reached(other.number) - self.reached(self.number))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """A card in place of torch.cuda's and NVML's."""
    card = Card()
    for name, stand_in in {
        "init": lambda: card.touch(),
        "is_available": lambda: True,
        "set_device": lambda device: card.touch(),
        "synchronize": lambda device=None: card.devices.add(device),
        "current_stream": lambda device=None: card.devices.add(device),
        "get_allocator_backend": lambda: "native",
        "get_device_properties": lambda device: types.SimpleNamespace(name="NVIDIA H100", uuid="stand-in"),
        "memory_stats_as_nested_dict": card.stats,
        "reset_peak_memory_stats": card.reset,
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for name in ("made", "synchronized"):
        monkeypatch.setattr(Event, name, 0)
    host = types.SimpleNamespace(perf_counter=lambda: 70 + max(Event.issued(Event.made), Event.synchronized))
    monkeypatch.setattr(counters, "time", host)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", card.snapshot, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_record_memory_history", lambda enabled, *_, **__: card.calls.append(enabled), raising=False
    )

    def energy(_: Any) -> int:
        card.energy += 1500
        return card.energy

    for name, stand_in in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "999.1",
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetMemoryInfo": lambda _: types.SimpleNamespace(**vars(card.memory)),
        "nvmlDeviceGetName": lambda _: "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetUUID": lambda _: UUID,
        "nvmlDeviceGetComputeRunningProcesses": lambda _: [types.SimpleNamespace(pid=pid) for pid in card.pids],
        "nvmlDeviceGetTotalEnergyConsumption": energy,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda _: pynvml.nvmlClocksEventReasonSwPowerCap | 1,  # 1: idle
        "nvmlDeviceGetTemperature": lambda _, sensor: 51,
        "nvmlDeviceGetClockInfo": lambda _, clock: (345 if Event.synchronized else 1965) if clock == 1 else 5001,
        "nvmlDeviceGetMaxClockInfo": lambda _, clock: 1980 if clock == pynvml.NVML_CLOCK_SM else 5001,
    }.items():
        monkeypatch.setattr(pynvml, name, stand_in)
    return card


def on_cuda(conf: str = "", **over: Any) -> trials.Trial:
    allocator = {"name": "custom", "conf": conf} if conf else {"name": "default", "conf": ""}
    return trial_parser.parse(tiny(device={"name": "cuda"}, allocator=allocator, **over))


def classified(folder: Path) -> tuple[str, str | None]:
    """Outcome and reason of a worker that fails."""
    worker._rank(on_cuda(), folder)
    found, _ = read_result(folder)
    return outcome.classify(outcome.Evidence(exit_code=1, result=found))


def train(card: Card, trial: trials.Trial, meter: StepMeter, fails_at: int | None = None) -> None:
    """Steps that use 10 MiB forward, 30 backward, 20 in the optimizer."""
    weight = torch.ones(8, requires_grad=True)
    card.use(5 * MIB)
    meter.built(lambda: {"optimizer_effective": "none"})
    for index in range(trial.steps()):
        meter.step_begin()
        card.use(10 * MIB)
        loss = (weight[None] @ weight[:, None]).sum()
        if card.waits:
            torch.cuda.synchronize()
        if index == fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more")
        loss.register_hook(lambda _: card.use(30 * MIB))
        loss.backward()
        card.use(20 * MIB)
        meter.step_end(loss)


def drive(card: Card, folder: Path, **over: Any) -> dict[str, Any]:
    """The meter around those steps."""
    trial = on_cuda(**over)
    meter = Meter(meter_spec(trial), folder, Gauges(torch.device("cuda", 0)), 0)
    train(card, trial, meter)
    return meter.columns()


def test_a_row_of_the_stand_in(card: Card, tmp_path: Path) -> None:
    values = drive(card, tmp_path)
    values.pop("steps_s")
    row = complete_row(values)  # every column exists and has its type
    own = 100 * MIB
    assert row["load_peak_allocated_bytes"] == own + 5 * MIB
    phases = {p: row[f"{p}_peak_reserved_bytes"] - own for p in ("forward", "backward", "optimizer")}
    assert phases == {"forward": 10 * MIB, "backward": 30 * MIB, "optimizer": 20 * MIB}
    assert row["peak_allocated_bytes"] == row["inactive_split_peak_bytes"] == own + 30 * MIB
    assert row["step_times_s"] == [0.625] * row["measured_steps"]
    assert row["tokens_per_s"] == pytest.approx(2 * 32 / 0.625)
    assert row["gpu_energy_j"] == 1.5
    assert row["gpu_power_w"] == pytest.approx(1.5 / 1.25)
    assert row["throttle_reasons"] == ["sw_power_cap"]
    assert row["alloc_retries"] == 2
    assert row["device_used_bytes"] == 700 * MIB
    assert row["device_baseline_bytes"] == 200 * MIB  # without the context that we made
    assert row["foreign_processes"] == []
    assert row["gpu_uuid"] == UUID and row["driver_version"] == "999.1" and row["gpu_sm_clock_mhz"] == 1965
    assert (row["gpu_sm_clock_before_mhz"], row["gpu_sm_clock_max_mhz"]) == (1965, 1980)
    assert row["host_elapsed_s"] == 1.25
    assert (row["issue_fraction"], row["bound_by"]) == (0.6, "gpu")
    assert flags(row) == ["allocation_retries"]
    assert row["peak_flops"] == 67e12
    assert row["mfu"] is not None and row["memory_source"] == "cuda_allocator"
    assert row["rss_baseline_bytes"] is None


@pytest.mark.parametrize(("issued", "reached", "fraction", "by"), [
    ([0.0, 0.62, 1.62, 2.62], [0.0, 1.0, 2.0, 3.0], 0.62, "gpu"),  # the queue is full from the second step on
    ([0.0, 1.0, 2.0, 3.0], [0.0, 1.02, 2.02, 3.02], 1.0, "host"),
    ([0.0, 1.0, 2.0, 3.0], [0.0, 1.3, 2.3, 3.3], 1.0, None),  # a few operators at the end take the GPU long
    ([0.0, 1.0, 1.6, 2.6], [0.0, 1.1, 2.1, 3.1], 1.0, None),  # the first step disturbed the host
    ([0.0, 0.87, 1.87, 2.87], [0.0, 1.0, 2.0, 3.0], 0.87, None),
    ([0.0], [0.0], None, None),
])  # fmt: skip
def test_a_step_is_bound_by_the_gpu_if_the_host_is_far_ahead(
    card: Card, monkeypatch: pytest.MonkeyPatch, issued: list[float], reached: list[float], fraction: float, by: str
) -> None:
    monkeypatch.setattr(Event, "issued", staticmethod([*issued, 9.0].__getitem__))
    monkeypatch.setattr(Event, "reached", staticmethod(reached.__getitem__))
    clock = Clock(torch.device("cuda", 0))
    for _ in issued:
        clock.mark()
    found = clock.issue_columns(clock.times())
    assert found == {"issue_fraction": None if fraction is None else pytest.approx(fraction), "bound_by": by}


@pytest.mark.parametrize(("waits", "queue", "by"), [(False, 1024, "host"), (True, 1024, None), (False, 0, None)])
def test_the_host_is_the_limit_only_if_it_surely_waits_for_nothing(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool, queue: int, by: str | None
) -> None:
    for name in ("issued", "reached"):
        monkeypatch.setattr(Event, name, staticmethod(lambda mark: 0.25 * mark))
    monkeypatch.setattr(flop_step, "QUEUE", queue)
    card.waits = waits
    row = drive(card, tmp_path)
    assert (row["issue_fraction"], row["bound_by"]) == (1.0, by)
    assert row["gpu_energy_j"] is row["gpu_power_w"] is None  # of half a second
    assert ("host_bound" in flags(row)) == (by == "host")


def test_only_the_card_that_is_trained_on_is_asked(card: Card, tmp_path: Path) -> None:
    second = torch.device("cuda", 1)  # which nobody makes the current one
    trial = on_cuda()
    train(card, trial, Meter(meter_spec(trial), tmp_path, Gauges(second), 0))
    assert card.devices == {second}


def test_what_the_driver_does_not_give_is_unknown(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in ("TotalEnergyConsumption", "CurrentClocksEventReasons", "ClockInfo", "MaxClockInfo"):
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", refused)
    row = drive(card, tmp_path)
    assert row["gpu_energy_j"] is row["gpu_power_w"] is row["throttle_reasons"] is row["gpu_sm_clock_mhz"] is None
    assert row["gpu_sm_clock_before_mhz"] is row["gpu_sm_clock_max_mhz"] is None
    assert row["gpu_temperature_c"] == 51


def test_the_recorded_step_goes_through_torch_s_own_wrappers(card: Card, tmp_path: Path) -> None:
    drive(card, tmp_path, record=True)
    assert [call for call in card.calls if call in ("all", "snapshot", None)] == ["all", "snapshot", None]
    assert pickle.loads((tmp_path / "recording.pickle").read_bytes())["device_traces"] == [[]]


def test_an_old_pynvml_that_lacks_queries_leaves_their_columns_unknown(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda _: 0x20)
    monkeypatch.delattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption")
    row = drive(card, tmp_path)
    assert row["throttle_reasons"] == ["sw_thermal_slowdown"]
    assert row["gpu_energy_j"] is None


def test_what_a_replayed_cuda_graph_hides_is_null(card: Card, tmp_path: Path) -> None:
    twice = {"name": "quick", "warmup_steps": 2, "measured_steps": 2}
    (tmp_path / "eager").mkdir()
    graphs, eager = drive(card, tmp_path, compile="max-autotune", protocol=twice), drive(card, tmp_path / "eager")
    hidden = {name for name in eager if eager[name] is not None and graphs.get(name) is None}
    hidden -= {"host_steal_fraction"}  # which the kernel counts in hundredths of a second
    phases = {f"{phase}_peak_allocated_bytes" for phase in ("forward", "backward", "optimizer", "step")}
    assert hidden == phases
    assert REPLAYED in graphs["notes"] and REPLAYED not in (eager["notes"] or ())


def test_whoever_came_during_the_measured_steps_is_foreign(card: Card, tmp_path: Path) -> None:
    card.pids = [os.getpid(), 1 << 30]  # a number that no container gives; process 1 may be of the tests' own session
    assert drive(card, tmp_path)["foreign_processes"] == [1 << 30]


@pytest.fixture
def runner(card: Card, monkeypatch: pytest.MonkeyPatch) -> dict[str, int | None]:
    """The steps above as those of the plain loop; the step named under "fails_at" runs out of memory."""
    fails: dict[str, int | None] = {"fails_at": None}
    monkeypatch.setattr(torch_loop, "run", lambda trial, device, meter, folder: train(card, trial, meter, **fails))
    return fails


def test_a_trial_on_the_stand_in_reads_its_settings_back(runner: dict[str, int | None], tmp_path: Path) -> None:
    columns = run_rank.run(on_cuda(), tmp_path)
    assert columns is not None
    assert columns["allocator_conf_effective"] == ""
    assert columns["rank_peak_reserved_bytes"] == [columns["peak_reserved_bytes"]]
    assert columns["worst_rank"] == 0 and columns["optimizer_effective"] == "none"
    with pytest.raises(run_rank.AllocatorMismatch, match="expandable_segments"):
        run_rank.run(on_cuda("expandable_segments:True"), tmp_path)


@pytest.mark.parametrize(("fails_at", "told"), [(4, "counts FLOPs"), (5, "records the allocator's events")])
def test_out_of_memory_after_the_measured_steps_is_a_note(
    runner: dict[str, int | None], tmp_path: Path, fails_at: int, told: str
) -> None:
    trial = on_cuda(record=True)
    whole = tmp_path / "whole"
    whole.mkdir()
    assert worker._rank(trial, whole) == 0
    runner["fails_at"] = fails_at
    assert worker._rank(trial, tmp_path) == 80  # which worker.main makes 0
    expected, result = (json.loads((folder / "result.json").read_text()) for folder in (whole, tmp_path))
    assert result["complete"] is True and "error" not in result
    row = result["values"]
    (note,) = row["notes"]
    assert told in note and "CUDA out of memory. Tried to allocate 2.00 GiB." in note and "more" not in note
    for name in ("peak_reserved_bytes", "tokens_per_s", "optimizer_effective", "measured_steps",
                 "allocator_conf_effective"):  # fmt: skip
        assert row[name] == expected["values"][name] is not None, name
    flops = row.get("hardware_flops_per_token")
    assert flops == (None if fails_at == 4 else expected["values"]["hardware_flops_per_token"])


def test_out_of_memory_in_a_measured_step_is_the_outcome(runner: dict[str, int | None], tmp_path: Path) -> None:
    runner["fails_at"] = 3
    assert worker._rank(on_cuda(), tmp_path) == 1
    result, _ = read_result(tmp_path)
    assert result is not None and "complete" not in result
    assert not [name for name in result["values"] if name.startswith(("peak_", "step_", "tokens"))]
    assert result["error"]["type"] == "torch.OutOfMemoryError"
    assert result["values"]["device_baseline_bytes"] == 200 * MIB  # what others held


@parametrized("unreported_settings")
def test_what_the_allocator_does_not_report_is_said_not_echoed(
    card: Card, monkeypatch: pytest.MonkeyPatch, conf: str, backend: str, settings: dict[str, Any], effective: str,
    unreported: str,
) -> None:  # fmt: skip
    note = f"the {backend} allocator does not report whether these took effect: {unreported}"
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    kept = {"PYTORCH_CUDA_ALLOC_CONF": conf, **settings}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": kept})
    assert run_rank.effective_allocator(on_cuda(conf)) == (effective, [note] if unreported else [])


def test_a_reported_setting_that_did_not_take_is_an_error(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(run_rank.AllocatorMismatch, match="requested cudaMallocAsync, in force native"):
        run_rank.effective_allocator(on_cuda("backend:cudaMallocAsync"))


def test_no_device_is_the_machine_s_fault_not_the_trial_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentFault, match="torch finds no CUDA device"):
        run_rank._device(on_cuda())


@parametrized("unusable_devices")
def test_cuda_that_does_not_start_is_the_machine_s_fault(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(torch.cuda, "set_device", fail)
    kind, reason = classified(tmp_path)
    assert kind == "environment"
    assert text in str(reason)


@parametrized("named_gpus")
def test_a_worker_that_cuda_gave_another_card_measures_nothing(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, uuid: str | None, refused: bool
) -> None:
    properties = types.SimpleNamespace(name="NVIDIA T400", **({} if uuid is None else {"uuid": uuid}))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch_loop, "run", lambda *_: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    found, reason = classified(tmp_path)
    assert (found == "environment") is refused
    assert ("gave this worker NVIDIA T400 (GPU-another-card)" in str(reason)) is refused


def test_an_old_pynvml_takes_and_gives_bytes(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pynvml 11.4.1 does: `c_char_p(uuid)` refuses text, and names come as bytes."""
    monkeypatch.delattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: ctypes.c_char_p(uuid))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda _: b"NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: b"470.1")
    facts = Nvml(torch.device("cuda", 0)).facts()
    assert (facts["gpu_name"], facts["driver_version"]) == ("NVIDIA H100 80GB HBM3", "470.1")


def test_once_cuda_has_started_libraries_read_the_cards_as_indices(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's map(int, CUDA_VISIBLE_DEVICES.split(",")); a slice has no index of its own."""
    one = machine.Gpu(3, "NVIDIA H100", UUID, "1", 80 << 30, 0, (), (9, 0))
    for named, found in (("GPU-st", "3"), ("MIG-of-it", "MIG-of-it")):
        cards = [replace(one, uuid=UUID if named.startswith("GPU-") else named)]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        monkeypatch.setattr(machine, "visible_gpus", lambda environ, cards=cards: cards)
        Gauges(torch.device("cuda", 0))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == found
