"""Scripts on a simulated card, traced in this process: what they ask of torch, load and save is as on a real one."""

import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
from conftest import Run, parametrized, source
from torch import nn
from traces import signed as requests

from vramsweep.harness.spec import trial_parser
from vramsweep.harness.spec.trial import InvalidTrial
from vramsweep.runners.measure.dispatch_modes import LiveBytes
from vramsweep.runners.predict import make_trace, predicted_row
from vramsweep.runners.scripts import import_constants, traced_generation, traced_script
from vramsweep.runners.trace.trace_data import Trace

pytestmark = pytest.mark.deterministic

Traced = Callable[..., Any]
HALF_GIB = 1 << 29
NET = "nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.BatchNorm1d(64))"
LOOP = source("loop_of_a_net.txt")


def net() -> nn.Module:
    """NET."""
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.BatchNorm1d(64))


def command(words: str) -> dict[str, Any]:
    return commands.command(words, device={"name": "simulated", "gpu": "l4-24gb"})


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Traced:
    """Traces LOOP with its places filled."""
    monkeypatch.setattr(traced_script, "CARDLESS", ())  # takes seconds, and no script here uses it

    def run(before: str = "", loaded: str = "", after: str = "", conf: str = "", details: bool = False) -> Any:
        script = tmp_path / "loop.py"
        script.write_text(LOOP.format(before=before, net=NET, loaded=loaded, after=after))
        chosen = trial_parser.parse(command(f"PYTHON {script}") | {"allocator": {"name": "asked", "conf": conf}})
        return make_trace.trace_trial(chosen, chosen.device.card, tmp_path, traced_script)[int(details)]

    return run


def test_the_cache_is_emptied_where_the_script_does(traced: Traced) -> None:
    plain, emptied = traced(), traced(after="torch.cuda.empty_cache(); torch.cuda.memory.empty_cache()")
    assert plain.events.count(0) == 0 and emptied.events.count(0) == 6
    assert requests(emptied) == requests(plain)


def test_what_else_is_asked_of_the_card(traced: Traced) -> None:
    asked = """torch.cuda.random.set_rng_state_all(torch.cuda.get_rng_state_all())
    torch.cuda.set_rng_state(torch.cuda.random.get_rng_state())
    assert torch.zeros(8, pin_memory=True).to("cuda").is_cuda"""
    assert set(requests(traced(after=asked))) - {32, -32} == set(requests(traced()))


def test_a_model_that_the_script_drops_is_freed(traced: Traced) -> None:
    """64 MiB of weights, after a step that has seen them; what is left are the workspaces of cuBLAS."""
    step = "one(torch.ones(4, 4096, device='cuda')).sum().backward(); sgd.step(); del one, sgd"
    made = "one = nn.Linear(4096, 4096).cuda(); sgd = torch.optim.SGD(one.parameters(), lr=0.1)"
    assert requests(traced(before=f"{made}; {step}; assert torch.cuda.memory_allocated() < 2**25"))


# ---- torch's counters


@parametrized("counters_by_allocator")
def test_counters_are_those_of_the_setting_now(traced: Traced, conf: str, allocated: int, reserved: int) -> None:
    counted = f"ALLOCATED, RESERVED = {allocated}, {reserved}\n{source('counters_of_torch.txt')}"
    trace = traced(before=counted, conf=conf)
    settings = [{"allocator": {"name": "other", "conf": one}} for one in (conf, "max_split_size_mb:64")]
    here, other = (trial_parser.parse(command("PYTHON SCRIPTS/plain.py") | one) for one in settings)
    assert trace.serves(here) and not trace.serves(other) and traced().serves(other)  # which asked nothing


@pytest.mark.parametrize("name", ["bytes", "experts"])  # of whose masks the GPU alone knows the counts
def test_allocated_is_what_lives_on_a_cpu(traced: Traced, name: str) -> None:
    living = source(f"living_{name}.txt")
    with LiveBytes() as alive:
        here: dict[str, Any] = {"torch": torch, "nn": nn, "device": "cpu", "live": lambda: alive.live}
        exec(living, here)
    grown = [size - here["sizes"][0] for size in here["sizes"]]
    assert max(grown) > 100_000
    first = 'device, live = "cuda", lambda: torch.cuda.memory_stats()["requested_bytes.all.current"]'
    traced(before=f"{first}\n{living}\nassert [size - sizes[0] for size in sizes] == {grown}, sizes")


@pytest.mark.parametrize(
    ("error", "fits"), [("OutOfMemoryError", [False, True, False]), ("AcceleratorError", [True] * 3)]
)
def test_a_full_gpu_raises_where_the_script_handles_it(traced: Traced, error: str, fits: list[bool]) -> None:
    """24 GiB hold 20 GiB, and neither 40 nor 30. If the script handles no such error, the row says that all fails."""
    asked = f"""def fits(size):
    try:
        return torch.empty(size << 30, dtype=torch.uint8, device="cuda").is_cuda
    except torch.{error} as error:
        assert str(error).replace(" ", "_").startswith("CUDA_out_of_memory._Tried_to_allocate")
assert [bool(fits(size)) for size in (40, 20, 30)] == {fits}"""
    trace, about = traced(before=asked), traced(before=asked, details=True)
    ooms = None if all(fits) else 2
    assert max(trace.sizes) == (20 if ooms else 40) << 30 and bool(trace.answers) == bool(ooms)
    assert about.get("alloc_ooms") == ooms and bool(about["notes"]) == bool(ooms)


@parametrized("scripts_without_an_optimizer")
def test_a_script_without_an_optimizer_needs_what_it_needs_on_a_cpu(tmp_path: Path, after: str) -> None:
    script = tmp_path / "loop.py"
    made = "layers = nn.Sequential(nn.LayerNorm(4096), nn.GELU(), nn.LayerNorm(4096)).to(device)"
    script.write_text(f'import torch\nfrom torch import nn\ndevice = "cuda"\n{made}\n{after}')
    trial = trial_parser.parse(command(f"PYTHON {script}"))
    trace, about = make_trace.trace_trial(trial, trial.device.card, tmp_path, traced_script)
    with LiveBytes() as alive:
        before = alive.live
        exec(f"{made}\n{after}", {"torch": torch, "nn": nn, "device": "cpu"})
    found = predicted_row.predict(trial, trace, about).columns
    assert (found["peak_requested_bytes"], found["parameters"]) == (alive.peak - before, 4 * 4096)
    assert found["step_growth_bytes"] is None and "no optimizer step" in found["notes"][-1]


def test_a_script_that_ends_by_a_full_gpu_is_traced_without_the_error(traced: Traced) -> None:
    asked = 'try: torch.empty(40 << 30, dtype=torch.uint8, device="cuda")\nexcept Exception: raise SystemExit(1)'
    assert max(traced(before=asked).sizes) == 40 << 30


# ---- values


def test_arrays_and_lists_have_the_values_that_are_known(traced: Traced) -> None:
    notes = traced(before=source("arrays_of_tensors.txt"), details=True)["notes"]
    found = [re.findall(r"it got nan|it got 0|\d times", note) for note in notes]
    assert found == [["2 times", "it got nan"], ["3 times", "it got 0"]]
    assert traced(after="print(float(net[0].weight.cpu().sum()))", details=True)["notes"]
    assert traced(details=True)["notes"] is None


def test_a_forward_pass_gets_no_whole_numbers_that_are_not_known(traced: Traced) -> None:
    routed = """class Routed(nn.Module):
    def forward(self, x):
        counts = (x > 0).sum(0).tolist()
        return x[: counts[0]]
net = nn.Sequential(net, Routed())"""
    with pytest.raises(InvalidTrial, match="reads a tensor's value"):
        traced(loaded=routed)


# ---- the host's memory


@parametrized("large_tensors")
def test_what_is_large_takes_no_memory_here(traced: Traced, made: str) -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    except OSError:
        pytest.skip("this kernel does not tell a process's peak")
    before = _resident("VmRSS")
    trace = traced(before=f"large = {made}")
    assert HALF_GIB in trace.sizes
    assert _resident("VmHWM") - before < HALF_GIB // 4


def _resident(name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


# ---- files


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """States of NET, and data, as a training left them; `old.pt` is in the format of torch before 1.6."""
    safetensors = pytest.importorskip("safetensors.torch")
    layers = net()
    state = layers.state_dict()
    torch.save(state, tmp_path / "state.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save(dict(layers.named_parameters()), tmp_path / "parameters.pt")
    torch.save(layers, tmp_path / "module.pt")
    safetensors.save_file(state, tmp_path / "state.safetensors")
    data = {"ids": torch.arange(60).view(3, 20), "count": torch.tensor(7)}
    torch.save(data, tmp_path / "data.pt")
    torch.save(data, tmp_path / "old_data.pt", _use_new_zipfile_serialization=False)
    return tmp_path


@parametrized("loaded_weights")
def test_weights_from_a_file_are_on_the_card_once(traced: Traced, checkpoint: Path, loaded: str) -> None:
    assert requests(traced(loaded=loaded.format(checkpoint))) == requests(traced())


def signed_until_the_end(trace: Trace) -> list[int]:
    """Return the requests without what is freed when the script is left."""
    return requests(trace, 0, trace.marks[-1].end)


def test_what_is_loaded_to_the_card_is_there(traced: Traced, checkpoint: Path) -> None:
    loaded = f'state = torch.load("{checkpoint}/parameters.pt", "cuda"); net.load_state_dict(state, strict=False)'
    sizes = [value.nbytes for value in net().parameters()]
    plain, twice = (signed_until_the_end(one) for one in (traced(), traced(loaded=loaded)))
    assert twice == [*sizes, *plain]
    moved = f'net = torch.load("{checkpoint}/module.pt", torch.device("cuda"), weights_only=False)'
    assert sorted(signed_until_the_end(traced(loaded=moved))) == sorted(plain)


@pytest.mark.parametrize(("name", "place"), [("data.pt", "None"), ("data.pt", '"cuda"'), ("old_data.pt", '"cuda"')])
def test_data_from_a_file_has_its_values(traced: Traced, checkpoint: Path, name: str, place: str) -> None:
    before = f"""data = torch.load("{checkpoint}/{name}", {place})
assert data["ids"].is_cuda == ({place} == "cuda")
assert data["count"].item() == 7 and data["ids"].to("cuda")[1].tolist() == list(range(20, 40))"""
    traced(before=before)


def test_a_checkpoint_is_not_written_and_hinders_nothing(traced: Traced, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    library = types.ModuleType("saves_by_its_own_name")  # imported before the script runs, as transformers is
    library.save_file, library.save = safetensors.save_file, torch.save  # type: ignore[attr-defined]
    sys.modules[library.__name__] = library
    before = f"""import saves_by_its_own_name as library
import safetensors.torch
out = "{tmp_path}/" """
    after = """safetensors.torch.save_model(net, out + "model")
    library.save_file({"bias": net[0].bias}, out + "bias")
    library.save(net, out + "net")
    assert safetensors.torch.save({"bias": net[0].bias}) == b"" """
    try:
        saved = traced(before=before, after=after)
    finally:
        del sys.modules[library.__name__]
    assert {path.name for path in tmp_path.iterdir()} == {"loop.py", "output", "progress.jsonl", "watch.json"}
    assert requests(saved) == requests(traced())
    safetensors.save_file({"a": torch.ones(2)}, tmp_path / "afterwards")
    assert safetensors.load_file(tmp_path / "afterwards")["a"].tolist() == [1, 1]


def test_tensors_have_an_address_where_they_share_memory(traced: Traced) -> None:
    after = """first, other = net[0].weight, net[1].weight
    assert first.data_ptr() == first.detach().data_ptr() == first.untyped_storage().data_ptr() != other.data_ptr()
    assert first[1].data_ptr() - first.data_ptr() == 64 * 4
    assert torch.zeros(0, device="cuda").data_ptr() == 0 and torch.zeros(3).data_ptr() % 4 == 0"""
    traced(after=after)


@pytest.mark.slow
def test_checkpoints_of_libraries_hinder_no_prediction(run_sweep: Run, tmp_path: Path) -> None:
    script = tmp_path / "saves.py"
    script.write_text(source("script_that_saves.txt"))
    clm = f"{sys.executable} {commands.SCRIPTS}/clm.py --report_to none --max_steps 100 --save_steps 2"
    clm += f" --output_dir {tmp_path}/trainer --save_strategy"
    loop = f"{sys.executable} {script}"
    saved, plain, trainer, without = run_sweep(
        command(f"{loop} save {tmp_path}/loop"), command(f"{loop} leave"), command(f"{clm} steps"), command(f"{clm} no")
    )
    assert [row["reason"] for row in (saved, plain, trainer, without)] == [None] * 4
    for one, other in ((saved, plain), (trainer, without)):
        assert one["peak_allocated_bytes"] == other["peak_allocated_bytes"]
        assert one["parameters"] == other["parameters"]
    written = {path.suffix for path in tmp_path.rglob("*") if path.is_file() and tmp_path / "t" not in path.parents}
    assert (tmp_path / "loop" / "model").is_dir() and written <= {".py", ".json", ".md"}


def test_generated_text_is_as_long_as_allowed(
    traced: Traced, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    after = """if step == 1:
        from transformers import LlamaConfig, LlamaForCausalLM
        sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=1, pad_token_id=0)).cuda()
        torch.cuda.reset_peak_memory_stats()
        ids = model.generate(torch.full((4, 8), 5).cuda(), max_new_tokens=40)
        assert ids.shape == (4, 48) and (ids[:, :8] == 5).all() and not ((ids == 0) | (ids == 1)).any()
        assert not torch.isnan(torch.rand(3, device="cuda")).all()
        print("peak", torch.cuda.max_memory_allocated())
        more = model.generate(ids, max_new_tokens=20, return_dict_in_generate=True).sequences
        assert more.shape == (4, 68) and torch.equal(more[:, :48], ids)
        kept = {"output_scores": True, "return_dict_in_generate": True}
        assert len(model.generate(ids[:, :8], max_new_tokens=9, **kept).scores) == 9"""
    skipped = traced(after=after)
    monkeypatch.setattr(traced_generation, "DECODED", 40)  # so that the library's own loop decodes each token
    whole = traced(after=after)
    none = "0 of 9 tokens"
    details = [one.not_covered["decoding"] for one in (skipped, whole)]
    assert details == [["33 of 40 tokens", "13 of 20 tokens", none], ["0 of 40 tokens", "0 of 20 tokens", none]]
    assert len(skipped.events) < len(whole.events) / 2
    fewer, more = (int(line.split()[1]) for line in capsys.readouterr().out.splitlines() if line.startswith("peak"))
    assert more - fewer == 4 * 48 * 8 - 512  # ids of 48 tokens, and the block of 15


# ---- imports, which a script makes all the time


def test_an_import_that_finds_no_library_costs_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "parts_of_a_script"
    package.mkdir()
    (package / "__init__.py").write_text("def ask():\n    from .sub import X\n    from . import sub\n    return X\n")
    (package / "sub.py").write_text("X = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    looks: list[str] = []
    monkeypatch.setattr(import_constants, "_library", lambda root: bool(looks.append(root)))
    end = import_constants.collect([])
    try:
        import parts_of_a_script as parts  # type: ignore[import-not-found]

        assert [parts.ask() for _ in range(3)] == [1, 1, 1]
        for _ in range(3):
            with pytest.raises(ModuleNotFoundError):
                import not_installed_anywhere  # type: ignore[import-not-found]  # noqa: F401
    finally:
        end()
    assert looks == ["parts_of_a_script", "not_installed_anywhere"]
