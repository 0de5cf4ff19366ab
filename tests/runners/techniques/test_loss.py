"""Losses: the same value and gradients whatever computes them, and the memory that each does without."""

import copy
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import traces
from conftest import Run, merged, parametrized, refusal, tiny
from transformers import AutoConfig, AutoModelForCausalLM

from vramsweep.harness.spec import trial_parser
from vramsweep.harness.spec.trial import InvalidTrial
from vramsweep.runners.model import build
from vramsweep.runners.predict.replay_trace import Prediction
from vramsweep.runners.techniques import kernel_stubs, loss
from vramsweep.runners.trace.trace_data import Trace
from vramsweep.runners.worker import run_rank

pytestmark = pytest.mark.deterministic

CPU = torch.device("cpu")
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {"model_type": "gpt2", "config": {"n_embd": 64, "n_layer": 1, "n_head": 2, **NO_DROPOUT}}


def networks(**over: Any) -> tuple[Any, Any]:
    """Return two networks of equal weights: with transformers' own loss, and with the trial's."""
    chosen = trial_parser.parse(tiny(**over))
    torch.manual_seed(0)
    plain = build.model(chosen.model_copy(update={"loss": "plain"}), CPU)
    return plain, loss.model(chosen, copy.deepcopy(plain), CPU)


def batches(items: bool) -> list[dict[str, Any]]:
    """Two batches, of which some tokens are no labels; with the number of all that are, as the Trainer passes it."""
    generator = torch.Generator().manual_seed(1)
    found: list[dict[str, Any]] = []
    for padded in (5, 17):
        ids = torch.randint(512, (2, 27), generator=generator)  # no multiple of the number of chunks
        found.append({"input_ids": ids, "labels": ids.clone()})
        found[-1]["labels"][:, -padded:] = -100
    if items:
        counted = sum((batch["labels"][:, 1:] != -100).sum() for batch in found)
        found = [{**batch, "num_items_in_batch": counted} for batch in found]
    return found


@pytest.mark.parametrize("items", [False, True], ids=["mean", "of all accumulated"])
@pytest.mark.parametrize(
    ("name", "model"), [("chunked", {}), ("no_upcast", {}), ("chunked", GPT2), ("no_upcast", GPT2)]
)
def test_the_loss_and_its_gradients_are_transformers_own(name: str, model: dict[str, Any], items: bool) -> None:
    plain, other = networks(loss=name, model=model)
    for batch in batches(items):
        expected, found = plain(**batch).loss, other(**batch).loss
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        expected.backward()
        found.backward()
    for (key, theirs), ours in zip(plain.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7, msg=key)


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure"])
def test_half_precision_is_as_near_as_it_can_be(precision: str) -> None:
    chosen = trial_parser.parse(tiny(precision=precision))
    for name in ("chunked", "no_upcast"):
        plain, other = networks(loss=name, precision=precision)
        (batch, _) = batches(False)
        with build.autocast(chosen, CPU):
            expected, found = plain(**batch).loss, other(**batch).loss
        assert float(found) == pytest.approx(float(expected), rel=1e-2 if name == "no_upcast" else 1e-5)
        assert (found.dtype is torch.float32) == (name == "chunked")
        found.backward()


def test_a_model_that_changes_its_logits_is_refused() -> None:
    config = AutoConfig.for_model(
        "gemma2", vocab_size=512, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, attn_implementation="eager",
    )  # fmt: skip
    net = loss.model(trial_parser.parse(tiny(loss="chunked")), AutoModelForCausalLM.from_config(config), CPU)
    assert "changes its logits" in refusal(InvalidTrial, net, **batches(False)[0])


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["torch", "trainer"])
def test_real_steps(tmp_path: Path, runner: str) -> None:
    rows = []
    for name in ("default", "plain", "no_upcast", "chunked"):
        row = run_rank.run(trial_parser.parse(tiny(loss=name, runner={"name": runner}, grad_accum=2)), tmp_path)
        assert row is not None
        rows.append(row)
    first, plain, *_, chunked = rows
    assert first["loss_first"] == pytest.approx(math.log(512) / 2, rel=0.02)  # that of one of two accumulated batches
    for found in rows:
        assert (found["loss_first"], found["loss_last"]) == pytest.approx((first["loss_first"], first["loss_last"]))
        assert found["model_flops_per_token"] > 0
    more = chunked["hardware_flops_per_token"] - plain["hardware_flops_per_token"]
    assert more == pytest.approx(2 * 64 * 512)  # another product with the output layer


WIDE = {"hidden_size": 256, "intermediate_size": 320, "vocab_size": 65_536}
BIG = {"seq_len": 256, "micro_batch": 4, "model": {"config": WIDE}}


def traced(folder: Path, **over: Any) -> tuple[Trace, Prediction]:
    return traces.predicted(tiny(**merged(BIG, {"device": traces.SIMULATED, **over})), folder)


LOGITS = 4 * 256 * 65_536


@pytest.mark.slow
def test_what_each_loss_holds_of_the_logits(tmp_path: Path) -> None:
    """transformers' own: log-probabilities, their gradient and that of the logits, in fp32 (with autocast too)."""

    def beyond(name: str, **over: Any) -> float:
        _, predicted = traced(tmp_path, loss=name, precision="bf16", **over)
        held = ("parameters", "gradients", "optimizer_state", "workspaces")
        return (predicted.peak["allocated"] - sum(predicted.breakdown[part] for part in held)) / LOGITS

    plain, half, chunked, fused = map(beyond, ("plain", "no_upcast", "chunked", "fused_linear"))
    assert beyond("default") == plain
    assert 12 <= plain < 13
    assert 6 <= half < 7
    assert fused <= chunked < plain / 4


@pytest.mark.slow
def test_what_chunks_save_is_what_they_save_on_a_cpu(run_sweep: Run) -> None:
    """The tensors that a real step has at its fullest, in fp32, phase by phase."""
    card = {"device": {"name": "simulated", "gpu": "a100-80gb"}}
    trials = [
        tiny(**merged(BIG, {"seq_len": 128, "loss": name, **over}))
        for over in ({}, card)
        for name in ("plain", "chunked")
    ]
    rows = run_sweep(*trials)
    assert [row["outcome"] for row in rows] == ["ok"] * 4, [row["reason"] for row in rows]
    for phase in ("forward", "backward"):
        column = f"{phase}_peak_allocated_bytes"
        measured, predicted = (rows[at][column] - rows[at + 1][column] for at in (0, 2))
        assert predicted == pytest.approx(measured, rel=0.01), phase


@pytest.mark.slow
@parametrized("trials_of_chunked_loss", ids=str)
def test_every_runner_s_peak_is_lower(tmp_path: Path, over: dict[str, Any]) -> None:
    _, plain = traced(tmp_path, precision="bf16", **over)
    for name, saved in (("no_upcast", 2), ("chunked", 4), ("fused_linear", 4)):
        _, other = traced(tmp_path, precision="bf16", loss=name, **over)
        assert plain.peak["allocated"] - other.peak["allocated"] > saved * LOGITS, name


@pytest.mark.slow
def test_deepspeed_takes_them_too(run_sweep: Run) -> None:
    small = {"zero_optimization": {"reduce_bucket_size": 1 << 20, "allgather_bucket_size": 1 << 20}}
    engine = {"runner": {"name": "deepspeed", "options": small}, "sharding": "zero2", "precision": "bf16"}
    card = {"device": {"name": "simulated", "gpu": "a100-80gb"}, "world_size": 4, **BIG}
    plain, no_upcast, chunked, *predicted = run_sweep(
        *(tiny(**engine, loss=name) for name in ("plain", "no_upcast", "chunked")),
        *(tiny(**merged(engine, {"loss": name, **card})) for name in ("plain", "no_upcast", "chunked", "fused_linear")),
        tiny(**merged(engine, {"kernels": "liger", **card})),
    )
    for row in (plain, no_upcast, chunked, *predicted):
        assert row["outcome"] == "ok", row["reason"]
    assert no_upcast["loss_last"] == pytest.approx(plain["loss_last"], rel=1e-2)
    assert chunked["loss_last"] == pytest.approx(plain["loss_last"], rel=1e-3)
    peaks = [row["peak_allocated_bytes"] for row in predicted]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] - peaks[1] > 2 * LOGITS
    assert peaks[0] - peaks[2] > 4 * LOGITS


def test_a_product_that_is_added_counts_as_one() -> None:
    assert kernel_stubs._product(torch.empty(3, 5), torch.empty(5, 7), torch.empty(3, 7)) == 2 * 3 * 5 * 7


class InForward(torch.autograd.Function):
    """Cross entropy of hidden states as Liger computes it: with its gradients in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            logits = (hidden @ weight.T).detach().requires_grad_()
            found = torch.nn.functional.cross_entropy(logits, targets, ignore_index=loss.IGNORED)
            (grad,) = torch.autograd.grad(found, logits)
        ctx.save_for_backward(grad @ weight, grad.T @ hidden)
        return found.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight = ctx.saved_tensors
        return grads[0] * hidden, grads[0] * weight, None


@pytest.mark.slow
def test_gradients_that_the_loss_computes_in_the_forward_pass_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, width: int, **kwargs: Any) -> Any:
        return InForward.apply(hidden.flatten(0, 1), weight, loss._targets(labels))

    library: Any = SimpleNamespace(LigerForCausalLMLoss=of)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.model.loss_utils", library)
    plain = trial_parser.parse(tiny())
    rows = [run_rank.run(one, tmp_path) for one in (plain, plain.model_copy(update={"loss": "fused_linear"}))]
    (expected, found) = (row or {} for row in rows)
    assert found["loss_last"] == pytest.approx(expected["loss_last"], rel=1e-5)
    for column in ("model_flops_per_token", "hardware_flops_per_token"):
        assert found[column] == expected[column]
