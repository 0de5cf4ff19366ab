"""Samples: padding and where it stands, documents packed into one sample, the key-value cache; real and predicted."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import refusal, save_tokenizer, tiny
from traces import A100, SIMULATED, alive, gpt2, trace_trial
from transformers import AutoConfig, AutoTokenizer

from vramsweep.harness.spec import trial, trial_parser
from vramsweep.runners.measure.dispatch_modes import LiveBytes
from vramsweep.runners.model import build
from vramsweep.runners.predict import mask_facts, predicted_row
from vramsweep.runners.trace.trace_data import Trace
from vramsweep.runners.worker import run_rank

pytestmark = pytest.mark.deterministic

CPU = torch.device("cpu")
HALF: dict[str, Any] = {"precision": "bf16", "seq_len": 64, "micro_batch": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of whole words beside a tiny model's configuration, and two texts."""
    path = tmp_path_factory.mktemp("model")
    save_tokenizer(path)
    AutoConfig.for_model("qwen2", **tiny()["model"]["config"]).save_pretrained(path)
    (path / "short.txt").write_text("a b c\nb b\nc c c c c\na b\n")
    (path / "long.txt").write_text("\n".join([" ".join("abc"[i % 3] for i in range(100))] * 4))
    return path


def tried(**over: Any) -> trial.Trial:
    return trial_parser.parse(tiny(**over))


def text(folder: Path, name: str, **over: Any) -> trial.Trial:
    values = tiny(**over, data=str(folder / name))
    values["model"] = {"name": "mine", "model_type": None, "config": {}, "path": str(folder), "max_positions": None}
    return trial_parser.parse(values)


def traced(chosen: trial.Trial, folder: Path) -> tuple[Trace, dict[str, Any]]:
    return trace_trial(chosen.model_dump(), folder)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_share_of_every_sample_is_padding(side: str) -> None:
    data = build.data(tried(padding=0.25, padding_side=side))
    assert data.columns["padding_fraction"] == 0.25
    for sample in data.samples:
        mask = sample["attention_mask"].tolist()
        assert mask == ([1] * 24 + [0] * 8 if side == "right" else [0] * 8 + [1] * 24)
        assert [label == -100 for label in sample["labels"].tolist()] == [not kept for kept in mask]
    assert "attention_mask" not in build.data(tried()).samples[0]


def test_packed_synthetic_samples_hold_four_documents() -> None:
    data = build.data(tried(packing="documents", seq_len=30))
    sample = data.samples[0]
    assert sample["position_ids"].tolist() == [*range(8), *range(8), *range(8), *range(6)]
    assert (sample["labels"] == -100).nonzero().flatten().tolist() == [0, 8, 16, 24]
    assert data.columns["padding_fraction"] == 0
    plain = build.data(tried(seq_len=30)).samples[0]["input_ids"]
    assert torch.equal(plain, build.data(tried(packing="wrapped", seq_len=30)).samples[0]["input_ids"])


def test_texts_are_padded_on_either_side_or_joined_and_cut(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    left = build.data(text(folder, "short.txt", seq_len=4, padding_side="left"))
    assert left.samples[0]["input_ids"].tolist() == [padding, 2, 3, 4]
    assert left.samples[0]["labels"].tolist() == [-100, 2, 3, 4]
    right = build.data(text(folder, "short.txt", seq_len=4))
    assert [sample["input_ids"].tolist() for sample in right.samples[1:3]] == [[3, 3, padding, padding], [4] * 4]
    assert right.samples[0]["labels"].tolist() == [2, 3, 4, -100]
    assert right.columns["padding_fraction"] == pytest.approx(5 / 16)
    joined = [2, 3, 4, end, 3, 3, end, 4, 4, 4, 4, 4, end, 2, 3, end]
    wrapped = build.data(text(folder, "short.txt", seq_len=5, packing="wrapped"))
    assert [sample["input_ids"].tolist() for sample in wrapped.samples] == [joined[:5], joined[5:10], joined[10:15]]
    documents = build.data(text(folder, "short.txt", seq_len=5, packing="documents"))
    assert [sample["position_ids"].tolist() for sample in documents.samples] == [
        [0, 1, 2, 3, 0], [0, 1, 0, 1, 2], [0, 1, 2, 0, 1],
    ]  # fmt: skip
    with pytest.raises(trial.InvalidTrial, match="has 16 tokens, fewer than one sample"):
        build.data(text(folder, "short.txt", seq_len=17, packing="wrapped"))


@pytest.mark.parametrize(("model", "attention"), [({}, "sdpa"), ({}, "sdpa_math"), (gpt2(), "eager")], ids=str)
def test_documents_see_nothing_of_each_other(model: dict[str, Any], attention: str) -> None:
    def changed_by_the_first(packing: str) -> list[bool]:
        """Which of four documents give other predictions when the first one's tokens change."""
        values = tiny(packing=packing, attention=attention)
        values["model"] = model or values["model"]
        chosen = trial_parser.parse(values)
        net = build.model(chosen, CPU).eval()
        batch = build.data(chosen).batch(0, 2)
        before = net(**batch).logits
        batch["input_ids"][:, :8] = (batch["input_ids"][:, :8] + 1) % 512
        after = net(**batch).logits
        return [not torch.allclose(a, b, atol=1e-5) for a, b in zip(before.split(8, 1), after.split(8, 1), strict=True)]

    assert changed_by_the_first("documents") == [True, False, False, False]
    assert changed_by_the_first("wrapped") == [True] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runner", "over"),
    [
        ("torch", {"packing": "wrapped"}),
        *((runner, {"padding": 0.25, "padding_side": "left"}) for runner in ("torch", "trainer")),
        *((runner, {"packing": "documents", "use_cache": "off"}) for runner in ("torch", "trainer")),
        ("trainer", {"use_cache": "on"}),
    ],
)
def test_steps_are_real(tmp_path: Path, runner: str, over: dict[str, Any]) -> None:
    row = run_rank.run(tried(runner={"name": runner}, **over), tmp_path)
    assert row is not None
    assert row["padding_fraction"] == over.get("padding", 0.0)
    assert 5 < row["loss_last"] < 8
    if runner == "trainer" and "use_cache" in row["runner_config"]:
        assert row["runner_config"]["use_cache"] == (over.get("use_cache") == "on")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runner", "over", "kernel"),
    [
        ("torch", {}, "flash"),
        *((runner, {"padding": 0.25}, "efficient") for runner in ("torch", "trainer")),
        ("torch", {"padding": 0.25, "padding_side": "left"}, "efficient"),
        ("torch", {"packing": "wrapped"}, "flash"),
        *((runner, {"packing": "documents"}, "efficient") for runner in ("torch", "trainer")),
    ],
)
def test_a_mask_is_made_where_there_is_something_to_hide(
    tmp_path: Path, runner: str, over: dict[str, Any], kernel: str
) -> None:
    """Flash takes no mask, so the card's kernel says whether there is one."""
    chosen = tried(device=SIMULATED, runner={"name": runner}, use_cache="off", **HALF, **over)
    _, details = traced(chosen, tmp_path)
    assert details["attention_kernels"] == [kernel]
    assert details["padding_fraction"] == over.get("padding", 0.0)


@pytest.mark.slow
def test_the_masks_of_a_trace_are_those_of_a_real_step(tmp_path: Path) -> None:
    """Padding, packing and a cache add the same to what a forward pass leaves behind, real and traced, in fp32."""
    heads = {"config": {"num_key_value_heads": 4}}

    def held(**over: Any) -> tuple[int, int]:
        values: dict[str, Any] = {"model": heads, "seq_len": 64, "micro_batch": 2, "attention": "eager", **over}
        chosen = tried(**values)
        net, data = build.model(chosen, CPU), build.data(chosen)
        gc.collect()
        with LiveBytes() as live:
            batch = data.batch(0, 2)
            before = live.live
            loss = net(**batch).loss
            real = live.live - before
        assert loss.requires_grad
        trace, _ = traced(tried(device=SIMULATED, **values), tmp_path)
        start, end = next(
            (trace.marks[i].end, trace.marks[i + 1].end) for i, m in enumerate(trace.marks) if m.phase == "optimizer"
        )
        return real, sum(trace.sizes[n] for n in alive(trace.events[start:end]))

    plain = held()
    for over in ({"padding": 0.25}, {"packing": "documents"}, {"use_cache": "on"}):
        real, predicted = (a - b for a, b in zip(held(**over), plain, strict=True))
        batch = 2 * 64 * 8 if "use_cache" not in over else 0  # one more tensor of integers, made within the traced step
        assert predicted - batch == pytest.approx(real, abs=64), over


@pytest.mark.slow
def test_text_is_taken_as_it_is(folder: Path, tmp_path: Path) -> None:
    """Texts that fill their samples have no padding, and transformers drops the mask; short ones keep it."""
    for name, kernel in (("long.txt", "flash"), ("short.txt", "efficient")):
        _, details = traced(text(folder, name, device=SIMULATED, **HALF), tmp_path)
        assert details["attention_kernels"] == [kernel]
        assert (details["padding_fraction"] > 0) == (kernel == "efficient")
    flash = HALF | {"attention": "flash_attention_2"}
    _, details = traced(text(folder, "long.txt", device=SIMULATED, **flash), tmp_path)
    assert details["attention_effective"] == "flash_attention_2"
    with pytest.raises(trial.InvalidTrial, match="padding of varying lengths cannot be predicted"):
        traced(text(folder, "short.txt", device=SIMULATED, **flash), tmp_path)
    packed = {"device": SIMULATED, "packing": "documents", **flash, "micro_batch": 1, "seq_len": 8}
    traced(text(folder, "short.txt", **packed), tmp_path)


def test_facts_are_of_the_samples(folder: Path) -> None:
    assert mask_facts.facts(build.data(tried(seq_len=30, packing="documents"))) == mask_facts.Facts(
        False, frozenset({30}), 4, 8
    )
    assert mask_facts.facts(build.data(tried(padding=0.5))) == mask_facts.Facts(True, frozenset({16}), 1, 32)
    short = mask_facts.facts(build.data(text(folder, "short.txt", seq_len=4)))
    assert short == mask_facts.Facts(True, frozenset({2, 3, 4}), 1, 4)


@pytest.mark.slow
def test_flash_attn_leaves_the_padding_out(tmp_path: Path) -> None:
    """transformers' own unpadding: what remains of the tokens is what is attended, fewer operations for it."""

    def flops(padding: float) -> int:
        chosen = tried(device=SIMULATED, attention="flash_attention_2", padding=padding, **HALF)
        found: int = predicted_row.speed(chosen, traced(chosen, tmp_path)[0], A100)[0]["estimated_flops"]
        return found

    attention = 2 * 4 * 2 * 7 * 16 * 64 * 64 * 2 // 2  # layers, heads, FLOPs, products, width, pairs, samples, causal
    assert flops(0) - flops(0.5) == attention * 3 // 4


def test_what_a_text_or_a_model_does_not_take_is_refused(folder: Path) -> None:
    assert "needs data=synthetic" in refusal(trial.InvalidTrial, text, folder, "short.txt", padding=0.25)
    bloom = tiny(packing="documents")
    bloom["model"] = {"name": "bloom", "model_type": "bloom", "config": {"hidden_size": 64, "n_layer": 1, "n_head": 4}}
    with pytest.raises(trial.InvalidTrial, match="accepts no position_ids; use packing=wrapped"):
        build.model(trial_parser.parse(bloom | {"attention": "eager"}), CPU)
    with pytest.raises(trial.InvalidTrial, match=r"BloomForCausalLM does not support .*; use attention=eager"):
        run_rank.run(trial_parser.parse(bloom | {"packing": "none"}), folder)


def test_use_cache_is_the_model_s() -> None:
    assert build.model(tried(use_cache="on"), CPU).config.use_cache is True
    assert build.model(tried(use_cache="off", runner={"name": "trainer"}), CPU).config.use_cache is False
    assert build.model(tried(), CPU).config.use_cache is False
