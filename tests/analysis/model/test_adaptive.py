"""Test the choice of points and the prediction of the others, on truths of no curve of ours and on public ones."""

from collections.abc import Callable
from typing import Any

import adaptive as module
import numpy as np
import pytest
from conftest import ROOT

from vramsweep.analysis.model.adaptive import Answer, Grid, Search, Tolerance
from vramsweep.analysis.model.curves import Array
from vramsweep.analysis.model.kriging import Places, between
from vramsweep.harness.spec.trial_identity import SIMULATION

pytestmark = pytest.mark.deterministic

GIB = float(1 << 30)
ALLOCATED, RESERVED = "peak_allocated_bytes", "peak_reserved_bytes"
BOTH = {ALLOCATED: (0.01, 1.0), RESERVED: (0.02, 0.95)}  # what is asked for: within, at which share of the points
X = np.arange(1.0, 1025.0)
HINGE = np.maximum(8 * GIB, 5 * GIB + X * GIB / 128)


def lengths(x: Array, **more: Any) -> Grid:
    return Grid(x, np.ones_like(x), **more)


def play(grid: Grid, allocated: Array, reserved: Array | None = None, limit: float = np.inf, **settings: Any) -> Search:
    """The search to its end, answered from these; what needs more than the limit runs out of memory."""
    search = Search(grid, **settings)
    while asked := search.ask():
        assert len(set(asked)) == len(asked) and not set(asked) & search.answers.keys()
        answers = {}
        for at in asked:
            needs = allocated[at] if reserved is None else reserved[at]
            values = {ALLOCATED: float(allocated[at])} | ({} if reserved is None else {RESERVED: float(reserved[at])})
            answers[at] = Answer(True, values) if needs <= limit else Answer(False, limit=limit)
        search.tell(answers)
    return search


def worst(search: Search, truth: Array, column: str = ALLOCATED) -> float:
    return float(np.abs(search.inferred()[column].value / truth - 1).max())


def wave(x: Array) -> Array:
    return 8 * GIB * (1 + 0.1 * np.sin(x / 150))


def stairs(x: Array) -> Array:
    return 8 * GIB + GIB * np.floor(x / 200)


def root(x: Array) -> Array:
    return GIB * (2 + np.sqrt(x))


def by_eight(x: Array) -> Array:
    return np.where(x % 8 == 0, 1.0, 1.04) * np.maximum(8 * GIB, 5 * GIB + x * GIB / 128)


def test_a_hinge_needs_few_points() -> None:
    search = play(lengths(X), HINGE)
    assert search.enough and len(search.answers) <= 20
    assert worst(search, HINGE) < 0.001
    assert {0, len(X) - 1} <= search.answers.keys()  # the smallest and the largest


@pytest.mark.slow
@pytest.mark.parametrize("truth", [wave, stairs, root, by_eight])
def test_a_truth_that_no_kind_contains_is_known_or_said_not_to_be(truth: Callable[[Array], Array]) -> None:
    y = truth(X)
    search = play(lengths(X), y)
    assert len(search.answers) <= 40
    known = search.inferred()[ALLOCATED]
    assert np.mean((known.low <= y) & (y <= known.high)) > 0.9
    assert worst(search, y) < 0.01 or not search.enough
    if truth is not stairs:  # of which each edge would have to be found, to the token
        assert np.mean(np.abs(known.value / y - 1) > 0.01) < 0.05


def test_a_prediction_that_is_off_by_a_share_needs_a_dozen() -> None:
    predicted = {ALLOCATED: wave(X), RESERVED: 1.2 * wave(X)}
    search = play(lengths(X, predicted=predicted), 1.03 * wave(X), 1.25 * wave(X))
    assert search.enough and len(search.answers) <= 12
    assert worst(search, 1.03 * wave(X)) < 0.001
    assert worst(search, 1.25 * wave(X), RESERVED) < 0.001
    assert search.inferred()[ALLOCATED].basis == "prediction"


def test_a_prediction_of_another_shape_is_found_out() -> None:
    search = play(lengths(X, predicted={ALLOCATED: np.full(len(X), 8 * GIB)}), HINGE)
    assert not search.enough or worst(search, HINGE) < 0.01
    assert len(search.answers) > 12


def test_both_sides_of_what_is_predicted_to_change_are_asked_first() -> None:
    phase = tuple("optimizer" if x <= 384 else "backward" for x in X)
    jump = np.where(X > 700, 1.1, 1.0) * HINGE
    grid = lengths(X, predicted={ALLOCATED: HINGE, RESERVED: jump}, phase=phase, fits=X <= 900)
    asked = {int(X[at]) for at in Search(grid).ask()}
    assert {384, 385, 700, 701, 900, 901, 1} <= asked


@pytest.mark.slow
@pytest.mark.parametrize("limit", [9.0, 11.3])
def test_the_edge_of_memory(limit: float) -> None:
    search = play(lengths(X), HINGE, 1.1 * HINGE, limit * GIB)
    fits = limit * GIB >= 1.1 * HINGE
    told = search.fits()
    assert all(one is None or one == there for one, there in zip(told, fits, strict=True))
    assert sum(one is None for one in told) <= 0.05 * len(X)
    assert len(search.answers) <= 40


def test_where_nothing_fits_or_all_fail_or_is_known() -> None:
    search = play(lengths(X), HINGE, HINGE, limit=GIB)
    assert all(fits is False for fits in search.fits()) and len(search.answers) <= 12
    assert not search.inferred()
    failing = Search(lengths(X))
    failing.tell({at: Answer(None) for at in failing.ask()})
    assert failing.ask() == [] and not failing.enough
    unknown = Search(lengths(X))
    while asked := unknown.ask():
        unknown.tell({at: Answer(True) for at in asked})
    assert not unknown.enough and not unknown.inferred()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_grids_that_are_measured_whole(count: int) -> None:
    search = play(lengths(X[:count]), HINGE[:count])
    assert len(search.answers) == count and search.enough


def test_lengths_and_batches_together() -> None:
    length, batch = (each.ravel() for each in np.meshgrid(np.arange(64.0, 2049.0, 64), np.arange(1.0, 9.0)))
    truth = np.maximum(8 * GIB, 5 * GIB + length * batch * GIB / 512)
    search = play(Grid(length, batch), truth)
    assert len(search.answers) <= 40 < len(length)
    assert float(np.mean(np.abs(search.inferred()[ALLOCATED].value / truth - 1) > 0.01)) < 0.05


def test_a_check_point_is_compared_before_it_is_learnt_from() -> None:
    search = Search(lengths(X), checks=2)
    while not search.compared:
        asked = search.ask()
        search.tell({at: Answer(True, {ALLOCATED: HINGE[at] * (2.0 if search._checking else 1.0)}) for at in asked})
    assert len(search.compared) == 2 and search.agreeing == 0
    for check in search.compared:
        assert check.inferred[ALLOCATED] == pytest.approx(HINGE[check.at], rel=0.01)
        assert check.off(ALLOCATED) == pytest.approx(-0.5, abs=0.01)
    assert not search.enough
    beside = search.ask()
    assert beside and not set(beside) & search._checking  # do they stand for a stretch, or for themselves?


def test_a_check_point_that_does_not_fit_though_a_larger_one_did_disagrees() -> None:
    search = Search(lengths(X))
    while not (asked := search.ask()) or not search._checking & set(asked):
        assert asked
        search.tell({at: Answer(True, {ALLOCATED: float(HINGE[at])}) for at in asked})
    before = search.agreeing
    search.tell({at: Answer(False, limit=HINGE[at]) for at in asked})
    assert all(check.full for check in search.compared[-len(asked) :]) and before == search.agreeing == 0
    assert not search.enough and search.ask()


def test_what_was_not_run_and_what_was_skipped_are_no_measurements() -> None:
    search = Search(lengths(X), most=9)
    first = search.ask()
    assert len(first) == 9
    search.tell({at: Answer(True, {ALLOCATED: float(HINGE[at])}) for at in first[:4]})
    assert set(search.ask()) and not set(search.ask()) & set(first[:4])  # the others again, or better ones
    largest = int(np.argmax(X))
    skipping = Search(lengths(X), most=9)
    skipping.tell({largest: Answer(False, measured=False)})
    asked = skipping.ask()
    skipping.tell({at: Answer(True, {ALLOCATED: float(HINGE[at])}) for at in asked})
    assert sum(one.measured for one in skipping.answers.values()) == len(asked)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["seq_len", "micro_batch"])
def test_a_step_is_as_unsure_along_batches_as_along_lengths(axis: str) -> None:
    truth = 8 * GIB + X * GIB / 256
    truth[X > 613] *= 1.06
    same = np.full_like(X, 64.0)
    search = play(Grid(X, same / 64) if axis == "seq_len" else Grid(same, X), truth)
    known = search.inferred()[ALLOCATED]
    inside = (known.low <= truth) & (truth <= known.high)
    assert np.mean(inside) > 0.97
    assert np.mean(np.abs(known.value / truth - 1) > 0.01) < 0.05


def test_the_same_answers_give_the_same_questions_and_another_seed_other_checks() -> None:
    one, same, other = (play(lengths(X), HINGE, seed=seed) for seed in (0, 0, 1))
    assert list(one.answers) == list(same.answers)
    assert [check.at for check in one.compared] != [check.at for check in other.compared]


def test_a_budget_keeps_points_for_checks() -> None:
    noisy = HINGE * (1 + 0.05 * np.random.default_rng(0).standard_normal(len(X)))
    search = play(lengths(X), noisy, most=15, checks=3)
    assert len(search.answers) == 15 and len(search.compared) == 3 and not search.enough


@pytest.mark.slow
def test_a_tolerance_of_ones_own() -> None:
    loose = play(lengths(X), wave(X), tolerances={ALLOCATED: Tolerance(0.1, 0.9)})
    strict = play(lengths(X), wave(X))
    assert len(loose.answers) < len(strict.answers)


def test_between_goes_through_what_was_measured_and_leaves_one_that_is_far_off_alone() -> None:
    x = np.linspace(0, 1, 101)
    places = Places(x[:, None], np.zeros(101, dtype=np.int64), np.full(101, 100.0))
    at = np.arange(0, 101, 5)
    y = np.full(len(at), 103.0)
    y[10] = 130.0
    found = between(places, at, y, 0.01, exact=False)
    assert np.array_equal(found.value[at], y)
    others = np.setdiff1d(np.arange(101), at)
    assert np.abs(found.value[others] - 103).max() < 1
    assert np.all(found.new[others] >= found.curve[others])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["0.5B lengths", "8B lengths", "8B batches, checkpointing"])
def test_public_sweeps_without_predictions(name: str) -> None:
    sweep = module.SWEEPS[name]
    if not (module.DATA / sweep.file).is_file():
        pytest.skip("the public file is not beside this checkout")
    file = module.published(module.DATA / sweep.file)
    truth = list(file.values())
    search, _ = module.searched(module.grid(sweep, list(file), {}), truth, 80 * 1024, 0)
    assert len(search.answers) <= 40
    known = np.array([at for at, sizes in enumerate(truth) if sizes is not None])
    for index, (column, (within, share)) in enumerate(BOTH.items()):
        y = np.array([module.MIB * truth[at][index] for at in known])
        assert np.mean(np.abs(search.inferred()[column].value[known] / y - 1) <= within) >= share


def test_a_public_sweep_of_2048_lengths_with_its_predictions() -> None:
    """At most 12 of them, whichever check points are drawn; the file knows what the others would have been."""
    name = "0.5B lengths"
    sweep = module.SWEEPS[name]
    rows = module.kept(ROOT / "tests" / "data" / "predicted" / f"{sweep.folder(name)}.csv")
    again = "python benchmarks/adaptive.py --only '0.5B lengths' --keep tests/data/predicted"
    assert {row["simulation"] for row in rows.values()} == {SIMULATION}, f"predictions are others now: {again}"
    if not (module.DATA / sweep.file).is_file():
        pytest.skip("the public file is not beside this checkout")
    file = module.published(module.DATA / sweep.file)
    truth = list(file.values())
    grid = module.grid(sweep, list(file), rows)
    measured = {column: np.array([module.MIB * sizes[n] for sizes in truth]) for n, column in enumerate(BOTH)}
    within, share = BOTH[RESERVED]
    assert np.mean(np.abs(grid.predicted[RESERVED] / measured[RESERVED] - 1) <= within) < share  # else all were said
    for seed in range(3):
        search, _ = module.searched(grid, truth, module.LIMIT["rtx3090-24gb"], seed)
        assert len(search.answers) <= 12 and search.enough
        for column, (within, share) in BOTH.items():
            off = np.abs(search.inferred()[column].value / measured[column] - 1)
            assert np.mean(off <= within) >= share
