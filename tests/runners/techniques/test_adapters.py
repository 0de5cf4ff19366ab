"""Adapters and quantised weights: real training with peft and bitsandbytes, and stand-ins against their own tensors."""

import gc
import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT, Run, tiny
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from traces import A100, kept, on_this_gpu, peak, signed, total, trace_trial
from traces import SIMULATED as DEVICE

from vramsweep.harness.spec import trial, trial_parser
from vramsweep.harness.spec.techniques import catalog, schema
from vramsweep.runners.measure import dispatch_modes, model_description
from vramsweep.runners.model import build
from vramsweep.runners.techniques import gptq, lora, nf4
from vramsweep.runners.trace.step_tracer import Tracer
from vramsweep.runners.trace.trace_data import Trace
from vramsweep.runners.worker import run_rank

pytestmark = pytest.mark.deterministic

LORA = {"adapter": "lora", "lora_r": 8}
NF4 = LORA | {"quantization": "nf4", "precision": "bf16"}
RUNNERS = ("torch", "trainer")
DOUBLE = NF4 | {"quantization": "nf4_double"}
# sizes that fill no block of 64 weights and no block of 256 scales; output weights of their own
ODD = {
    "name": "odd", "model_type": "llama",
    "config": {"vocab_size": 130, "hidden_size": 72, "intermediate_size": 200, "num_hidden_layers": 3,
               "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
               "tie_word_embeddings": False},
}  # fmt: skip
GPT2 = {
    "name": "gpt2", "model_type": "gpt2",
    "config": {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
}  # fmt: skip


def with_model(values: dict[str, Any] | None, **over: Any) -> dict[str, Any]:
    """A trial with this model in the place of the tiny one, whose settings are laid on it otherwise."""
    made = tiny(**over)
    if values is not None:
        made["model"] = {"parameters": None, "max_positions": None, "path": None} | values
    return made


def traced(folder: Path, values: dict[str, Any] | None = None, **over: Any) -> tuple[Trace, dict[str, Any]]:
    return trace_trial(with_model(values, device=DEVICE, **over), folder)


def nbytes(tensors: Any) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that runs describe, which is after their last measured step."""
    seen: list[nn.Module] = []
    describe = model_description.describe

    def watched(net: Any, optim: Any) -> dict[str, Any]:
        seen.append(net)
        return describe(net, optim)

    monkeypatch.setattr(model_description, "describe", watched)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runner", "values", "over"),
    [
        ("trainer", None, LORA),
        ("torch", GPT2, LORA | {"precision": "bf16"}),
        ("torch", None, LORA | {"lora_target_modules": "q_proj+v_proj", "lora_dropout": 0.1, "precision": "bf16_pure"}),
        ("torch", None, NF4 | {"precision": "fp32"}),
        *((runner, ODD, DOUBLE | {"checkpointing": "full", "checkpointing_reentrant": True}) for runner in RUNNERS),
    ],
)
def test_real_training(
    tmp_path: Path, trained: list[nn.Module], runner: str, values: Any, over: dict[str, Any]
) -> None:
    pytest.importorskip("peft")
    if "quantization" in over:
        pytest.importorskip("bitsandbytes")
    row = run_rank.run(trial_parser.parse(with_model(values, runner={"name": runner}, **over)), tmp_path)
    assert row is not None and row["loss_first"] and row["loss_last"]
    (net,) = trained
    kind = f"peft.tuners.lora.{'bnb.Linear4bit' if 'quantization' in over else 'layer.Linear'}"
    adapters = [m for m in net.modules() if f"{type(m).__module__}.{type(m).__name__}" == kind]
    named = dict(net.named_parameters())
    trainable = {name: p for name, p in named.items() if p.requires_grad}
    targets = {"q_proj", "v_proj"} if "lora_target_modules" in over else {
        "gpt2": {"c_attn", "c_proj", "c_fc"}}.get((values or {}).get("name"), {
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})  # fmt: skip
    ends = {name.split(".base_layer")[0].rpartition(".")[2] for name in named if ".base_layer" in name}
    assert ends == targets and len(adapters) == len(trainable) / 2
    assert all(".lora_" in name and p.dtype is torch.float32 for name, p in trainable.items())
    second = [p for name, p in trainable.items() if ".lora_B." in name]
    assert all(bool(p.isfinite().all()) and bool(p.any()) for p in second)  # they begin as zeros
    assert (row["trainable_parameters"], row["parameters"]) == net.get_nb_trainable_parameters()
    assert row["model_flops_per_token"] <= row["hardware_flops_per_token"]
    assert row["notes"] is None


class Library:
    """A model as the library builds it on the CPU, and the bytes of its tensors."""

    def __init__(self, values: Any, over: dict[str, Any]) -> None:
        chosen = trial_parser.parse(with_model(values, **over))
        build.prepare(chosen)
        net = build.model(chosen, torch.device("cpu"))
        optimizer = build.optimizer(chosen, net.parameters(), torch.device("cpu"))
        batch = build.data(chosen).batch(0, 2)
        with build.autocast(chosen, torch.device("cpu")):
            net(**batch).loss.backward()
        optimizer.step()
        self.parameters = nbytes(net.parameters())  # bitsandbytes casts biases in the first step
        self.counts = (model_description.parameters(net), model_description.parameters(net, trained=True))
        self.gradients = nbytes(p.grad for p in net.parameters() if p.grad is not None)
        self.state = nbytes(t for held in optimizer.state.values() for t in held.values() if t.dim())
        self.buffers = nbytes([*net.buffers(), *statistics(net)])


def statistics(net: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that bitsandbytes keeps besides its weights, with the map of its 8-bit statistics."""
    states = [p.quant_state for p in net.parameters() if hasattr(p, "quant_state")]
    for state in states:
        yield from (state.absmax, state.code)
        if state.nested:
            yield from (state.offset, state.state2.absmax, state.state2.code)
    if any(state.nested for state in states):
        yield sys.modules["bitsandbytes.functional"].name2qmap["dynamic"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "over"),
    [(None, LORA), (GPT2, LORA), (ODD, LORA | {"precision": "bf16_pure"}), (None, NF4), (ODD, NF4),
     (ODD, DOUBLE | {"precision": "fp32"}), (GPT2, DOUBLE | {"precision": "fp32"})],
)  # fmt: skip
def test_the_model_s_state_is_the_library_s_to_the_byte(tmp_path: Path, values: Any, over: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    if "quantization" in over:
        pytest.importorskip("bitsandbytes")
    library = Library(values, over)
    trace, details = traced(tmp_path, values, **over)
    assert (details["parameters"], details["trainable_parameters"]) == library.counts
    assert kept(trace, "parameters") == library.parameters
    assert total(trace, "gradients") == 3 * library.gradients  # three steps, set to none after each
    assert total(trace, "optimizer_state") == library.state
    assert total(trace, "buffers") == library.buffers


def steps(trace: Trace) -> list[int]:
    """Return the bytes that the steps request and free, in order."""
    return signed(trace, trace.marks[0].end, trace.marks[-1].end)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runner", "values", "over"),
    [
        ("torch", None, {"precision": "bf16", "lora_dropout": 0.1}),
        ("torch", ODD, {"precision": "bf16_pure", "lora_target_modules": "q_proj+down_proj"}),
        ("torch", GPT2, {"precision": "fp16"}),
        ("torch", None, {"precision": "bf16", "checkpointing": "full", "checkpointing_reentrant": True}),
        pytest.param("torch", None, {"precision": "bf16", "checkpointing": "full"}, marks=pytest.mark.slow),
        pytest.param("trainer", None, {}, marks=pytest.mark.slow),
    ],
)
def test_a_step_allocates_what_peft_s_layers_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str, values: Any, over: dict[str, Any]
) -> None:
    pytest.importorskip("peft")
    over = LORA | over | {"runner": {"name": runner}}
    ours, _ = traced(tmp_path, values, **over)
    monkeypatch.setattr(lora, "_with_stand_ins", lambda trial, net, names, device: lora._with_peft(trial, net, names))
    theirs, _ = traced(tmp_path, values, **over)
    assert steps(ours) == steps(theirs)


class Unfused(TorchDispatchMode):
    """bitsandbytes' product with packed weights by its own code for CUDA, without the kernel that does not unpack."""

    def __init__(self, kernels: Any) -> None:
        super().__init__()
        self.kernels = kernels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "bitsandbytes::gemm_4bit":
            with self:
                return self.kernels._dequant_linear_fallback(*args, **(kwargs or {}))
        if func in (torch.ops.aten.linear.default, torch.ops.aten.matmul.default):
            with self:  # as the dispatcher does where no mode is asked first
                return func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bitsandbytes' module of CUDA kernels, whose launches do nothing."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    ops = importlib.import_module("bitsandbytes._ops")
    monkeypatch.setattr(ops, "register_kernel", lambda name, device: lambda kernel: kernel)
    module = importlib.import_module("bitsandbytes.backends.cuda.ops")
    for name in ("_dequantize_blockwise_impl", "_dequantize_4bit_impl"):
        monkeypatch.setattr(module, name, lambda *args, **kwargs: None)
    yield module
    sys.modules.pop("bitsandbytes.backends.cuda.ops")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runner", "values", "over"),
    [
        *((runner, None, NF4) for runner in RUNNERS),
        ("torch", None, DOUBLE | {"precision": "fp16", "lora_dropout": 0.1}),
        ("torch", ODD, DOUBLE | {"precision": "fp32"}),
        ("torch", None, DOUBLE | {"checkpointing": "full", "checkpointing_reentrant": True}),
    ],
)
def test_a_step_allocates_what_bitsandbytes_and_peft_s_layers_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda_kernels: Any, runner: str, values: Any, over: dict[str, Any]
) -> None:
    peft = pytest.importorskip("peft")
    adapted_4bit = importlib.import_module("peft.tuners.lora.bnb").Linear4bit
    bnb = sys.modules["bitsandbytes"]
    over = over | {"runner": {"name": runner}}
    ours, _ = traced(tmp_path, values, **over)

    def theirs_4bit(layer: Any, x: torch.Tensor) -> torch.Tensor:
        layer.weight.quant_state = layer.quant_state
        with Unfused(cuda_kernels):
            return bnb.nn.Linear4bit.forward(layer, x)  # it looks at nothing but attributes

    def theirs(trial: Any, net: Any, names: list[str], device: torch.device) -> Any:
        config = peft.LoraConfig(r=trial.lora_r, lora_alpha=trial.lora_alpha, lora_dropout=trial.lora_dropout)
        for name in names:
            base = net.get_submodule(name)
            layer = adapted_4bit(base, "default", config=config, r=trial.lora_r, lora_alpha=trial.lora_alpha)
            net.set_submodule(name, layer)
        peft.tuners.tuners_utils.cast_adapter_dtype(net, "default")
        for name, parameter in net.named_parameters():
            parameter.requires_grad = ".lora_" in name
        return net

    monkeypatch.setattr(lora, "_with_stand_ins", theirs)
    monkeypatch.setattr(nf4.Linear4bit, "forward", theirs_4bit)
    monkeypatch.setattr(nf4.Linear4bit, "compute_type_is_set", True, raising=False)
    monkeypatch.setattr(nf4.Linear4bit, "support_avx512bf16_for_cpu", False, raising=False)
    real, _ = traced(tmp_path, values, **over)
    assert steps(ours) == steps(real)


def test_quantising_keeps_and_needs_what_bitsandbytes_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing one weight: storages that stay, and the peak, those of bitsandbytes' functions on fake tensors."""
    functional = pytest.importorskip("bitsandbytes.functional")
    for double in (False, True):
        found = []
        for theirs in (True, False):
            tracer = Tracer(A100.capability)
            with tracer.record():
                monkeypatch.setitem(functional.name2qmap, "dynamic", torch.empty(256))
                weight = torch.empty(264, 200, dtype=torch.bfloat16)
                if theirs:
                    monkeypatch.setattr(functional, "get_4bit_type", lambda *args, **kwargs: torch.empty(16))
                    made: Any = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=double)
                else:
                    made = nf4.pack(weight, functional.name2qmap["dynamic"] if double else None)
                held = [*itertools.accumulate(signed(tracer.trace))]
                found.append((held[-1], max(held)))
                del made, weight
        assert found[0] == found[1]


def shipped(name: str) -> Any:
    return yaml.safe_load((ROOT / f"conf/model/{name}.yaml").read_text())


def built(values: Any, **over: Any) -> tuple[nn.Module, int]:
    """The simulated model, built on fake tensors, and all bytes it holds."""
    chosen = trial_parser.parse(with_model(values, device=DEVICE, **over))
    tracer = Tracer(A100.capability)
    with tracer.record():
        net = build.model(chosen, torch.device("cpu"))
        gc.collect()
        return net, sum(signed(tracer.trace))


@pytest.mark.slow
def test_statistics_take_the_bits_that_the_paper_says() -> None:
    """Dettmers et al. 2023 (arXiv:2305.14314), section 3: scales of blocks of 64 add 0.5 bits a parameter, quantised
    themselves 0.127 bits."""
    values = shipped("llama3-8b")
    (net, plain), (_, double) = (
        built(values, precision="bf16", quantization=name, adapter="lora") for name in ("nf4", "nf4_double")
    )
    layers = [m for m in net.modules() if isinstance(m, nf4.Linear4bit)]
    weights = sum(m.in_features * m.out_features for m in layers)
    assert 8 * (plain - double) / weights == pytest.approx(0.373, abs=0.001)
    stats = sum(m.quant_state.absmax.nbytes for m in layers)
    assert 8 * stats / weights == pytest.approx(0.5, abs=0.001)


def test_gptq_s_tensors() -> None:
    """Shapes and dtypes of gptqmodel 7.7's TorchLinear(bits=4, group_size=128, 11008 to 4096, bias) after post_init,
    as its own code made them on a CPU."""
    layer = gptq.QuantLinear(11008, 4096, True, torch.device("meta"))
    assert {name: (tuple(b.shape), b.dtype) for name, b in layer.named_buffers()} == {
        "qweight": ((1376, 4096), torch.int32), "qzeros": ((86, 512), torch.int32),
        "scales": ((86, 4096), torch.float16), "g_idx": ((11008,), torch.int32), "bias": ((4096,), torch.float16),
        "wf_unsqueeze_zero": ((1, 1, 8), torch.int32), "wf_unsqueeze_neg_one": ((1, 8, 1), torch.int32),
    }  # fmt: skip
    assert not list(layer.parameters())


@pytest.mark.slow
def test_gptq_keeps_unpacked_weights_until_the_backward_pass(tmp_path: Path) -> None:
    """As gptqmodel's layer does, whose product autograd knows (nn_modules/qlinear/torch.py: _forward_eager)."""
    over = LORA | {"precision": "bf16", "quantization": "gptq"}
    trace, details = traced(tmp_path, **over)
    plain, known = traced(tmp_path, **(LORA | {"precision": "bf16"}))
    assert details["parameters"] == known["parameters"] - 256  # their biases are buffers
    weights = 2 * 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)  # of two layers, in half precision
    assert total(plain, "parameters") - total(trace, "parameters") > 1.5 * weights
    repeated, _ = traced(tmp_path, **over, checkpointing="full")
    saved = peak(trace)["allocated"] - peak(repeated)["allocated"]
    assert saved > weights / 2  # with checkpointing one of the two layers at a time


def test_gptq_s_layer_is_the_library_s() -> None:
    pytest.importorskip("gptqmodel")
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    size = {"in_features": 256, "out_features": 200, "bias": True}
    theirs = TorchLinear(bits=4, group_size=128, sym=True, desc_act=False, **size)
    theirs.post_init()
    theirs.dequantize_weight = lambda num_itr=1: TorchLinear.dequantize_weight(theirs, num_itr)  # not compiled
    ours = gptq.QuantLinear(256, 200, True, torch.device("cpu"))
    found: list[Any] = []
    for layer in (theirs.train(), ours):
        saved: list[Any] = []

        def keep(tensor: torch.Tensor, into: list[Any] = saved) -> torch.Tensor:
            into.append((tensor.shape, tensor.dtype))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(torch.zeros(2, 3, 256, dtype=torch.float16, requires_grad=True))
        found.append((saved, sorted((name, b.shape, b.dtype) for name, b in layer.named_buffers())))
    assert found[0] == found[1]


def measured(folder: Path, values: Any = None, **over: Any) -> dict[str, Any]:
    row = run_rank.run(trial_parser.parse(with_model(values, **over)), folder)
    assert row is not None
    return row


@pytest.mark.slow
def test_model_flops_of_frozen_weights(tmp_path: Path) -> None:
    """However weights are stored; the count that finds them is 3 x forward where all are trained.

    With checkpointing the embeddings' output needs a gradient too, which is work of the step's and counts.
    """
    pytest.importorskip("peft")
    plain = measured(tmp_path)
    lora_, again = (measured(tmp_path, **LORA, checkpointing=c) for c in ("none", "full"))
    attention = 2 * 2 * 2 * 32 * 64  # a token and layer: two products of the forward pass; a fifth of the backward's 5
    assert plain["hardware_flops_per_token"] - plain["model_flops_per_token"] == attention / 2
    assert lora_["hardware_flops_per_token"] - lora_["model_flops_per_token"] == attention / 2
    assert again["hardware_flops_per_token"] > again["model_flops_per_token"] + attention
    adapters = 2 * 2 * 8 * sum(a + b for a, b in [(64, 64), (64, 64), (64, 32), (64, 32), *[(64, 160)] * 3])
    linear = 2 * 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
    into_first = 2 * (64 * 64 + 2 * 64 * 32) + 2 * 8 * 3 * 64  # the embedding needs no gradient
    head = 2 * 512 * 64
    expected = 2 * (linear + head) + 3 * attention + 3 * adapters - into_first
    assert lora_["model_flops_per_token"] == pytest.approx(expected, rel=1e-4)
    assert again["model_flops_per_token"] == pytest.approx(expected + into_first, rel=1e-4)
    if catalog.version("bitsandbytes"):
        packed = measured(tmp_path, **NF4, checkpointing="full")
        assert packed["model_flops_per_token"] == again["model_flops_per_token"]
        assert packed["hardware_flops_per_token"] == again["hardware_flops_per_token"]
        assert packed["notes"] is None


@pytest.mark.parametrize(("checkpointing", "reentrant"), [("none", False), ("full", False), ("full", True)])
def test_repeated_flops_are_all_beyond_three_forward_passes(checkpointing: str, reentrant: bool) -> None:
    chosen = trial_parser.parse(tiny(checkpointing=checkpointing, checkpointing_reentrant=reentrant))
    net = build.model(chosen, torch.device("cpu"))
    with dispatch_modes.FlopCount() as count:
        loss = net(**build.data(chosen).batch(0, 2)).loss
        forward = count.total
        loss.backward()
    assert count.total - count.repeated == 3 * forward
    assert count.repeated > (0.5 * forward if checkpointing == "full" else 0)


@pytest.mark.slow
def test_quantised_checkpoints_load_as_users_load_them(tmp_path: Path, trained: list[nn.Module]) -> None:
    pytest.importorskip("peft")
    bnb = pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, LlamaConfig

    AutoModelForCausalLM.from_config(LlamaConfig(**ODD["config"])).save_pretrained(tmp_path / "model")
    hub = {"name": "saved", "path": str(tmp_path / "model"), "model_type": None, "config": {}}
    row = measured(tmp_path, hub, **DOUBLE, weights="pretrained", runner={"name": "trainer"})
    random = measured(tmp_path, ODD, **DOUBLE, runner={"name": "trainer"})
    layers = [[m for m in net.modules() if isinstance(m, bnb.nn.Linear4bit)] for net in trained]
    assert len(layers[0]) == len(layers[1]) == 21
    for name in ("parameters", "trainable_parameters", "model_flops_per_token"):
        assert row[name] == random[name]
    state = [{n: (p.dtype, p.shape) for n, p in net.named_parameters()} for net in trained]
    assert state[0] == state[1]


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "version", lambda package: None)
    gptq_ = LORA | {"quantization": "gptq", "precision": "bf16", "weights": "pretrained"}
    for over, said in ((LORA, "peft"), (NF4, "(bitsandbytes|peft)"), (gptq_, "gptqmodel")):
        with pytest.raises(trial.InvalidTrial, match=f"pip install '{said}>="):
            trial_parser.parse(tiny(**over))


@pytest.mark.parametrize(("names", "lacks"), [("q_proj+nothing", "'nothing'"), ("embed_tokens", "'embed_tokens'")])
def test_targets_that_are_no_linear_layers_are_invalid(tmp_path: Path, names: str, lacks: str) -> None:
    with pytest.raises(trial.InvalidTrial, match=f"no linear layer called {lacks}; it has down_proj"):
        traced(tmp_path, **LORA, lora_target_modules=names)


@pytest.mark.slow
def test_real_ranks_share_frozen_weights_and_adapters(run_sweep: Run) -> None:
    """DDP with whole and with packed weights; FSDP2 with parameters of one and of two dtypes."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    ddp, fsdp = ({"sharding": name, "world_size": 2} for name in ("ddp", "fsdp2"))
    sharded = [LORA | fsdp | {"precision": precision} for precision in ("bf16", "bf16_pure")]
    chosen = [LORA | ddp | {"precision": "bf16"}, DOUBLE | ddp, *sharded]
    trials = [*[tiny(**over) for over in chosen], *[tiny(**over, device=DEVICE) for over in sharded]]
    rows = run_sweep(*trials)
    assert [row["outcome"] for row in rows] == ["ok"] * 6, [row["reason"] for row in rows]
    adapters, parameters = rows[0]["trainable_parameters"], rows[0]["parameters"]
    assert adapters < 0.2 * parameters
    assert all(row["trainable_parameters"] == adapters and row["parameters"] == parameters for row in rows)
    assert all(row["loss_last"] for row in rows[:4])
    for size, predicted in zip((4, 2), rows[4:], strict=True):
        assert predicted["peak_parameters_bytes"] == (size * (parameters - adapters) + 4 * adapters) / 2
        assert predicted["peak_optimizer_state_bytes"] == 2 * 4 * adapters / 2


@pytest.mark.slow
def test_deepspeed_trains_the_adapters_only(run_sweep: Run) -> None:
    """Its bf16 has everything in bf16 beside fp32 copies of what is trained, and there is but one rank to share it.

    On a CPU ZeRO-0 runs in fp32 only.
    """
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    small = {"zero_optimization": {"reduce_bucket_size": 1 << 20, "allgather_bucket_size": 1 << 20}}
    runner = {"runner": {"name": "deepspeed", "options": small}}
    chosen = [base | runner | {"sharding": f"zero{stage}", "precision": "bf16"}
              for base in (LORA, NF4) for stage in (0, 1, 2)]  # fmt: skip
    on_cpu = [over | ({"precision": "fp32"} if over["sharding"] == "zero0" else {}) for over in chosen]
    trials = [*[tiny(**over) for over in on_cpu], *[tiny(**over, device=DEVICE) for over in chosen]]
    rows = run_sweep(*trials)
    assert [row["outcome"] for row in rows] == ["ok"] * 12, [row["reason"] for row in rows]
    adapters = rows[0]["trainable_parameters"]
    assert all(row["trainable_parameters"] == adapters for row in rows) and adapters < 0.2 * rows[0]["parameters"]
    assert all(row["loss_last"] for row in rows[:6])
    assert all(row["peak_optimizer_state_bytes"] == 12 * adapters for row in rows[6:])


@pytest.mark.gpu
def test_on_a_card_each_needs_less_than_the_one_before(run_sweep: Run) -> None:
    """With a model of some size, and no less than its tensors, which are predicted."""
    values = {"seq_len": 256, "micro_batch": 2, "precision": "bf16"}
    trials = [with_model(shipped("qwen0.5b"), **(values | over)) for over in ({}, LORA, NF4, DOUBLE)]
    rows = on_this_gpu(run_sweep, *trials)
    peaks = [row["optimizer_peak_allocated_bytes"] for row, _ in rows]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4
    for row, predicted in rows:
        assert row["peak_allocated_bytes"] == pytest.approx(predicted["peak_allocated_bytes"], rel=0.05)
