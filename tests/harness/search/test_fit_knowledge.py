"""Test the one rule by which tried points decide others, and that all its callers give the same answer."""

import itertools
import random

import numpy as np
import pytest
from conftest import parametrized, tiny

from vramsweep.analysis.model.adaptive import Answer, Grid
from vramsweep.analysis.model.adaptive import Search as AdaptiveSearch
from vramsweep.harness.questions import edge_search
from vramsweep.harness.search import fit_knowledge
from vramsweep.harness.search.fit_knowledge import Bracket, TriedPoint, find_bracket, needs_no_less
from vramsweep.harness.sweep import plan, row_builder
from vramsweep.harness.sweep.oom_dominance import OomDominance
from vramsweep.harness.sweep.plan import Planned


@parametrized("lengths_on_both_sides")
def test_the_rule_on_both_sides_of_an_alignment(length: int, batch: int, than: int, rule: bool) -> None:
    assert needs_no_less(length, batch, than, 1) is rule
    lengths, batches = np.array([length, than, 1.0]), np.array([batch, 1, 1.0])
    assert needs_no_less(lengths, batches, than, 1).tolist() == [rule, True, False]
    assert needs_no_less(length, batch, lengths, batches).tolist()[:2] == [True, rule]


@pytest.mark.parametrize("seed", range(30))
def test_what_is_decided_is_so_of_any_memory_that_grows_and_is_padded(seed: int) -> None:
    """And of arrays as of numbers, whatever was tried: a point's own trial counts most, then what fits."""
    dice = random.Random(seed)
    padding, limit = dice.choice([0, 5, 60]), dice.randint(40, 200)
    needs = {(n, b): b * (n + padding * (n % 8 != 0)) for n in range(1, 80) for b in (1, 2, 3)}
    torn = seed % 3 == 0
    tried = {p: dice.random() < 0.5 if torn else needs[p] <= limit for p in dice.sample(sorted(needs), 12)}
    known = [TriedPoint(*point, fits, f"{point}") for point, fits in tried.items()]
    lengths, batches = np.array(list(needs)).T
    every = dict(zip(needs, fit_knowledge.decide_all(known, lengths, batches), strict=True))
    for point, fits in every.items():
        one = fit_knowledge.decide(known, *point)
        assert fits is (one.fits if one else None)
        if point in tried:
            assert one == TriedPoint(*point, tried[point], f"{point}")
        above = any(tried[p] and needs_no_less(*p, *point) for p in tried)
        below = any(not tried[p] and needs_no_less(*point, *p) for p in tried)
        assert fits is tried.get(point, True if above else False if below else None)
        assert torn or fits in (None, needs[point] <= limit)
        other = fit_knowledge.decide(known, *point, without=f"{point}")
        assert other is None or (other.length, other.batch) != point


def item(length: int) -> Planned:
    return plan.expand_trials([tiny(seq_len=length)], 1)[0][0]


@parametrized("fit_knowledge")
def test_adaptive_dominance_and_the_frontier_say_the_same(
    tried: dict[int, bool], asked: int, fits: bool | None
) -> None:
    rows = {n: row_builder.initial_columns(item(n)) | {"outcome": "ok" if ok else "oom"} for n, ok in tried.items()}
    rows = {n: row | {"reason": None} for n, row in rows.items()}
    grid = Grid(np.array([*tried, asked], float), np.ones(len(tried) + 1))
    adaptive = AdaptiveSearch(grid)
    adaptive.tell({at: Answer(ok) for at, ok in enumerate(tried.values())})
    assert adaptive.fits() == [*tried.values(), fits]
    assert (OomDominance(rows.values()).reason(item(asked)) is not None) is (fits is False)
    search = edge_search.Search(edge_search.SearchPlan("x", sorted({*tried, asked})))
    search.bisection.tell({n: edge_search.probe_result(row) for n, row in rows.items()})
    edge = search.found()
    if fits:
        assert asked <= (edge.largest or 0) and asked not in search.ask()
    elif fits is False:
        assert asked > (edge.either_way or (edge.largest or 0,))[0]


@pytest.mark.parametrize("seed", range(20))
def test_a_bracket_is_what_looking_at_every_value_says(seed: int) -> None:
    dice = random.Random(seed)
    values = {n: dice.choice([True, False, None]) for n in range(dice.randint(0, 9))}
    fitting, full = ([n for n, fits in values.items() if fits is wanted] for wanted in (True, False))
    first, last = min(full, default=None), max(fitting, default=None)
    below = max((n for n in fitting if first is None or n < first), default=None)
    above = min((n for n in full if last is None or n > last), default=None)
    for one in (find_bracket(fitting, full), find_bracket(np.array(fitting), np.array(full))):
        assert one == Bracket(below, first, last, above)
        assert one.either_way == ((first, last) if any(a < b for a, b in itertools.product(full, fitting)) else None)
        assert one.proven == (None if one.either_way else last)
