"""The largest that fits: against the rows of every length, and what is asked for against what is reserved."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, tiny

from vramsweep.harness import gpus, trial
from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.journal import read, terminal
from vramsweep.runners import largest, torch_loop, tracer, tracing
from vramsweep.runners import simulated as simulated_run
from vramsweep.runners.predict import replay
from vramsweep.runners.survey import REACH, Card, Edge, Need
from vramsweep.runners.symbolic import Point
from vramsweep.runners.trace import Trace, on
from vramsweep.runners.tracer import Tracer

WORDS = ("model=tiny", "micro_batch=48,64", "seq_len=1..48", "device.gpu=rtx4080-16gb")
SHARE = "per_process_memory_fraction:0.004"
SETTINGS = f'allocator.conf="{SHARE}","{SHARE},expandable_segments:True"'


def vramsweep(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vramsweep", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=170)


@pytest.mark.slow
def test_the_edge_is_that_of_the_rows_of_every_length(tmp_path: Path) -> None:
    where = (f"results={tmp_path}", "name=edge", "report=false")
    found = vramsweep("predict", "--largest", "seq_len", "--json", *WORDS, SETTINGS, *where)
    assert found.returncode == 0, found.stderr
    edges = {
        (edge["trial"]["allocator"]["conf"], edge["trial"]["micro_batch"]): edge for edge in json.loads(found.stdout)
    }
    assert vramsweep("predict", *WORDS, SETTINGS, *where).returncode == 0
    rows = terminal(read(tmp_path / "edge")[0]).values()
    assert len(rows) == 192 and len(edges) == 4
    for (conf, batch), edge in edges.items():
        own = [row for row in rows if row["allocator_conf"] == conf and row["micro_batch"] == batch]
        fits = {row["seq_len"]: row["outcome"] == "ok" for row in own}
        assert set(fits.values()) == {True, False}
        assert edge["largest"] == max(length for length, ok in fits.items() if ok)
        assert edge["all_up_to"] == min(length for length, ok in fits.items() if not ok) - 1
    assert len({edge["largest"] for edge in edges.values()}) > 1  # a family has edges for each batch


def simulated(**over: Any) -> trial.Trial:
    return trial.parse(tiny(**{"device": {"name": "simulated", "gpu": "a100-80gb"}, **over}))


@pytest.mark.slow
@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "garbage_collection_threshold:0.8"])
def test_the_room_that_a_trace_needs(tmp_path: Path, conf: str) -> None:
    chosen = simulated(seq_len=200, micro_batch=8, allocator={"name": "a", "conf": conf})
    traced, _ = tracing.trace_trial(chosen, gpus.named("a100-80gb"), tmp_path, torch_loop)
    config = allocator_config.parse(conf)
    unlimited = replay(traced, config, None).peak
    found = largest.need(traced, chosen, (), [1, 1 << 35])
    assert found.floor == largest.requested(traced) == unlimited["requested"]
    assert found.floor <= found.least <= found.enough <= unlimited["reserved"] and found.close
    assert found.enough - found.least <= 0.01 * found.enough
    assert replay(traced, config, int(found.enough)).refused is None
    assert replay(traced, config, int(found.least) - 1).refused is not None
    beyond = largest.need(traced, chosen, (), [int(0.9 * found.least)])  # a card that is too small: how much it lacks
    assert beyond.least <= found.enough and found.least <= beyond.enough < math.inf
    assert beyond.close and beyond.enough - beyond.least <= 0.01 * beyond.enough
    assert largest.need(traced, chosen, (), [int(found.least / REACH) - 1]).enough == math.inf
    rooms = [int(found.least) - 1, 1 << 35]
    tried = largest.need(traced, chosen, rooms, [1, 1 << 35])
    assert (tried.least, tried.close) == (rooms[0] + 1, False)
    assert tried.enough == (1 << 35 if "garbage" in conf else unlimited["reserved"])
    small = int(found.floor) - 1
    assert largest.need(traced, chosen, [small], [1]) == Need(found.floor, found.floor, math.inf, False)  # no replay


@pytest.mark.slow
def test_a_trace_for_which_the_host_is_too_small_fits_no_card(tmp_path: Path) -> None:
    small = simulated(device={"name": "simulated", "gpu": "a100-80gb", "node_memory_gib": 0.001})
    traced, _ = tracing.trace_trial(small, gpus.named("a100-80gb"), tmp_path, torch_loop)
    assert largest.need(traced, small, (), [1 << 35]).least == math.inf


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--largest", "seq_len", "model=tiny", "seq_len=1..99999"), "positions"),
        (("--largest", "layers", "model=tiny"), "seq_len"),
        (("--largest", "seq_len", "--max-reserved", "1GiB", "model=tiny"), "do not go together"),
        (("--every", "model=tiny"), "--largest"),
        (("--max-reserved", "lots", "model=tiny"), "is not a size"),
    ],
)
def test_mistakes_are_a_line(tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    done = vramsweep("predict", *words, f"results={tmp_path}")
    assert done.returncode == 2
    assert told in done.stderr and "Traceback" not in done.stderr


def test_an_edge_is_where_the_setting_s_share_of_the_card_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = {"name": "simulated", "gpu": "a100-80gb"}
    confs = {"whole": "", "half": "per_process_memory_fraction:0.5"}
    family = {
        name: trial.parse(tiny(device=device, allocator={"name": name, "conf": conf})) for name, conf in confs.items()
    }
    asked: dict[str, Card] = {}

    def survey(floors: Any, cards: dict[str, Card], *rest: Any) -> dict[str, Edge]:
        asked.update(cards)
        return {}

    class Nothing:
        def bases(self) -> list[str]:
            return []

        def at(self, one: trial.Trial) -> None:
            return None

    def curve(anyone: trial.Trial, points: Collection[Point], tracer: Tracer) -> Nothing:
        return Nothing()

    monkeypatch.setattr(largest, "survey", survey)
    monkeypatch.setattr(largest, "curve", curve)
    largest._of_family(family, "seq_len", [1, 2], False, Tracer(tmp_path, 1), 1)
    limit = gpus.memory_limit(gpus.named("a100-80gb"))
    assert {name: card.limit for name, card in asked.items()} == {"whole": limit, "half": limit // 2}


@pytest.mark.slow
def test_cards_of_one_family_need_what_their_own_traces_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = {name: simulated(device={"name": "simulated", "gpu": name}) for name in ("a100-80gb", "h100-80gb")}
    asked: dict[str, Any] = {}

    def survey(floors: Any, cards: dict[str, Card], evaluate: Any, *rest: Any) -> dict[str, Edge]:
        own = {name: cards[name].setting for name in cards}
        needs = evaluate({1: dict.fromkeys(own.values(), ())})[1]
        asked.update({name: (floors[own[name]][1], needs[own[name]]) for name in cards})
        return {}

    monkeypatch.setattr(largest, "survey", survey)
    folder = tmp_path / "attempts" / "shared" / "1"
    folder.mkdir(parents=True)
    largest._of_family(family, "seq_len", [8, 16], False, Tracer(folder, 120), 120)
    limits = sorted(gpus.memory_limit(gpus.named(name)) for name in family)
    for name, one in family.items():
        at = one.model_copy(update={"seq_len": 16})
        traced, _ = tracing.trace_trial(at, gpus.named(name), tmp_path, torch_loop)
        assert asked[name] == (largest.requested(traced), largest.need(traced, at, (), limits))
    assert asked["a100-80gb"] != asked["h100-80gb"]


class Drawn:
    """Traces of some lengths in place of a curve."""

    def __init__(self, traces: dict[int, Trace]) -> None:
        self._traces = traces

    def at(self, one: trial.Trial) -> tuple[Trace, dict[str, Any], str]:
        return on(self._traces[one.seq_len], gpus.named(one.device.gpu).capability), {"differences": None}, "drawn"

    def trace(self, trials: Collection[trial.Trial]) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("every", [pytest.param(True, marks=pytest.mark.slow), False])
def test_an_edge_is_what_each_prediction_says(tmp_path: Path, every: bool) -> None:
    """Of cards, shares of them, hosts and nodes; what they share is looked at once."""
    lengths = [16, 64, 128, 192, 256]
    plain = {n: simulated(seq_len=n, micro_batch=16) for n in lengths}
    card = gpus.named("a100-80gb")
    curve = Drawn({n: tracing.trace_trial(one, card, tmp_path, torch_loop)[0] for n, one in plain.items()})
    middle = replay(curve.at(plain[128])[0], allocator_config.parse(""), None).peak["reserved"]
    share = f"per_process_memory_fraction:{middle / gpus.memory_limit(card):.6f}"
    devices = [
        {"gpu": gpu} | host
        for gpu in ("a100-80gb", "h100-80gb", "h200-141gb")
        for host in ({}, {"node_memory_gib": 0.1}, *({"node_memory_gib": 1.0, "gpus_per_node": n} for n in (1, 8)))
    ]
    family = {
        f"{device} {conf}": simulated(
            micro_batch=16,
            device={"name": "simulated", **device},
            allocator={"name": "a", "conf": conf},
            sharding="ddp",
            world_size=8,
        )
        for device in devices
        for conf in (share, "expandable_segments:True")
    }
    along = [next(iter(family.values())).model_copy(update={"seq_len": n}) for n in lengths]
    found = largest._of_group(family, along, curve, every, Tracer(tmp_path, 120), 120)  # type: ignore[arg-type]
    floors = largest._floors(family, along, curve)  # type: ignore[arg-type]
    for name, one in family.items():
        each = [one.model_copy(update={"seq_len": n}) for n in lengths]
        errors = [simulated_run.predict(at, *curve.at(at)[:2]).error for at in each]
        fits = [error is None for error in errors]
        first = fits.index(False) if False in fits else len(fits)
        last = max((n for n, fit in enumerate(fits) if fit), default=None)
        assert (found[name].all_up_to, found[name].largest) == (first - 1 if first else None, last), name
        assert found[name].complete and not found[name].unanswered
        for at, error, floor in zip(each, errors, floors[name], strict=True):
            if isinstance(error, simulated_run.SimulatedHostOutOfMemoryError):
                assert floor == math.inf
            elif error is None:
                assert floor == largest.requested(curve.at(at)[0])
    assert {edge.all_up_to for edge in found.values()} >= {None, 2, 4}


def test_what_a_look_leaves_counts_though_another_dies(tmp_path: Path) -> None:
    place = tmp_path / "looked"
    need = Need(1.0, 2.0, math.inf, True)

    def look(number: int, rooms: largest.Rooms) -> dict[str, Need]:
        if number == 4:
            raise ValueError("this one alone")
        if number == 7:
            os._exit(1)
        return {"setting": need}

    list(tracer.forked([(lambda: largest._write(look, [(n, {}) for n in (3, 4, 5, 7, 8)], place), 60.0)], 1))
    assert dict(largest._read([place, tmp_path / "none"])) == {3: {"setting": need}, 5: {"setting": need}}
    place.write_bytes(b'[3, {"setting": [1.0, 2.0, 3.0, true]}]\n[5, {"sett')
    assert list(largest._read([place])) == [(3, {"setting": Need(1.0, 2.0, 3.0, True)})]
