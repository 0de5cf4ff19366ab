"""`vramsweep predict`: its ranges, mistakes and output; planning thousands of trials; the fixture `predicted`."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import TARGETS, Cli, cases, parametrized, refusal, tiny
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_automatic_config_search_path
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

from vramsweep.harness.config import compose, typed_words
from vramsweep.harness.config.conf_files import CONF
from vramsweep.harness.hardware.gpu_lookup import CONTEXT_BYTES
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.units import format_gib
from vramsweep.harness.rows import journal
from vramsweep.harness.rows.schema import complete_row
from vramsweep.harness.spec import fit_text, trial_parser
from vramsweep.harness.sweep import plan, row_builder
from vramsweep.harness.verbs import predict, predict_answer
from vramsweep.harness.verbs.pytest_plugin import Predicted, predicted

__all__ = ["predicted"]
pytestmark = pytest.mark.deterministic


@pytest.mark.parametrize(("word", "spelled"), cases("ranges"))
def test_ranges_in_hydra_s_spelling(word: str, spelled: str) -> None:
    assert typed_words.spell_range(word) == spelled


def test_the_device_may_be_said() -> None:
    assert predict.words(["device=simulated", "device.gpu=h200"]) == ["-m", "device=simulated", "device.gpu=h200"]


@pytest.mark.parametrize(("typed", "parts"), cases("predict_mistakes"))
def test_mistakes_are_one_line(typed: str, parts: str, here: Path, cli: Cli) -> None:
    model = [] if typed.startswith("model") else ["model=tiny"]
    (line,) = cli.refuse("predict", *model, *typed.split()).splitlines()
    assert line.startswith("vramsweep: ")
    for part in parts.split(" | "):
        assert part in line
    assert not list(here.rglob("journal.jsonl"))


@pytest.mark.slow
def test_a_prediction_is_a_sweep_with_a_table(here: Path, cli: Cli) -> None:
    words = ["model=tiny", "device.gpu=t4-16gb", "seq_len=8..16..8,4096", "micro_batch=400", "report=false"]
    words += ["runner=deepspeed", "runner.zero_stage=3", "precision=fp16", "allocator=default,expandable"]
    said = cli.run("predict", *words)
    folder = here / "results" / "tiny-deepspeed-predicted"
    rows, _ = journal.read(folder)
    wanted = {("simulated", "zero3", "t4-16gb")}
    assert {(row["device"], row["sharding"], row["simulated_gpu"]) for row in rows} == wanted
    assert sorted((row["seq_len"], row["outcome"]) for row in rows) == [
        *[(length, "ok") for length in (8, 8, 16, 16)],
        *[(4096, "oom")] * 2,
    ]
    table = [line.split() for line in said.out.splitlines() if line.split()[:1] in (["default"], ["expandable"])]
    assert [line[0] for line in table] == ["default", "expandable"]
    for name, *cells in table:
        fits = [row["peak_reserved_bytes"] for row in rows if row["allocator"] == name and row["outcome"] == "ok"]
        longest, *peak, first, per_token, mark, speed, count = cells
        assert (longest, first, mark, count) == ("16", "4,096", "≈", "3") and float(per_token) > 0
        assert peak == [format_gib(min(fits)), "to", format_gib(max(fits))]
        assert len(speed.replace(",", "").rstrip("0")) <= 2  # digits of an estimate
    assert len([line for line in said.out.splitlines() if line.startswith("[")]) <= 6
    (file,) = journal.files(folder)
    before = file.read_bytes()
    assert "6 finished before, 0 to do" in cli.run("predict", *words).out
    assert file.read_bytes() == before


@pytest.mark.slow
def test_lengths_that_cannot_be_traced_are_no_lengths_that_do_not_fit(tmp_path: Path, cli: Cli) -> None:
    target = f"runner.target={TARGETS / 'simulated_faults.py'}:raises_beyond_4"
    words = ["predict", "--largest", "seq_len", "--json", "runner=custom", target, f"results={tmp_path}"]
    said = cli.run(*words, "model=tiny", "seq_len=3..5", status=1)
    (found,) = json.loads(said.out)
    assert (found["all_up_to"], found["largest"], found["looked_at"], found["unanswered"]) == (4, 4, 2, 1)
    assert "1 of 3 values of seq_len could not be predicted" in said.err
    (found,) = json.loads(cli.run(*words, "model=tiny", "seq_len=5..6", status=1).out)
    assert (found["largest"], found["looked_at"], found["trace_basis"]) == (None, 0, None)


def test_the_largest_wants_a_folder_that_can_be_written(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "trials").write_text("")
    words = ["--largest", "seq_len", "model=tiny", "seq_len=1..4", f"results={tmp_path}", "name=taken"]
    (line,) = cli.refuse("predict", *words).splitlines()
    assert line.startswith("vramsweep: cannot write under")


def test_what_is_over_a_limit_and_what_is_not_known_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    fits = {"trial_id": "a", "outcome": "ok", "trial": tiny(), "peak_reserved_bytes": 3 << 20}
    full = {"trial_id": "b", "outcome": "oom", "trial": tiny(), "unlimited_peak_reserved_bytes": 9 << 20}
    failed = {"trial_id": "c", "outcome": "crash", "trial": tiny(), "reason": "my own mistake"}
    rows = [complete_row(row) for row in (fits, full, failed)]
    assert predict.beyond(rows[:2], None) == predict.beyond(rows[:2], 9 << 20) == 0
    assert capsys.readouterr().err == ""
    assert predict.beyond(rows, 4 << 20) == 1
    said = capsys.readouterr().err
    assert said.startswith("1 of 3 trials reserve more than 4.0 MiB, 1 of 3 trials") and said.endswith(": 9.0 MiB\n")
    assert predict.beyond(rows, 9 << 20) == 1
    assert "reserve more" not in (said := capsys.readouterr().err) and "my own mistake" in said


SIZES: dict[str, Any] = {
    "outcome": "ok", "peak_reserved_bytes": 40 << 30, "peak_allocated_bytes": 30 << 30,
    "calibrated_tokens_per_s": 12345.0, "calibrated_step_s": 1.0, "calibrated_step_low_s": 0.9,
    "calibrated_step_high_s": 1.25,
}  # fmt: skip
FULL = {"outcome": "oom", "unlimited_peak_reserved_bytes": 200 << 30, "phase": "step 1, forward"}


def answer(
    capsys: pytest.CaptureFixture[str], trials: list[dict[str, Any]], came: list[dict[str, Any]], *words: str
) -> list[str]:
    """Return the lines that are printed for these trials and their results."""
    device = {"device": {"name": "simulated", "gpu": "h100-80gb"}}
    items = [one for (one,) in plan.expand_trials([one | device for one in trials], 1)]
    rows = {
        item.trial_id: complete_row(row_builder.axis_columns(item) | columns)
        for item, columns in zip(items, came, strict=True)
    }
    predict_answer.show_answer(items, rows, words, Path("results/x"))
    return capsys.readouterr().out.splitlines()


def test_a_trial_that_fits_has_a_block(capsys: pytest.CaptureFixture[str]) -> None:
    said = answer(capsys, [tiny(seq_len=1024)], [SIZES], "model=tiny", "seq_len=1024", "name=x", "report=false")
    assert said[1:] == [
        "tiny · 1 x h100-80gb · fp32 · batch 2 per GPU · 1,024 tokens, predicted",
        "  fits: peak reserved 40.0 of 78.3 GiB (51 %), 38.3 GiB free",
        "  speed: about 12,000 (9,900 to 14,000) tokens/s; an estimate, not measured",
        "",
        "limit: the GPU's memory minus 0.75 GiB for the CUDA context",
        "next:",
        "  vramsweep explain model=tiny seq_len=1024  # what uses the memory",
        "  vramsweep predict --largest seq_len model=tiny  # the longest sequence that fits",
        "  vramsweep report results/x  # figures and a page of these rows",
    ]


def test_what_a_prediction_does_not_cover_is_in_its_first_and_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    codes = {"not_covered": ["compiled_code", "evaluation"]}
    eager = "code that torch.compile would compile, taken as eager (published peaks are 0.5 to 3.5 times eager's)"
    last = [f"not covered: {eager}", "not covered: evaluation after the traced steps", ""]
    said = answer(capsys, [tiny()], [SIZES | codes])
    assert said[1].endswith(f", predicted without {eager}") and [one.strip() for one in said[4:7]] == last
    said = answer(capsys, [tiny(), tiny(seq_len=9)], [SIZES | codes, SIZES])
    assert said[1].endswith(f", predicted without {eager}") and {*last} <= {*said}


def test_a_command_without_settings_names_the_model_that_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    assert "  vramsweep explain model=tiny  # what uses the memory" in answer(capsys, [tiny()], [SIZES], "name=x")


def test_several_ranks_have_bounds_and_say_what_is_not_included(capsys: pytest.CaptureFixture[str]) -> None:
    trial = tiny(sharding="fsdp2", world_size=8, precision="bf16")
    said = answer(capsys, [trial], [SIZES | {"peak_reserved_most_bytes": 44 << 30}])
    assert said[1].startswith("tiny · 8 x h100-80gb with fsdp2 · bf16 · batch 2 per GPU · 32 tokens")
    assert "  fits: peak reserved 40.0 to 44.0 of 78.3 GiB (56 %), at least 34.3 GiB free" in said[2]
    assert "tokens/s of all 8 GPUs together" in said[3] and said[4].startswith("  not included: NCCL's buffers")


def test_what_fits_only_by_emptying_the_cache_or_without_nccl_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    trial = tiny(sharding="fsdp2", world_size=8, precision="bf16")
    near = SIZES | {"peak_reserved_bytes": 78 << 30, "alloc_retries": 7}
    said = answer(capsys, [trial], [near])
    assert said[2].startswith("  only just fits: peak reserved 78.0 of 78.3 GiB")
    assert said[2].endswith("; PyTorch empties its cache to stay within the limit, which takes time")
    tight = (
        "  not included: NCCL's buffers of 1 to 2 GiB, which may not fit next to this peak (device.headroom_gib=2 "
        "includes them)"
    )
    assert said[4] == tight
    roomy = tiny(sharding="fsdp2", world_size=8, device={"name": "simulated", "gpu": "h100-80gb", "headroom_gib": 2.0})
    assert not list(fit_text.list_exclusions(trial_parser.parse(roomy), 0))  # it is counted


def test_a_table_says_where_nccl_has_no_room_and_what_the_limit_of_another_size_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trials = [tiny(sharding="fsdp2", world_size=8, precision="bf16", seq_len=n) for n in (64, 128, 256)]
    near = SIZES | {"peak_reserved_bytes": 77 << 30}
    assert any("which may not fit next to this peak" in line for line in answer(capsys, trials, [SIZES, near, FULL]))
    assert not any("which may not fit" in line for line in answer(capsys, trials, [SIZES, SIZES, FULL]))
    alone = [tiny(seq_len=n, precision="bf16") for n in (64, 128)]
    mixed = answer(capsys, [*trials[:2], *alone], [SIZES, SIZES, near, near])
    assert not any("which may not fit" in line for line in mixed)  # of one GPU there is nothing to exchange
    sized = trial_parser.parse(tiny(device={"name": "simulated", "gpu": "h100-80gb", "memory_gib": 80.0}))
    own = sized.device.card  # what PyTorch reports of it is not known, and taken to be 9 % less
    assert sized.memory_limit() == int(80 * 0.91 * 2**30) - CONTEXT_BYTES and own.reported_mib is None
    right = "limit: the GPU's memory minus 9 % (the size that it reports is unknown) and 0.75 GiB for the CUDA context"
    assert fit_text.describe_limit([sized]) == right
    kept = trial_parser.parse(tiny(device={"name": "simulated", "gpu": "h100-80gb", "headroom_gib": 2.0}))
    assert fit_text.describe_limit([kept]).endswith(" 0.75 GiB for the CUDA context, and 2 GiB headroom")
    assert fit_text.describe_limit([kept, sized]).endswith(" context, and up to 2 GiB headroom")


def test_what_the_host_needs_is_said_where_no_size_of_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    much = SIZES | {"host_peak_bytes": 200 << 30}
    [line] = [line for line in answer(capsys, [tiny()], [much]) if "host memory" in line]
    assert line.startswith("  host memory: each node needs 200.0 GiB; device.node_memory_gib=N")
    assert not any("host memory" in line for line in answer(capsys, [tiny()], [SIZES | {"host_peak_bytes": 9 << 30}]))


def test_weights_in_fp32_under_an_adapter_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for precision, said in (("bf16", "bf16 (fp32 weights)"), ("bf16_pure", "bf16_pure")):
        trial = tiny(adapter="lora", precision=precision)
        assert answer(capsys, [trial], [SIZES])[1].startswith(f"tiny · 1 x h100-80gb · {said} · batch 2")
    four_bits = tiny(adapter="lora", precision="bf16", quantization="nf4")
    assert "fp32 weights" not in answer(capsys, [four_bits], [SIZES])[1]


def test_what_is_next_goes_along_the_axis_from_the_smallest_that_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trials = [tiny(micro_batch=n, sharding="fsdp2", world_size=8) for n in (1, 2, 4, 8)]
    came = [SIZES, SIZES, FULL | {"unlimited_peak_reserved_bytes": 90 << 30}, FULL]
    said = answer(capsys, trials, came, "model=tiny", "micro_batch=1,2,4,8")
    assert "  vramsweep advise model=tiny micro_batch=4  # what makes it fit" in said
    assert "  vramsweep predict --largest micro_batch model=tiny  # the largest batch that fits" in said
    assert "tokens/s: of all GPUs together" in said and any(line.startswith("not included: NCCL") for line in said)


def test_one_that_does_not_fit_says_what_is_missing_and_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    trials = [tiny(seq_len=64), tiny(seq_len=64, precision="bf16"), tiny(seq_len=64, precision="fp16")]
    failed = {"outcome": "crash", "reason": "it broke"}
    said = answer(capsys, trials, [SIZES, FULL, failed], "model=tiny", "seq_len=64", "precision=fp32,bf16,fp16")
    need = "needs 200.0 GiB, 121.7 GiB above the limit of 78.3 GiB"
    assert f"  does not fit: {need} (memory runs out in step 1, forward)" in said
    assert "  no prediction (crash): it broke" in said
    assert "  vramsweep advise model=tiny seq_len=64 precision=bf16  # what makes it fit" in said
    # a preset's axes are not the command's words
    said = answer(capsys, trials, [SIZES, FULL, failed], "sweep=fit-24gb")
    assert said[said.index("next:") :] == ["next:", "  vramsweep report results/x  # figures and a page of these rows"]


def test_many_have_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    trials = [tiny(seq_len=n, precision=p) for p in ("fp32", "bf16", "fp16") for n in (64, 128)]
    low = SIZES | {"peak_reserved_bytes": 20 << 30, "peak_allocated_bytes": 10 << 30}
    said = answer(capsys, trials, [low, SIZES, low, FULL, FULL, FULL])
    lines = {line.split()[0]: " ".join(line.split()) for line in said if line[:4] in ("fp32", "bf16", "fp16")}
    assert lines == {
        "fp32": "fp32 128 or more (longest tried) 20.0 to 40.0 – 160 ≈ 12,000 2",
        "bf16": "bf16 64 20.0 128 – ≈ 12,000 2",
        "fp16": "fp16 none needs 200.0 64 – – 2",
    }
    assert "tiny · h100-80gb · batch 2 · protocol=brief, predicted" in said


def test_a_table_says_where_the_model_takes_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    trials = [tiny(seq_len=n) for n in (64, 2048, 4096)]  # tiny has 4,096 positions
    said = answer(capsys, trials, [SIZES] * 3)
    assert any("4,096 (all)" in line for line in said) and any("all: the model's maximum" in line for line in said)
    assert not any("or more" in line for line in said)


def test_a_table_of_small_runs_is_in_mib(capsys: pytest.CaptureFixture[str]) -> None:
    trials = [tiny(seq_len=n, precision=p) for p in ("fp32", "bf16", "fp16") for n in (64, 128)]
    small = SIZES | {"peak_reserved_bytes": 74 << 20, "peak_allocated_bytes": 72 << 20}
    said = " ".join(" ".join(answer(capsys, trials, [small] * 6)).split())
    assert " MiB " in said and " 74.0 " in said and "peak MiB: peak reserved per GPU" in said
    assert "peak GiB" not in said


# planning


def by_hydra(*overrides: str) -> dict[str, Any]:
    """The configuration as Hydra composes it for this very job."""
    loader = ConfigLoaderImpl(create_automatic_config_search_path(None, None, str(CONF)))
    config = loader.load_configuration("config", list(overrides), RunMode.RUN)
    with open_dict(config):
        del config["hydra"]
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


@pytest.mark.slow
@parametrized("planned_axes")
def test_what_is_planned_is_what_hydra_composes(rest: list[str], axes: dict[str, tuple[Any, ...]], cli: Cli) -> None:
    words = [*rest, "device=simulated"]
    swept = [f"{key}={','.join(map(str, values))}" for key, values in axes.items()]
    trials = cli.json("plan", "-m", *words, *swept, "predict=false")["trials"]
    found = {one["trial_id"]: one["trial"] for one in trials}
    points = itertools.product(*axes.values())
    jobs = [[f"{key}={value}" for key, value in zip(axes, point, strict=True)] for point in points]
    expected = plan.expand_trials([by_hydra(*words, *job) for job in jobs], 1)
    assert found == {p.trial_id: p.resolved for (p,) in expected}
    assert len(found) == len(jobs)


@pytest.mark.slow
def test_lengths_share_one_configuration_unless_something_refers_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def counted(task: Any, jobs: Any, whole: bool = True) -> list[None]:
        counts.append((len(jobs), len({id(config) for config, _ in jobs})))
        return [None] * len(jobs)

    monkeypatch.setattr(compose.HydraTask, "take", counted)
    words = ["-m", "model=tiny", "device=simulated", "seq_len=range(1,65)", "micro_batch=1,2", "allocator=default,gc"]
    compose.resolve(words)
    compose.resolve([*words, "grad_accum=${micro_batch}"])
    assert counts == [(256, 2), (256, 256)]


@pytest.mark.slow
@pytest.mark.parametrize(("more", "loads"), [([], 12), (["+model.config.attn_pdrop=0.1,0.2"], 24)])
def test_hydra_composes_a_combination_of_options_once(
    more: list[str], loads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    load = ConfigLoaderImpl.load_sweep_config
    monkeypatch.setattr(
        ConfigLoaderImpl, "load_sweep_config", lambda self, *words: counts.append(words) or load(self, *words)
    )
    monkeypatch.setattr(compose.HydraTask, "take", lambda task, jobs, whole=True: [None] * len(jobs))
    groups = ["model=tiny,gpt2", "allocator=default,gc,expandable", "precision=bf16,fp32"]
    compose.resolve(["-m", "device=simulated", "seq_len=range(1,65)", *groups, *more])
    assert len(counts) == loads


WORDS = ("model=tiny", "seq_len=32,64", "device.gpu=rtx4090-24gb")


@pytest.mark.slow
def test_rows_are_predictions_a_limit_fails_the_test_and_mistakes_are_one_line(predicted: Predicted) -> None:
    rows = predicted(*WORDS, max_reserved="1GiB")
    assert {row["seq_len"]: row["outcome"] for row in rows} == {32: "ok", 64: "ok"}
    assert {row["device"] for row in rows} == {"simulated"}
    most = max(row["peak_reserved_bytes"] for row in rows)
    with pytest.raises(pytest.fail.Exception, match=r"2 of 2 trials reserve more than [\d.]+ MiB; tiny"):
        predicted(*WORDS, max_reserved=f"{(most >> 20) - 2}MiB")
    assert "of 2 trials reserve" in refusal(pytest.fail.Exception, predicted, *WORDS, max_reserved=f"{most - 1}B")
    assert len(predicted(*WORDS, max_reserved=f"{most}B")) == len(rows) == 2
    with pytest.raises(UserError, match=r"'25165824' has no unit; .*25165824B"):
        predicted(*WORDS, max_reserved="25165824")
    assert "batch" in refusal(UserError, predicted, "model=tiny", "micro_batch=0")
    assert "--largest makes none" in refusal(UserError, predicted, "--largest", "seq_len", "model=tiny")
