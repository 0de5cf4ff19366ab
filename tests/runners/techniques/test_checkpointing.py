"""Checkpointing and offloaded activations: the same gradients for less memory, in real steps and in the trace."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run, literal_cases, refusal, tiny
from traces import A100, SIMULATED, gpt2, left_by_forward, most_held, on_this_gpu, traced

from vramsweep.harness.spec import trial, trial_parser
from vramsweep.runners.measure.dispatch_modes import LiveBytes
from vramsweep.runners.model import build
from vramsweep.runners.predict import predicted_row
from vramsweep.runners.techniques.activation_offload import offloaded
from vramsweep.runners.worker import run_rank

pytestmark = pytest.mark.deterministic

CPU = torch.device("cpu")
ZERO = {"options": {"zero_optimization": {"reduce_bucket_size": 1 << 20, "allgather_bucket_size": 1 << 20}}}
HEADS = {"config": {"num_key_value_heads": 4, "num_hidden_layers": 3}}  # as many as query heads
# What can be asked for, beside none.
WAYS: dict[str, dict[str, Any]] = dict(literal_cases("ways_of_checkpointing"))


def tried(**over: Any) -> trial.Trial:
    values = tiny(**over)
    if over.get("model", {}).get("model_type") == "gpt2":
        values["model"] = over["model"]
    return trial_parser.parse(values)


def step(chosen: trial.Trial, offload: bool = False) -> tuple[torch.nn.Module, int]:
    """The model after a forward and a backward pass, and the bytes that the forward pass left behind."""
    build.prepare(chosen)
    net = build.model(chosen, CPU)
    if offload:
        offloaded(net, CPU)
    batch = build.data(chosen).batch(0, chosen.micro_batch)
    gc.collect()
    with LiveBytes() as live:
        before = live.live
        loss = net(**batch).loss
        held = live.live - before
        loss.backward()
    return net, held


def gradients(net: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, gpt2()], ids=["qwen2", "gpt2"])
def test_gradients_are_those_of_a_plain_step_for_less_memory(model: dict[str, Any]) -> None:
    plain, without = step(tried(model=model, seq_len=128))
    ways = {
        name: way for name, way in WAYS.items() if not (model and "mm" in way.values())
    }  # GPT-2's layers call addmm
    for name, way in ways.items():
        saved, less = step(tried(model=model, seq_len=128, **way))
        assert less < without, name
        for expected, found in zip(gradients(plain), gradients(saved), strict=True):
            torch.testing.assert_close(found, expected, msg=name)


@pytest.mark.slow
def test_the_ways_keep_as_much_as_they_say() -> None:
    """Full keeps least, then selective, which keeps more the more operators are named; half the layers keep half."""
    held = {name: step(tried(model=HEADS, seq_len=128, **over))[1] for name, over in {"none": {}, **WAYS}.items()}
    assert held["full"] < held["selective, mm"] < held["selective"] < held["none"]
    assert held["selective"] < held["selective, every 2nd"] < held["none"]
    layer = (held["none"] - held["full"]) / 3  # what a layer's recomputation saves
    assert held["every 2nd"] == pytest.approx(held["full"] + layer, rel=0.02)  # layers 0 and 2 of three


@pytest.mark.slow
def test_the_trace_saves_the_bytes_that_a_real_step_saves(tmp_path: Path) -> None:
    """fp32, where CUDA's memory-efficient kernel and the CPU's flash kernel save tensors of the same sizes."""
    over: dict[str, Any] = {"model": HEADS, "seq_len": 128, "micro_batch": 4}
    real, predicted = step(tried(**over))[1], left_by_forward(traced(tmp_path, **over))
    whole = {
        "every 2nd": (2, 0),
        "reentrant": (3, 4 * 128 * 64 * 4),
    }  # layers, and a layer's result, computed again too
    for name in (*whole, "selective", "selective, mm"):
        saved, trace = real - step(tried(**over, **WAYS[name]))[1], traced(tmp_path, **over, **WAYS[name])
        # of some MB; the difference is the generator's state, which CUDA's kernel saves
        assert predicted - left_by_forward(trace) == pytest.approx(saved, abs=256), name
        if name in whole:  # else a layer keeps what it would not have saved
            again = saved / whole[name][0] + whole[name][1]  # one layer's at a time
            assert most_held(trace)["recomputed_activations"] == pytest.approx(again, abs=512), name


@pytest.mark.slow
def test_the_trainer_is_predicted_to_save_the_same(tmp_path: Path) -> None:
    over: dict[str, Any] = {"model": HEADS, "seq_len": 128, "micro_batch": 4}
    for way in (WAYS["reentrant"], WAYS["selective"]):
        alone, trainer = (
            left_by_forward(traced(tmp_path, runner=runner, **over))
            - left_by_forward(traced(tmp_path, runner=runner, **over, **way))
            for runner in ({"name": "torch"}, {"name": "trainer"})
        )
        assert trainer == alone


@pytest.mark.slow
def test_deepspeed_is_predicted_to_save_the_same(run_sweep: Run) -> None:
    over: dict[str, Any] = {"model": HEADS, "seq_len": 512, "micro_batch": 4, "device": SIMULATED}
    zero = {"runner": {"name": "deepspeed", **ZERO}, "sharding": "zero2", "precision": "bf16"}
    loops = (zero, {"precision": "bf16_pure"})
    rows = run_sweep(*(tiny(**over, **loop, **way) for loop in loops for way in ({}, WAYS["selective"])))
    assert [row["outcome"] for row in rows] == ["ok"] * 4, [row["reason"] for row in rows]
    peaks = [row["forward_peak_allocated_bytes"] for row in rows]
    assert peaks[0] - peaks[1] == pytest.approx(peaks[2] - peaks[3], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["torch", "trainer"])
def test_steps_are_real(tmp_path: Path, runner: str) -> None:
    def row(**over: Any) -> dict[str, Any]:
        found = run_rank.run(tried(runner={"name": runner}, **over), tmp_path)
        assert found is not None
        return found

    plain = row()
    for way in ("full", "every 2nd", "reentrant", "selective"):
        saved = row(**WAYS[way])
        for name in ("loss_first", "loss_last", "model_flops_per_token"):
            assert saved[name] == pytest.approx(plain[name]), (way, name)
        repeated = saved["hardware_flops_per_token"] - plain["hardware_flops_per_token"]
        assert (repeated > 0) is (way != "selective") and repeated >= 0  # which keeps every operator with FLOPs


@pytest.mark.slow
def test_steps_are_real_with_ranks_and_deepspeed_too(run_sweep: Run) -> None:
    zero = {"runner": {"name": "deepspeed", **ZERO}, "sharding": "zero2", "precision": "bf16"}
    ways = ({}, WAYS["reentrant"], WAYS["selective"])
    shardings = ({"sharding": "ddp", "world_size": 2}, {"sharding": "fsdp2", "world_size": 2}, zero)
    rows = run_sweep(*(tiny(**sharding, **way) for sharding in shardings for way in ways))
    assert [row["outcome"] for row in rows] == ["ok"] * 9, [row["reason"] for row in rows]
    for at in (0, 3, 6):
        plain, *others = rows[at : at + 3]
        for row in others:
            assert row["loss_last"] == pytest.approx(plain["loss_last"], rel=1e-3)


@pytest.mark.slow
def test_operators_that_are_not_there_or_not_called_are_refused() -> None:
    def keep(names: str) -> None:
        step(tried(checkpointing="selective", checkpointing_ops=names))

    assert "no operator addm; did you mean add" in refusal(trial.InvalidTrial, keep, "mm+addm")
    assert "no layer of this model calls conv2d" in refusal(trial.InvalidTrial, keep, "mm+conv2d")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["none", "full", "reentrant"])
def test_offloaded_activations_give_the_same_gradients(way: str) -> None:
    """The mechanism on a CPU, whose memory is the host's: every tensor is copied away and back."""
    over = WAYS.get(way, {})
    plain, held = step(tried(seq_len=128, **over))
    offload, copied = step(tried(seq_len=128, **over), offload=True)
    for expected, found in zip(gradients(plain), gradients(offload), strict=True):
        torch.testing.assert_close(found, expected)
    assert copied != held


def test_offload_takes_what_is_saved_and_leaves_the_weights() -> None:
    """Bytes that stay, of a step whose host memory is device meta, so that no copy of it is counted."""
    chosen = tried(seq_len=128)

    def saved(host: torch.device | None) -> int:
        build.prepare(chosen)
        net = build.model(chosen, CPU)
        weights = {p.untyped_storage()._cdata for p in net.parameters()}
        seen: dict[int, int] = {}
        if host is not None:
            offloaded(net, host)
        loss = net(**build.data(chosen).batch(0, 2)).loss
        stack, nodes = [loss.grad_fn], set()
        while stack:
            node = stack.pop()
            if node is None or node in nodes:
                continue
            nodes.add(node)
            stack += [following for following, _ in node.next_functions]
            for name in (n for n in dir(node) if n.startswith("_raw_saved_")):
                value = getattr(node, name)
                for raw in value if isinstance(value, (list, tuple)) else [value]:
                    packed = raw.data[1] if host is not None and raw.data is not None else raw.data
                    if (
                        packed is not None
                        and packed.device.type == "cpu"
                        and packed.untyped_storage()._cdata not in weights
                    ):
                        seen[packed.untyped_storage()._cdata] = packed.untyped_storage().nbytes()
        return sum(seen.values())

    everything = saved(None)
    assert everything > 1 << 20
    # what is left is below 1 KiB each: the reciprocal norms of 2 x 128 tokens are 1 KiB
    assert saved(torch.device("meta")) < 0.01 * everything


@pytest.mark.slow
def test_offload_is_predicted_to_empty_the_card(tmp_path: Path) -> None:
    """With full checkpointing the layers' inputs go; without, all but what was below 1 KiB or is kept elsewhere."""
    over: dict[str, Any] = {"model": HEADS, "seq_len": 256, "micro_batch": 4, "precision": "bf16"}
    plain = left_by_forward(traced(tmp_path, **over))
    assert left_by_forward(traced(tmp_path, **over, activation_offload=True)) < 0.15 * plain
    inputs = 3 * 4 * 4 * 256 * 64  # layers, fp32, batch, length, width
    for way in ("full", "reentrant"):
        full = left_by_forward(traced(tmp_path, **over, **WAYS[way]))
        gone = full - left_by_forward(traced(tmp_path, **over, **WAYS[way], activation_offload=True))
        assert gone >= inputs, way


@pytest.mark.slow
def test_no_speed_is_estimated_where_copies_over_the_bus_would_set_the_pace(tmp_path: Path) -> None:
    over: dict[str, Any] = {"device": SIMULATED, "precision": "bf16"}
    trace = traced(tmp_path, precision="bf16", activation_offload=True)
    assert predicted_row.speed(tried(**over), trace, A100)[0]["estimated_step_s"]
    found, why = predicted_row.speed(tried(**over, activation_offload=True), trace, A100)
    assert "estimated_step_s" not in found and why is not None and "host limits the speed" in why


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["none", "full"])
def test_a_card_is_emptied_as_predicted_and_learns_the_same(run_sweep: Run, way: str) -> None:
    over: dict[str, Any] = {"seq_len": 1024, "micro_batch": 8, "precision": "bf16", **WAYS.get(way, {})}
    (plain, _), (offload, predicted) = on_this_gpu(
        run_sweep, *(tiny(activation_offload=on, **over) for on in (False, True))
    )
    assert offload["loss_last"] == pytest.approx(plain["loss_last"], rel=1e-3)
    column = "backward_peak_allocated_bytes"
    assert offload[column] < plain[column]
    assert predicted[column] == pytest.approx(offload[column], rel=0.1)
