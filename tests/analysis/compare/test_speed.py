"""Factors from published speeds: found again where they are known, judged on sources that were left out."""

import json
from pathlib import Path
from typing import Any

import efficiencies as benchmark
import numpy as np
import pytest
import speed_factors as speed
from test_validation import errors, reading

from vramsweep.harness.hardware.roofline import ANY, Efficiency, arithmetic_kind

pytestmark = pytest.mark.deterministic

TRUE = np.array([1.6, 2.5, 1.4, 2.0, 0.7, 9e-6])


def published(
    title: str, gpu: str = "a100-80gb", truth: np.ndarray[Any, Any] = TRUE, count: int = 12, noise: float = 0.0,
    **over: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """Readings whose seconds are the truth's; their parts vary independently."""
    random = np.random.default_rng(sum(map(ord, title)))
    found = []
    for number in range(count):
        parts = random.lognormal(0, 1.0, 5) * [1.0, 0.4, 0.6, 0.2, 0.3]
        launches = int(random.lognormal(0, 1) * 1e5)
        step = max(float(parts @ truth[:-1]), launches * truth[-1]) * float(np.exp(noise * random.normal()))
        named = dict(zip(speed.SECONDS, map(float, parts), strict=True)) | {"estimated_launches": launches}
        found.append(
            reading(title=title, source=title, run=str(number), quantity="step", unit="s", gpu=gpu, precision="bf16",
                    world_size=8, measured=step, predicted=float(parts[:-1].sum()), **named)
            | over
        )  # fmt: skip
    return found


def test_factors_are_found_again() -> None:
    found = speed.readings(errors(*published("one"), *published("two", noise=0.02)))
    assert speed.factors(found, speed.START, 1e-6) == pytest.approx(TRUE, rel=0.1)
    drawn = speed.factors(found, speed.START, 1e6)
    assert drawn == pytest.approx(speed.START, rel=0.01)


def test_a_source_with_many_readings_counts_as_one() -> None:
    slow = published("many", truth=2 * TRUE, count=100)
    quick = [one for n in range(3) for one in published(f"few{n}", count=4)]
    found = speed.factors(speed.readings(errors(*slow, *quick)), speed.START, 1e-3)
    assert found[0] < 2 * TRUE[0] * 0.8  # three sources against one


def test_nobody_beats_the_roofline() -> None:
    found = speed.readings(errors(*published("fast", truth=np.array([0.5, 0.6, 0.4, 1.0, 0.5, 1e-6]))))
    assert (speed.factors(found, speed.START, 1e-6)[:3] >= 1).all()


def test_what_is_left_out_has_no_say() -> None:
    """The factors of a source are those of the others: a source that lies is off by just its lie."""
    rows = [*published("one"), *published("two"), *published("three"), *published("liar", truth=3 * TRUE)]
    judged = speed.left_out(speed.readings(errors(*rows)))
    liar = judged[judged["title"].eq("liar")]["calibrated"]
    assert liar.to_numpy(float) == pytest.approx(1 / 3 - 1, abs=0.05)
    assert judged["own"].all()
    alone = speed.left_out(speed.readings(errors(*published("only"))))
    assert alone["calibrated"].isna().all()


def test_another_card_goes_by_all_cards() -> None:
    rows = [*published("one"), *published("two"), *published("other", gpu="t4-16gb", count=3)]
    judged = speed.left_out(speed.readings(errors(*rows)))
    other = judged[judged["title"].eq("other")]
    assert not other["own"].any() and other["calibrated"].abs().max() < 0.15
    fp32 = speed.left_out(speed.readings(errors(*rows, *published("exact", precision="fp32"))))
    assert fp32[fp32["title"].eq("exact")]["calibrated"].isna().all()  # nobody else has fp32
    assert [arithmetic_kind(name) for name in ("fp32", "tf32", "fp8")] == ["fp32", "tf32", "fp8"]
    assert arithmetic_kind("fp16") == arithmetic_kind("bf16_pure") == "half"


@pytest.mark.slow
def test_all_cards_are_judged_as_if_nothing_were_known_of_the_card() -> None:
    """Two cards, the second twice as slow, of two sources each: the other source knows the card, the other card not."""
    quick = [one for title in ("a", "b") for one in published(title, gpu="a100-80gb")]
    slow = [one for title in ("c", "d") for one in published(title, gpu="t4-16gb", truth=2 * TRUE)]
    made = {one.gpu: one for one in benchmark.efficiencies(speed.readings(errors(*quick, *slow)))}
    assert made["a100-80gb"].error < 0.35 and made["t4-16gb"].error < 0.35
    off = benchmark.other_cards(speed.readings(errors(*quick, *slow)), "half").to_numpy(float)
    assert np.median(off[:24]) == pytest.approx(1.0, abs=0.15)  # a T4's factors make an A100 twice as slow as it is
    assert np.median(off[24:]) == pytest.approx(-0.5, abs=0.1)
    assert 0.45 < made[ANY].error < 1.05
    assert "on all GPUs, because none is known for this one, half; median error" in made[ANY].text()


def test_what_nobody_else_published_is_said_to_be_unchecked() -> None:
    own, every = benchmark.efficiencies(speed.readings(errors(*published("only"))))
    assert own.text().startswith("12 published speeds of 1 source on a100-80gb, half; error unchecked, because")
    assert every.error is None and every.text().endswith("half; error unchecked, because there is only one GPU")


def test_what_is_shipped_is_read_again(tmp_path: Path) -> None:
    readings = [*published("one", noise=0.05), *published("two", noise=0.05)]
    path = tmp_path / "readings.json"
    path.write_text(json.dumps({"made": {}, "mistakes": [], "others": {}, "readings": readings}))
    benchmark.main(path, tmp_path / "made.json")
    made = [Efficiency(**one) for one in json.loads((tmp_path / "made.json").read_text())]
    assert [(one.gpu, one.kind) for one in made] == [("a100-80gb", "half"), (ANY, "half")]
    assert made[0].readings == 24 and list(made[0].sources) == ["one", "two"]
    assert 0 < made[0].error < made[0].spread < 0.3
    assert made[0].seconds((1.0, 0.0, 0.0, 0.0, 0.0), 0) == made[0].factors[0] == pytest.approx(TRUE[0], rel=0.2)
    assert made[0].seconds((0.0,) * 5, 10) == 10 * made[0].host_s == pytest.approx(9e-5, rel=0.3)
    said = "24 published speeds of 2 sources on a100-80gb, half; median error"
    assert said in made[0].text()


def test_the_table_has_both_estimates() -> None:
    lines = speed.of_speed(errors(*published("one"), *published("two"), reading())).to_dict("records")
    assert [line["source"] for line in lines] == ["one", "two", "all"]
    assert lines[-1]["readings"] == "24" and lines[0]["estimated: median, signed"].startswith("-")
    assert speed.of_speed(errors(reading())).empty
