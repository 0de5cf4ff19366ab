"""`vramsweep.estimate` is byte-identical to runner=custom, and says in words what it takes models as."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, TARGETS, refusal, tiny
from torch import nn
from traces import SIMULATED, trace_trial

import vramsweep
from vramsweep.harness.spec import trial_parser
from vramsweep.runners.predict import predicted_row

sys.path.insert(0, str(TARGETS))
from estimated import CASES, IDS


def custom_row(name: str, folder: Path, **over: Any) -> dict[str, Any]:
    target = f"{TARGETS / 'estimated.py'}:build"
    values = tiny(runner={"name": "custom", "target": target, "options": {"name": name}}, device=SIMULATED, **over)
    return predicted_row.predict(trial_parser.parse(values), *trace_trial(values, folder)).columns


def asked(name: str, **over: Any) -> Any:
    case = CASES[name]
    given = {"optimizer": case.optimizer, "loss": case.loss, "precision": case.precision, "gpu": "a100-80gb"}
    return vramsweep.estimate(**{"model": case.make, "batch": case.batch} | given | over)


def same(found: Any, row: dict[str, Any]) -> None:
    assert (found.peak_allocated, found.peak_reserved) == (row["peak_allocated_bytes"], row["peak_reserved_bytes"])
    assert found.parts == {name: row[f"peak_{name}_bytes"] for name in found.parts}
    assert {"parameters", "gradients", "optimizer_state", "activations", "recomputed_activations"} <= set(found.parts)
    assert sum(found.parts.values()) == found.peak_allocated


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_those_of_a_custom_target(name: str, tmp_path: Path) -> None:
    row, case = custom_row(name, tmp_path), CASES[name]
    live = case.make()
    same(asked(name), row)  # a function that makes it
    same(asked(name, model=live, optimizer=case.optimizer(live.parameters())), row)
    if name == "tied":
        assert live.out.weight is live.embed.weight


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch_norm", "llama"])
def test_ranks_of_ddp_need_what_they_need_in_a_custom_target(name: str, tmp_path: Path) -> None:
    row = custom_row(name, tmp_path, sharding="ddp", world_size=4)
    same(asked(name, model=CASES[name].make(), sharding="ddp", world_size=4), row)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2"])
def test_fsdp_leaves_each_rank_its_part(sharding: str) -> None:
    """Whole parameters: llama of estimated.py has 3 x 1000 x 128 outside and in its layers, by hand."""
    net = CASES["llama"].make()
    whole = sum(p.numel() for p in net.parameters()) * 4
    found = asked("llama", model=net, sharding=sharding, world_size=4)
    assert whole / 4 <= found.parts["parameters"] < whole / 4 * 1.05
    assert "communication" in str(found) and found.parts["optimizer_state"] < whole / 4 * 2.1


def test_a_result_answers_what_to_change() -> None:
    wide, asked = nn.Sequential(nn.Linear(1024, 65536), nn.ReLU(), nn.Linear(65536, 8)), vramsweep.estimate
    found = asked(wide, torch.zeros(32768, 1024))
    assert not found.fits and found.peak_reserved > 2 * 32768 * 65536 * 4 and "does not fit" in repr(found)
    fitting = found.largest("batch")
    assert fitting is not None and fitting < 32768 and found.phases[0].phase == "load"
    assert asked(wide, ((fitting, 1024), torch.float32)).fits
    assert not asked(wide, ((round(fitting * 1.07), 1024), torch.float32)).fits  # two values of its grid further
    changes = found.advise()
    half = next(one for one in changes if "batch 16384" in one.change)
    assert half.peak_reserved == asked(wide, torch.zeros(16384, 1024)).peak_reserved
    assert any("gpu=" in one.change and one.fits for one in changes)
    [setting] = [one for one in changes if "CONF=" in one.change]
    again = asked(wide, torch.zeros(32768, 1024), allocator=setting.change.partition("=")[2])
    assert (setting.peak_reserved, setting.fits) == (again.peak_reserved, again.fits)
    assert "<li>" in found._repr_html_()


@pytest.mark.slow
def test_a_language_model_tells_its_length_and_offers_checkpointing() -> None:
    found = vramsweep.estimate(CASES["llama"].make(), {n: torch.zeros(2, 96, dtype=torch.long) for n in IDS})
    assert found.largest("seq_len") == 2048  # the positions of its configuration
    assert any("checkpointing" in one.change for one in found.advise())
    page = found.timeline()
    assert "<html" in page.text and page._repr_html_().startswith("<iframe")


def test_masks_with_values_answer_as_they_do_on_a_gpu() -> None:
    batch = {name: torch.zeros(2, 96, dtype=torch.long) for name in IDS}
    net, mask = CASES["llama"].make(), torch.ones(2, 96, dtype=torch.long)
    more = vramsweep.estimate(net, batch | {"attention_mask": mask})
    assert more.parts["activations"] == vramsweep.estimate(net, batch).parts["activations"] + mask.nbytes
    unknown = vramsweep.estimate(net, batch | {"attention_mask": mask.to("meta")})
    assert unknown.not_covered[0].startswith("mask:")
    mask[0, :5] = 0
    assert vramsweep.estimate(net, batch | {"attention_mask": mask}).peak_allocated == unknown.peak_allocated


class Hooked(nn.Module):
    """A module whose forward somebody replaced by a function that uses it, with an optimizer in its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lock = nn.Linear(64, 64), threading.Lock()
        forward, inner = self.inner.forward, self.inner
        optimizers = {weight: torch.optim.Adam([weight], foreach=False) for weight in self.inner.parameters()}

        def update(weight: torch.Tensor) -> None:
            optimizers[weight].step()
            optimizers[weight].zero_grad()

        for weight in self.inner.parameters():
            weight.register_post_accumulate_grad_hook(update)
        self.inner.forward = lambda x: forward(x) + inner.weight.sum()  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_replaced_functions_and_hooks_work_on_the_twin() -> None:
    net = Hooked()
    found = vramsweep.estimate(net, torch.zeros(8, 64), torch.optim.SGD)
    states = sum(one.parts["optimizer_state"] for one in found.phases[-1:])
    assert found.parts["parameters"] == (64 * 64 + 64) * 4
    assert states >= 2 * (64 * 64 + 64) * 4 and all(weight.grad is None for weight in net.parameters())


def test_each_kind_of_model_is_taken_as_what_it_says() -> None:
    net, batch = nn.Sequential(nn.Linear(64, 64), nn.Conv1d(1, 1, 1)), torch.zeros(1, 64)
    plain = vramsweep.estimate(net, batch)
    assert [one.partition(":")[0] for one in plain.not_covered] == ["kernel_scratch", "loss"]
    compiled = vramsweep.estimate(torch.compile(net), batch)
    assert (
        compiled.not_covered[0].startswith("compiled_code: code that torch.compile")
        and compiled.peak_reserved == plain.peak_reserved
    )
    with torch.device("meta"):
        assert vramsweep.estimate(nn.Sequential(nn.Linear(64, 64), nn.Conv1d(1, 1, 1)), batch).parts == plain.parts
    half = vramsweep.estimate(net, batch.bfloat16(), precision="bf16_pure")
    assert half.parts["parameters"] * 2 == plain.parts["parameters"]


@pytest.mark.slow
def test_quantized_weights_count_as_they_are() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    bitsandbytes = pytest.importorskip("bitsandbytes")
    packed = nn.Sequential(bitsandbytes.nn.Linear4bit(256, 512, bias=False, compute_dtype=torch.bfloat16))
    assert "not quantized" in refusal(vramsweep.UserError, vramsweep.estimate, packed, torch.zeros(64, 256))
    integers = nn.Sequential(nn.Linear(256, 512, bias=False))
    quantize_(integers, Int8WeightOnlyConfig())
    for net, size in ((packed.to("cpu"), 256 * 512 // 2), (integers, 256 * 512)):
        found = vramsweep.estimate(nn.Sequential(net, nn.Linear(512, 8)), torch.zeros(64, 256))
        assert any(one.startswith("quantized:") for one in found.not_covered)
        assert size <= found.parts["parameters"] + found.parts["buffers"] < size * 1.2 + 4 * 513 * 8


NET = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("words", "over"),
    [
        ("vramsweep gpus", {"gpu": "l5"}), ("allowed: fp32", {"precision": "fp8"}), ("zero3", {"sharding": "zero3"}),
        ("needs a sharding", {"world_size": 2}), ("whole number", {"world_size": 0}), ("without tensors", {"batch": 1}),
        ("torch.nn.Module", {"model": "x"}), ("must return", {"model": lambda: 3}),
        ("expandable", {"allocator": "expand"}), ("reads a tensor", {"loss": lambda o, b: o.sum().item()}),
        ("none of the model's", {"optimizer": torch.optim.SGD(nn.Linear(4, 4).parameters())}),
        ("an instance, a class", {"optimizer": 3}), ("without a loss", {"model": nn.LSTM(4, 4)}),
        ("raised RuntimeError", {"batch": torch.zeros(2, 5)}), ("run the model once", {"model": nn.LazyLinear(4)}),
        ("of one floating dtype", {"batch": torch.zeros(2, 4, dtype=torch.long)}), ("(output, batch)", {
            "loss": nn.CrossEntropyLoss(), "batch": (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))}),
        ("no weight that is trained", {"model": nn.Linear(4, 4).requires_grad_(False)}),
        ("list of blocks", {"sharding": "fsdp2", "world_size": 2}),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_words(words: str, over: dict[str, Any]) -> None:
    told = refusal(vramsweep.UserError, vramsweep.estimate, **{"model": NET, "batch": torch.zeros(2, 4)} | over)
    assert words in told and len(told.splitlines()) <= 2


def test_divided_models_are_refused() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    net = torch.distributed.fsdp.fully_shard(nn.Linear(4, 4), mesh=mesh)
    assert "divided already" in refusal(vramsweep.UserError, vramsweep.estimate, net, torch.zeros(2, 4))


@pytest.mark.slow
def test_a_script_can_ask_as_its_main_module(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, vramsweep\n"
        "class Own(torch.nn.Linear): pass\n"
        "print(vramsweep.estimate(Own(64, 64), torch.zeros(8, 64), gpu='h100-80gb'))\n"
    )
    line = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False, env={"PYTHONPATH": str(ROOT)})
    assert "Own on h100-80gb, predicted: fits" in done.stdout, done.stderr
