"""Every optimizer's state and temporaries, predicted, against what its own library makes on a CPU; bf16_master too."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import Run, tiny
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from traces import SIMULATED as A100
from traces import trace_trial
from transformers import AutoConfig, AutoModelForCausalLM

from vramsweep.harness import gpus, machine, techniques, trial
from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.harness.roofline import Work
from vramsweep.harness.trial import InvalidTrial, Trial
from vramsweep.runners import build, described, predict, run
from vramsweep.runners.dispatch import LiveBytes
from vramsweep.runners.kernels import work
from vramsweep.runners.measure import COMPILED_UNSEEN
from vramsweep.runners.shardings import zero
from vramsweep.runners.techniques import ao, bnb
from vramsweep.runners.trace import Trace

CPU = torch.device("cpu")
# GPT-2 has biases, embeddings that are trained and tied, and here sizes that no block divides.
ODD: dict[str, Any] = {
    "name": "odd",
    "model_type": "gpt2",
    "parameters": None,
    "max_positions": 64,
    "path": None,
    "config": {"vocab_size": 301, "n_embd": 60, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
PACKAGE = {entry.name: entry.packages[0].name for entry in techniques.entries("optimizer") if entry.packages}
PAGED = ("paged_adamw_8bit", "paged_adamw_32bit", "paged_lion_8bit")
COMPILED = ("adamw_torch_8bit", "adamw_torch_4bit")
EVERYWHERE = tuple(
    entry.name for entry in techniques.entries("optimizer") if "torch" in entry.runners and entry.name not in PAGED
)
EFFECTIVE = {
    "sgd": "SGD",
    "sgd_momentum": "SGD",
    "adafactor": "Adafactor",
    "adamw_bnb_8bit": "AdamW(8-bit)",
    "lion_32bit": "Lion(32-bit)",
    "lion_8bit": "Lion(8-bit)",
    "adamw_torch_8bit": "AdamW8bit",
    "adamw_torch_4bit": "AdamW4bit",
}


def values(which: str, **over: Any) -> dict[str, Any]:
    """The tiny trial, or the same of the odd model."""
    chosen = tiny(**over)
    if which == "odd":
        chosen["model"] = ODD
    return chosen


def library(name: str) -> None:
    """Skip where the optimizer's package is not installed; forget what it keeps for the whole process.

    bitsandbytes has a table of parameters by `id`, the compiler its frames: an earlier test's are not this one's.
    """
    if name in PACKAGE:
        package = pytest.importorskip(PACKAGE[name])
        gc.collect()
        if PACKAGE[name] == "bitsandbytes":
            package.optim.GlobalOptimManager.get_instance().initialize()
        else:
            torch._dynamo.reset()


def traced(folder: Path, which: str = "tiny", **over: Any) -> tuple[Trace, dict[str, Any]]:
    return trace_trial(values(which, device=A100, **over), folder)


def total(trace: Trace, category: str = "optimizer_state") -> int:
    """Bytes of all storages that there ever were of a category; of state those that are left."""
    events = trace.events[: trace.marks[-1].end] if category == "optimizer_state" else []
    freed = {-event - 1 for event in events if event < 0}
    sizes = zip(trace.sizes, trace.categories, strict=True)
    return sum(size for n, (size, name) in enumerate(sizes) if name == category and n not in freed)


def stored(tensors: Iterable[Any], device: str = "cpu") -> int:
    """Bytes of the storages of tensors, each once, those of wrappers included."""
    found: dict[int, int] = {}
    for tensor in tensors:
        for part in parts(tensor) if isinstance(tensor, torch.Tensor) else ():
            if part.device.type == device:
                found[part.untyped_storage()._cdata] = part.untyped_storage().nbytes()
    return sum(found.values())


def parts(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors that a tensor is made of."""
    wraps = hasattr(tensor, "__tensor_flatten__")
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]] if wraps else [tensor]


def state(optimizer: torch.optim.Optimizer, device: str = "cpu", counters: bool = False) -> int:
    """Bytes of an optimizer's state without its step counters, which are on the host unless a kernel needs them."""
    each = [(key, tensor) for held in optimizer.state.values() for key, tensor in held.items()]
    return stored((tensor for key, tensor in each if counters or key != "step"), device)


@contextlib.contextmanager
def uncompiled(name: str) -> Iterator[None]:
    """torchao's optimizers make their state and step without the kernel, which takes seconds to compile."""
    if name in COMPILED:
        with mock.patch("torchao.optim.adam.torch.compile", lambda *args, **kwargs: lambda *args: None):
            yield
    else:
        yield


def stepped(chosen: Trial) -> Any:
    """The trial's own optimizer after one step on a real model on a CPU."""
    torch.manual_seed(0)
    net = build.model(chosen, CPU)
    optimizer = build.optimizer(chosen, net.parameters(), CPU)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    with uncompiled(chosen.optimizer):
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("model", ["tiny", "odd"])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_state_is_the_library_s_to_the_byte(tmp_path: Path, name: str, model: str) -> None:
    library(name)
    optimizer = stepped(trial.parse(values(model, optimizer=name)))
    trace, details = traced(tmp_path, model, optimizer=name)
    assert total(trace) == state(optimizer, counters=name == "adamw_torch_fused")
    assert details["optimizer_effective"] == described.optimizer_name(optimizer) == EFFECTIVE.get(name, "AdamW")


@pytest.mark.parametrize("name", ["default", "adamw_bnb_8bit", "adamw_torch_8bit", "adamw_torch_4bit", "adafactor"])
def test_state_in_half_precision(tmp_path: Path, name: str) -> None:
    """8-bit state of small tensors is fp32 in bitsandbytes, and of the parameter's dtype in torchao."""
    library(name)
    optimizer = stepped(trial.parse(values("odd", optimizer=name, precision="bf16_pure")))
    assert total(traced(tmp_path, "odd", optimizer=name, precision="bf16_pure")[0]) == state(optimizer)


@pytest.mark.parametrize("name", [n for n in EVERYWHERE if n not in COMPILED])
def test_real_steps(tmp_path: Path, name: str) -> None:
    library(name)
    row = run.run(trial.parse(values("odd", optimizer=name)), tmp_path)
    assert row is not None
    assert row["optimizer_effective"] == EFFECTIVE.get(name, "AdamW")
    assert math.isfinite(row["loss_first"]) and math.isfinite(row["loss_last"])


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.timeout(600)
def test_real_compiled_steps(run_sweep: Run, name: str) -> None:
    """Also where every operator is watched, which `torch.compile` does not suffer; what it hides is null, and said."""
    library(name)
    (row,) = run_sweep(tiny(optimizer=name), isolation="warm", timeout_s=500)
    assert row["outcome"] == "ok", row["reason"]
    assert row["optimizer_effective"] == EFFECTIVE[name]
    assert math.isfinite(row["loss_last"])
    assert row["compile_s"] > 0 and row["hardware_flops_per_token"]
    assert row["optimizer_peak_allocated_bytes"] is None and COMPILED_UNSEEN in row["notes"]


def test_bf16_master_trains_where_bf16_alone_rounds_every_step_away() -> None:
    """Steps of 1e-5 are far less than half the distance of bf16 numbers near most weights, but they add up."""

    def changed(precision: str) -> float:
        chosen = trial.parse(tiny(precision=precision))
        torch.manual_seed(0)
        net = build.model(chosen, CPU)
        weight = net.model.embed_tokens.weight
        before = weight.detach().clone()
        optimizer = build.optimizer(chosen, net.parameters(), CPU)
        for _ in range(40):
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert weight.dtype is torch.bfloat16 and torch.isfinite(weight).all()
        return float((before != weight).float().mean())

    assert changed("bf16_master") > 0.95 > 0.3 > changed("bf16_pure") > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["default", "adamw_torch_fused", "adamw_torch_loop", "sgd", "sgd_momentum", "adafactor", "adamw_bnb_8bit"]
)
def test_bf16_master_has_half_weights_and_copies_beside_the_state(tmp_path: Path, name: str) -> None:
    library(name)
    real = stepped(trial.parse(values("odd", optimizer=name, precision="bf16_master")))
    copies = stored(real.masters)
    trace, details = traced(tmp_path, "odd", optimizer=name, precision="bf16_master")
    assert total(trace) == copies + state(real.optimizer, counters=name == "adamw_torch_fused")
    assert total(trace, "parameters") == stored(real.parameters) == copies // 2 == 2 * details["parameters"]
    assert total(trace, "gradients") == 3 * (2 + 4) * details["parameters"]  # three steps, in bf16 and cast
    wrapped = f"MasterWeights({EFFECTIVE.get(name, 'AdamW')})"
    assert details["optimizer_effective"] == described.optimizer_name(real) == wrapped
    row = run.run(trial.parse(values("odd", optimizer=name, precision="bf16_master")), tmp_path)
    assert row is not None and math.isfinite(row["loss_last"])


LARGE: dict[str, Any] = {"seq_len": 16, "micro_batch": 1, "model": {"config": {"vocab_size": 4096, "hidden_size": 128,
                         "intermediate_size": 320, "num_hidden_layers": 4, "num_attention_heads": 4}}}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "fp32") for name in ("adamw_torch_foreach", "adamw_torch_loop", "adafactor", "sgd_momentum")),
     *((name, "bf16_master") for name in ("adamw_torch_loop", "adamw_torch_foreach", "sgd"))],
)  # fmt: skip
def test_temporaries_are_those_of_the_library_on_a_cpu(tmp_path: Path, name: str, precision: str) -> None:
    """What a step needs beside weights, gradients and state, by a watch over every operator of a real step."""
    over = {"optimizer": name, "precision": precision}
    chosen = trial.parse(tiny(**LARGE, **over))
    net = build.model(chosen, CPU)
    optimizer = build.optimizer(chosen, net.parameters(), CPU)
    for again in range(2):
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if again:
            break
        optimizer.step()  # makes the state
        optimizer.zero_grad()
    with LiveBytes() as live:
        before = live.take()
        optimizer.step()
        real = live.take() - before
    trace, _ = traced(tmp_path, **LARGE, **over)
    assert step_temporaries(trace) == pytest.approx(real, rel=0.01, abs=2048)


def step_temporaries(trace: Trace) -> int:
    """Bytes by which the last step's optimizer phase exceeds what was there when it began."""
    end = next(m.end for m in trace.marks if m.step == 2 and m.phase == "backward")
    last = next(m.end for m in trace.marks if m.step == 2 and m.phase == "optimizer")
    live = most = 0
    for event in trace.events[end:last]:
        live += math.copysign(1, event) * trace.sizes[abs(event) - 1]
        most = max(most, int(live))
    return most


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["adamw_torch_fused", "adamw_bnb_8bit", "lion_32bit", "lion_8bit", "paged_adamw_32bit"]
)
def test_kernels_without_temporaries(tmp_path: Path, name: str) -> None:
    assert step_temporaries(traced(tmp_path, **LARGE, optimizer=name)[0]) == 0


class Kernels(TorchDispatchMode):
    """What each operator asks of a card."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        asked = work(func, args, kwargs or {}, out, (8, 0))
        self.work += [asked] if asked is not None else []
        return out


def test_a_kernel_a_parameter_reads_the_gradient_and_changes_parameter_and_state() -> None:
    """As bitsandbytes launches them (optimizer.py, `step`)."""
    kind, given = bnb.optimizer(trial.parse(tiny(device=A100, optimizer="adamw_bnb_8bit")), CPU)
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (100, 25_600)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = kind(parameters, **given)
    optimizer.step()
    with Kernels() as kernels:
        optimizer.step()
    small = 4 * 100 * (1 + 2 + 2 * 2)
    large = 25_600 * (4 + 2 * 4 + 2 * 2) + 2 * 2 * 4 * 100 + 2 * 4 * 256
    assert [(asked.nbytes, asked.launches) for asked in kernels.work] == [(small, 1), (large, 1)]


@pytest.mark.parametrize(("shape", "bits", "times"), [((512, 64), 8, 8), ((512, 256), 8, 0), ((8192,), 8, 0),
                                                      ((512, 64), 4, 24), ((512, 256), 4, 24)])  # fmt: skip
def test_temporaries_of_torchao_are_those_of_inductor_s_code(
    shape: tuple[int, ...], bits: int, times: int, tmp_path: Path
) -> None:
    """`times` a parameter's elements, in bytes, as read off the code that Inductor of torch 2.13 generates for CUDA
    from torchao 0.18's single_param_adam: two fp32 buffers, for 4 bits two int64 ones more; scales beside them."""
    parameter = torch.nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.zeros(shape)
    optimizer = {8: ao.AdamW8bit, 4: ao.AdamW4bit}[bits]([parameter])
    optimizer.step()
    gc.collect()  # what an earlier test left must not go while this is watched
    with LiveBytes() as live:
        before = live.take()
        optimizer.step()
        found = live.take() - before
    assert found == times * parameter.numel() + (2 * 4 * parameter.numel() // 256 if times else 0)


SHAPES = ((100, 1000), (99, 1010), (64, 64), (4095,), (4096,), (4097,), (120_000,), (333, 777), (7,))


def on_fake_cuda(name: str) -> tuple[int, int]:
    """Bytes on the card and in managed memory of bitsandbytes' own state, its code run for parameters on a card."""
    import bitsandbytes
    from bitsandbytes import functional
    from bitsandbytes.optim import optimizer as own

    def managed(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        tensor: Any = torch.empty(*shape, dtype=dtype, device="meta")
        tensor.is_paged = True
        return tensor

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (functional, "get_paged", managed),
        *((functional, kernel, nothing) for kernel in ("fill", "prefetch_tensor", "optimizer_update_32bit",
                                                       "optimizer_update_8bit_blockwise")),
        (own, "sync_gpu", nothing),
    ]  # fmt: skip
    family = bitsandbytes.optim.Lion if "lion" in name else bitsandbytes.optim.AdamW
    with contextlib.ExitStack() as stack:
        for owner, attribute, value in replaced:
            stack.enter_context(mock.patch.object(owner, attribute, value))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            parameters = [torch.nn.Parameter(torch.empty(shape, device="cuda")) for shape in SHAPES]
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
        # its tables are made with values
        optimizer = family(parameters, optim_bits=8 if "8bit" in name else 32, is_paged=name.startswith("paged"))
        with mode:
            optimizer.step()
        return state(optimizer, "cuda"), state(optimizer, "meta")


@pytest.mark.parametrize("name", [*PAGED, "adamw_bnb_8bit", "lion_8bit", "lion_32bit"])
def test_what_is_paged_is_bitsandbytes_choice(name: str) -> None:
    library(name)
    chosen = trial.parse(tiny(device=A100, optimizer=name))
    kind, given = bnb.optimizer(chosen, CPU)
    with FakeTensorMode():
        parameters = [torch.nn.Parameter(torch.empty(shape)) for shape in SHAPES]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer = kind(parameters, **given)
        optimizer.step()
        found = state(optimizer), state(optimizer, "meta")
    assert found == on_fake_cuda(name)
    assert (found[1] > 0) == name.startswith("paged")


@pytest.mark.slow
def test_paged_state_is_not_the_allocator_s(tmp_path: Path) -> None:
    """The embedding of 131,072 elements is managed memory, but the Trainer wants 32 bits of it."""
    wide = {"model": {"config": {"vocab_size": 2048}}}
    plain, paged = (total(traced(tmp_path, optimizer=n, **wide)[0]) for n in ("adamw_bnb_8bit", "paged_adamw_8bit"))
    assert plain - paged == 2 * 131_072
    through = {"runner": {"name": "trainer"}, **wide}
    plain, paged = (total(traced(tmp_path, optimizer=n, **through)[0]) for n in ("adamw_bnb_8bit", "paged_adamw_8bit"))
    assert plain - paged == 2 * 4 * 131_072


def trained(chosen: dict[str, Any], folder: Path) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    """The trial's columns and the optimizer that took its steps."""
    seen: list[torch.optim.Optimizer] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: seen.append(optimizer))
    try:
        row = run.run(trial.parse(chosen), folder)
    finally:
        hook.remove()
    assert row is not None
    return row, seen[-1]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "odd"])
@pytest.mark.parametrize(
    "name",
    ["adamw_torch_loop", "sgd_momentum", "adafactor", "adamw_bnb_8bit", "lion_32bit", "lion_8bit", *COMPILED],
)
def test_state_through_the_trainer(tmp_path: Path, name: str, model: str) -> None:
    """Which has bitsandbytes keep 32 bits of every embedding."""
    library(name)
    row, used = trained(values(model, optimizer=name, runner={"name": "trainer"}), tmp_path)
    assert math.isfinite(row["loss_last"])
    trace, details = traced(tmp_path, model, optimizer=name, runner={"name": "trainer"})
    assert total(trace) == state(used)
    assert details["optimizer_effective"] == row["optimizer_effective"] == EFFECTIVE.get(name, "AdamW")
    if name == "adamw_bnb_8bit":
        assert total(trace) > total(traced(tmp_path, model, optimizer=name)[0])


@pytest.mark.slow
def test_the_trainer_s_arguments_reach_optimizers_that_it_does_not_know(tmp_path: Path) -> None:
    options = {"learning_rate": 0.5, "adam_beta1": 0.25, "lr_scheduler_type": "constant"}
    runner = {"name": "trainer", "options": options}
    group = trained(tiny(optimizer="adamw_torch_loop", runner=runner), tmp_path)[1].param_groups[0]
    assert (group["lr"], group["betas"][0], group["foreach"]) == (0.5, 0.25, False)


# pytorch/ao, torchao/optim/README.md: Llama-2-7B in bf16, full fine-tuning with torchtune on an A100 with PyTorch 2.4;
# GiB allocated at most. AdamW's state is bf16 there.
PUBLISHED = {"adamw_torch_fused": 51.6, "adamw_bnb_8bit": 39.3, "adamw_torch_8bit": 39.1, "adamw_torch_4bit": 33.2}
LLAMA = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
         "vocab_size": 32000}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "adamw_torch_fused"])
def test_published_savings_of_llama_2_7b(name: str) -> None:
    """Peaks fell by as much as the state did, to the printed digit and a little more."""

    def at_rest(name: str) -> int:
        kind, given = build.techniques.optimizer(trial.parse(tiny(device=A100, optimizer=name)), CPU)
        if name == "adamw_torch_4bit":
            given["block_size"] = 128  # torchao's own, which torchtune leaves
        with FakeTensorMode():
            config = AutoConfig.for_model("llama", **LLAMA)
            net = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            for parameter in net.parameters():
                parameter.grad = torch.empty_like(parameter)
            optimizer = kind(net.parameters(), **given)
            optimizer.step()
            return state(optimizer)

    saved = (at_rest("adamw_torch_fused") - at_rest(name)) / (1 << 30)
    assert saved == pytest.approx(PUBLISHED["adamw_torch_fused"] - PUBLISHED[name], abs=0.15)


def deepspeed(sharding: str, **over: Any) -> dict[str, Any]:
    small = {"zero_optimization": {"reduce_bucket_size": 1 << 20, "allgather_bucket_size": 1 << 20}}
    options = small | over.pop("options", {})
    chosen = {"precision": "bf16", "runner": {"name": "deepspeed", "options": options}, "sharding": sharding}
    return chosen | over


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["zero0", "zero2", "zero3"])
def test_deepspeed_s_fused_adam_has_its_python_code_s_state_and_no_temporaries(run_sweep: Run, sharding: str) -> None:
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.op_builder import FusedAdamBuilder

    compiled = SimpleNamespace(multi_tensor_adam=lambda *args: None)
    with mock.patch.object(FusedAdamBuilder, "load", lambda self: compiled):
        weights = torch.nn.Parameter(torch.zeros(119360))
        weights.grad = torch.zeros_like(weights)
        own = FusedAdam([weights])
        own.step()
    fused, foreach = run_sweep(
        tiny(device=A100, **deepspeed(sharding, optimizer="deepspeed_fused_adam")),
        tiny(device=A100, **deepspeed(sharding, optimizer="adamw_torch_foreach")),
        isolation="warm",
    )
    assert [fused["outcome"], foreach["outcome"]] == ["ok", "ok"], (fused["reason"], foreach["reason"])
    assert fused["optimizer_effective"].endswith("(FusedAdam)")
    copies = stored([weights])
    assert fused["peak_optimizer_state_bytes"] == copies + state(own)
    if sharding != "zero2":  # where gradients are the peak
        assert fused["optimizer_peak_allocated_bytes"] < foreach["optimizer_peak_allocated_bytes"]
    assert fused["estimated_launches"] < foreach["estimated_launches"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_deepspeed_s_cpu_adam_really_steps_and_takes_none_of_the_card(
    run_sweep: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled on first use, which takes a minute or two: a folder of its own, as one given up leaves a lock behind."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "compiled"))
    offloaded = {"offload_optimizer": True, "optimizer": "deepspeed_cpu_adam"}
    two, three, theirs, real = run_sweep(
        tiny(device=A100, **deepspeed("zero2", **offloaded)),
        tiny(device=A100, **deepspeed("zero3", **offloaded)),
        tiny(device=A100, **deepspeed("zero2", **offloaded | {"optimizer": "adamw_torch"})),
        tiny(**deepspeed("zero2", **offloaded)),
        isolation="warm",
        timeout_s=800,
    )
    assert [row["outcome"] for row in (two, three, theirs, real)] == ["ok"] * 4, real["reason"]
    assert two["peak_optimizer_state_bytes"] == three["peak_optimizer_state_bytes"] == 0
    assert two["peak_allocated_bytes"] == theirs["peak_allocated_bytes"]
    assert two["optimizer_effective"] == real["optimizer_effective"] == "DeepSpeedZeroOptimizer(DeepSpeedCPUAdam)"
    assert math.isfinite(real["loss_last"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gradient_cliping": 1.0}, "gradient_cliping: .*the closest is gradient_clipping"),
        ({"zero_optimization": {"reduce_buket_size": 5}}, "reduce_buket_size.*the closest is reduce_bucket_size"),
        ({"zero_optimization": {"offload_optimizer": {"devic": "cpu"}}}, "offload_optimizer.devic.*closest is device"),
        ({"overlap_comm": True}, "overlap_comm: .*no effect"),
        ({"bf16": {"enable": True}}, "enable.*the closest is enabled"),
        ({"optimizer": {"typ": "Lamb"}}, "optimizer.typ: .*the closest is type"),
        ({"optimizer": {"type": "Lamb", "parms": {}}}, "optimizer.parms: .*the closest is params"),
        ({"activation_checkpointing": {"partition_activation": True}}, "the closest is partition_activations"),
    ],
)
def test_what_deepspeed_would_ignore_is_an_error(options: dict[str, Any], said: str) -> None:
    chosen = trial.parse(tiny(**deepspeed("zero2")))
    config = zero.merged(zero.ds_config(chosen), options)
    with pytest.raises(InvalidTrial, match=said):
        zero.heeded(config)


def test_what_deepspeed_reads_is_left_alone() -> None:
    options = {
        "gradient_clipping": 1.0,
        "zero_optimization": {"overlap_comm": True, "stage3_max_live_parameters": 1e6},
        "optimizer": {"type": "Lamb", "params": {"lr": 1e-3, "max_coeff": 1.0}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "activation_checkpointing": {"partition_activations": False},
        "communication_data_type": "fp32",
        "flops_profiler": {"enabled": False},
        "comms_logger": {"enabled": False},
        "wall_clock_breakdown": False,
    }
    chosen = trial.parse(tiny(**deepspeed("zero2")))
    zero.heeded(zero.merged(zero.ds_config(chosen), options))


CUDA = {"device": {"name": "cuda"}}
LAMB = {"optimizer": {"type": "Lamb"}}


def hf(**options: Any) -> dict[str, Any]:
    return {"runner": {"name": "trainer", "options": options}}


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"optimizer": "deepspeed_fused_adam"}, "needs runner=deepspeed or trainer, not torch"),
        (deepspeed("zero2", optimizer="deepspeed_cpu_adam"), "add offload_optimizer=true"),
        (CUDA | deepspeed("zero2", optimizer="deepspeed_fused_adam", offload_optimizer=True), "use deepspeed_cpu_adam"),
        (deepspeed("zero2", optimizer="deepspeed_fused_adam"), "on device=cpu use adamw_torch"),
        (deepspeed("zero2", optimizer="adamw_torch_fused"), "on device=cpu use adamw_torch"),
        (CUDA | deepspeed("zero2", options={"optimizer": {"type": "AdamW"}}), "optimizer=deepspeed_fused_adam"),
        (CUDA | deepspeed("zero2", options={"optimizer": {"type": "Adam"}}, offload_optimizer=True), "cpu_adam"),
        ({"device": A100} | deepspeed("zero2", options=LAMB), "type Lamb cannot be simulated"),
        (CUDA | deepspeed("zero2", options=LAMB, optimizer="sgd"), "contradicts optimizer=sgd"),
        ({"optimizer": "paged_adamw_8bit"}, "pages nothing there"),
        ({"optimizer": "adafactor", "sharding": "fsdp2"}, "FSDP2's sharded tensors"),
        ({"precision": "bf16_master", **hf()}, "the Trainer keeps no master copies"),
        (deepspeed("zero2", precision="bf16_master"), "DeepSpeed's bf16 is just that"),
        ({"precision": "bf16_master", "sharding": "ddp"}, "the copies are not divided"),
        (hf(optim="adamw_8bit"), "give optimizer=adamw_bnb_8bit"),
        ({"device": A100, **hf(optim="galore_adamw")}, "cannot be simulated"),
        ({"optimizer": "sgd", **hf(optim_args="momentum=0.5")}, "optimizer=sgd_momentum"),
        ({"optimizer": "sgd_momentum", **hf(optim_args="x=1")}, "does not reach"),
        ({"optimizer": "adamw_torch_4bit", "device": A100, **hf(optim_args="block_size=128")}, "leave it out"),
    ],
)
def test_combinations_that_would_not_do_what_they_say(over: dict[str, Any], said: str) -> None:
    with (
        mock.patch.object(techniques.Package, "missing", lambda self: None),
        pytest.raises(InvalidTrial, match=said),
    ):
        trial.parse(tiny(**over))


@pytest.mark.slow
def test_the_axis_lacks_some_of_torch_s_own_and_they_are_simulated_all_the_same(tmp_path: Path) -> None:
    for name, effective in (("adagrad", "Adagrad"), ("rmsprop", "RMSprop")):
        trace, details = traced(tmp_path, runner={"name": "trainer", "options": {"optim": name}})
        assert details["optimizer_effective"] == effective
        assert total(trace) == pytest.approx(4 * details["parameters"], rel=1e-3)  # a value a parameter, and counters


@pytest.mark.gpu
@pytest.mark.parametrize("runner", ["torch", "trainer"])
@pytest.mark.parametrize("name", [name for name in EVERYWHERE if name != "default"] + list(PAGED))
def test_on_a_card_memory_is_as_predicted(run_sweep: Run, name: str, runner: str) -> None:
    library(name)
    _as_predicted(run_sweep, {"optimizer": name, "runner": {"name": runner}})


@pytest.mark.gpu
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("sharding", ["zero0", "zero2", "zero3"])
def test_on_a_card_fused_adam_is_as_predicted(run_sweep: Run, sharding: str) -> None:
    _as_predicted(run_sweep, deepspeed(sharding, optimizer="deepspeed_fused_adam"), timeout_s=600)


@pytest.mark.gpu
@pytest.mark.timeout(1300)
def test_on_a_card_cpu_adam_is_as_predicted(run_sweep: Run) -> None:
    offloaded = deepspeed("zero2", optimizer="deepspeed_cpu_adam", offload_optimizer=True)
    _as_predicted(run_sweep, offloaded, timeout_s=600)


@pytest.mark.gpu
def test_on_a_card_master_copies_are_as_predicted(run_sweep: Run) -> None:
    _as_predicted(run_sweep, {"precision": "bf16_master"})


def _as_predicted(run_sweep: Run, over: dict[str, Any], **settings: Any) -> None:
    """Measured on this machine's card, predicted for it; the model's state is most of the memory."""
    card = gpus.find(str(machine.gpus()[0].name))
    if card is None:
        pytest.skip("this card is not in the table")
    large = {**LARGE, "model": {"config": LARGE["model"]["config"] | {"vocab_size": 65_536}}}
    (measured,) = run_sweep(tiny(**large, **CUDA, **over), **settings)
    (predicted,) = run_sweep(tiny(**large, device={"name": "simulated", "gpu": card.name}, **over), **settings)
    assert [measured["outcome"], predicted["outcome"]] == ["ok", "ok"], (measured["reason"], predicted["reason"])
    assert measured["optimizer_effective"] == predicted["optimizer_effective"]
    assert predicted["peak_allocated_bytes"] == pytest.approx(measured["peak_allocated_bytes"], rel=0.03)


def test_replaying_stays_consistent_where_state_is_on_the_host(tmp_path: Path) -> None:
    trace, _ = traced(tmp_path, "odd", optimizer="paged_adamw_32bit")
    predicted = predict.replay(trace, AllocatorConfig(), None)
    assert sum(predicted.breakdown.values()) == predicted.peak["allocated"]
