"""Test the largest that fits against the rows of every length, and requested memory against reserved memory."""

import json
import math
import os
from collections.abc import Collection
from dataclasses import astuple
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from conftest import Cli, tiny
from traces import A100, SIMULATED, peak

from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.files import file_names
from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.rows.journal import read, terminal
from vramsweep.harness.search.fit_survey import REACH, RequiredBytes
from vramsweep.harness.spec import trial, trial_parser
from vramsweep.runners.loops import torch_loop
from vramsweep.runners.predict import make_trace
from vramsweep.runners.predict import predicted_row as simulated_run
from vramsweep.runners.predict.replay_trace import replay
from vramsweep.runners.symbolic import trace_workers
from vramsweep.runners.symbolic.trace_workers import Tracer
from vramsweep.runners.trace.symbolic_trace import Point, SymbolicTrace
from vramsweep.runners.trace.trace_data import LT_WORKSPACE, Maker, Mark, Trace, cublas_workspace, on
from vramsweep.runners.worker import largest_server

pytestmark = pytest.mark.deterministic

WORDS = ("model=tiny", "micro_batch=48,64", "seq_len=1..48", "device.gpu=rtx4080-16gb")
SHARE = "per_process_memory_fraction:0.004"
SETTINGS = f'allocator.conf="{SHARE}","{SHARE},expandable_segments:True"'


@pytest.mark.slow
def test_the_edge_is_that_of_the_rows_of_every_length(tmp_path: Path, cli: Cli) -> None:
    words = (*WORDS, SETTINGS, f"results={tmp_path}", "name=edge", "report=false")
    found = cli.json("predict", "--largest", "seq_len", *words)
    edges = {(edge["trial"]["allocator"]["conf"], edge["trial"]["micro_batch"]): edge for edge in found}
    cli.run("predict", *words)
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
    return trial_parser.parse(tiny(**{"device": SIMULATED, **over}))


@pytest.mark.slow
@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "garbage_collection_threshold:0.8"])
def test_the_room_that_a_trace_needs(tmp_path: Path, conf: str) -> None:
    chosen = simulated(seq_len=200, micro_batch=8, allocator={"name": "a", "conf": conf})
    traced, _ = make_trace.trace_trial(chosen, A100, tmp_path, torch_loop)
    config = allocator_config.parse(conf)
    unlimited = peak(traced, conf)
    found = largest_server.need(traced, chosen, (), [1, 1 << 35])
    assert found.floor == largest_server.requested(traced) == unlimited["requested"]
    assert found.floor <= found.least <= found.enough <= unlimited["reserved"] and found.close
    assert found.enough - found.least <= 0.01 * found.enough
    assert replay(traced, config, int(found.enough)).refused is None
    assert replay(traced, config, int(found.least) - 1).refused is not None
    beyond = largest_server.need(
        traced, chosen, (), [int(0.9 * found.least)]
    )  # a card that is too small: how much it lacks
    assert beyond.least <= found.enough and found.least <= beyond.enough < math.inf
    assert beyond.close and beyond.enough - beyond.least <= 0.01 * beyond.enough
    assert largest_server.need(traced, chosen, (), [int(found.least / REACH) - 1]).enough == math.inf
    rooms = [int(found.least) - 1, 1 << 35]
    tried = largest_server.need(traced, chosen, rooms, [1, 1 << 35])
    assert (tried.least, tried.close) == (rooms[0] + 1, False)
    assert tried.enough == (1 << 35 if "garbage" in conf else unlimited["reserved"])
    small = int(found.floor) - 1
    assert largest_server.need(traced, chosen, [small], [1]) == RequiredBytes(
        found.floor, found.floor, math.inf, False
    )  # no replay


@pytest.mark.slow
def test_a_trace_for_which_the_host_is_too_small_fits_no_card(tmp_path: Path) -> None:
    small = simulated(device={"name": "simulated", "gpu": "a100-80gb", "node_memory_gib": 0.001})
    traced, _ = make_trace.trace_trial(small, A100, tmp_path, torch_loop)
    assert largest_server.need(traced, small, (), [1 << 35]).least == math.inf


class Drawn:
    """Traces of some lengths in place of a curve."""

    def __init__(self, traces: dict[int, Trace], folder: Path) -> None:
        self._traces = traces
        self.tracer = Tracer(folder, 120)

    def at(self, one: trial.Trial) -> tuple[Trace, dict[str, Any], str]:
        return (
            on(self._traces[one.seq_len], gpu_lookup.gpu_named(one.device.gpu).capability),
            {"differences": None},
            "drawn",
        )

    def formulas(self, where: Point) -> None:
        """They are traces."""

    def trace(self, trials: Collection[trial.Trial]) -> None:
        pass


class Written:
    """Formulas of even lengths in place of a curve."""

    def __init__(self, folder: Path) -> None:
        self.tracer = Tracer(folder, 120)
        self.symbolic = SymbolicTrace(
            template=Trace(
                categories=["parameters", "workspaces", "workspaces", "activations", "temporaries", "activations"],
                events=[1, 2, 4, 5, -5, 3, -4, 6, -2, -3, -6],
                marks=[Mark(2, None, "load"), Mark(11, 0, "forward")],
                streams=[0] * 6, origins=[0] * 6, makers=[Maker("a", "b", "")],
            ),
            formulas=("4096", str(cublas_workspace((8, 0))), str(LT_WORKSPACE), "max(512 * seq_len, 4096)",
                      "40 * seq_len * seq_len"),
            sizes=(0, 1, 2, 3, 4, 3), host=(), kernels=(), collectives=(), details={}, varying=(),
            guards=("seq_len % 2 == 0",), basis="written",
        )  # fmt: skip

    def formulas(self, where: Point) -> SymbolicTrace | None:
        return self.symbolic if self.symbolic.holds(where) else None

    def at(self, one: trial.Trial) -> tuple[Trace, dict[str, Any], str] | None:
        where = Point(one.seq_len, one.micro_batch)
        return (*self.symbolic.at(where), "written") if self.symbolic.holds(where) else None


def test_what_is_asked_for_at_all_points_of_a_formula_is_that_at_each(tmp_path: Path) -> None:
    cards = {gpu: simulated(device={"name": "simulated", "gpu": gpu}) for gpu in ("a100-80gb", "h100-80gb")}
    along = [simulated(seq_len=n) for n in (2, 3, 8, 64, 1000, 4096)]
    curve = Written(tmp_path)
    found = largest_server._floors(cards, along, curve)  # type: ignore[arg-type]
    for name, card in cards.items():
        for floor, one in zip(found[name], along, strict=True):
            traced = curve.at(one)
            expected = traced and largest_server.requested(on(traced[0], card.device.card.capability))
            assert floor == expected, (name, one.seq_len)
    assert found["a100-80gb"][0] != found["h100-80gb"][0] and found["a100-80gb"][1] is None


@pytest.mark.slow
@pytest.mark.parametrize("every", [True, False])
def test_an_edge_is_what_each_prediction_says(tmp_path: Path, every: bool) -> None:
    """This covers GPUs, shares of them, hosts and nodes; what they share is computed once."""
    lengths = [16, 64, 128, 192, 256]
    plain = {n: simulated(seq_len=n, micro_batch=16) for n in lengths}
    card = A100
    curve = Drawn({n: make_trace.trace_trial(one, card, tmp_path, torch_loop)[0] for n, one in plain.items()}, tmp_path)
    middle = peak(curve.at(plain[128])[0])["reserved"]
    share = f"per_process_memory_fraction:{middle / gpu_lookup.memory_limit(card):.6f}"
    devices = [
        {"gpu": gpu} | host
        for gpu in ("a100-80gb", "h100-80gb", "h200-141gb")
        for host in ({}, {"node_memory_gib": 0.1}, *({"node_memory_gib": 1.0, "gpus_per_node": n} for n in (1, 8)))
    ]
    ranks: dict[str, Any] = {"micro_batch": 16, "sharding": "ddp", "world_size": 8}
    family = {
        f"{device} {conf}": simulated(
            **ranks, device={"name": "simulated", **device}, allocator={"name": "a", "conf": conf}
        )
        for device in devices
        for conf in (share, "expandable_segments:True")
    }
    along = [next(iter(family.values())).model_copy(update={"seq_len": n}) for n in lengths]
    found = largest_server._of_group(family, along, curve, every, Tracer(tmp_path, 120), 120)  # type: ignore[arg-type]
    floors = largest_server._floors(family, along, curve)  # type: ignore[arg-type]
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
                assert floor == largest_server.requested(curve.at(at)[0])
    assert {edge.all_up_to for edge in found.values()} >= {None, 2, 4}


def test_what_fits_at_the_limit_alone_fits() -> None:
    """The cache is emptied at a luckier moment than with more room; each limit is judged by a replay at it."""
    sizes = [size << 20 for size in (6, 2, 26, 4, 22, 4, 14, 14)]
    events = [1, 2, -1, -2, 3, -3, 4, 5, -5, 6, 7, 8, -6, -4]
    trace = Trace(sizes, ["temporaries"] * 8, events, [Mark(len(events), 0, "forward")], [0] * 8, [0] * 8, [("", "")])
    for mib, fits in ((38, False), (42, True), (56, False), (70, True)):
        limit = mib << 20
        assert (replay(trace, allocator_config.parse(""), limit).refused is None) == fits
        found = largest_server.need(trace, simulated(), [], [limit])
        assert (found.enough <= limit, found.least > limit) == (fits, not fits), mib


@pytest.mark.slow
def test_an_answer_is_kept_for_the_user_and_found_anew_where_it_is_not_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(file_names.CACHE, str(tmp_path / "cache"))
    family, made = {"a": simulated()}, mock.Mock(side_effect=largest_server.curve)
    monkeypatch.setattr(largest_server, "curve", made)

    def ask(number: int, values: list[int], every: bool = False) -> Any:
        folder = tmp_path / "sweep" / "attempts" / "x" / str(number)
        folder.mkdir(parents=True)
        return largest_server._of_family(family, "seq_len", values, every, Tracer(folder, 120), 120)

    first = ask(0, [16, 64])
    assert first["a"]["largest"] == 64 and ask(1, [16, 64]) == first and made.call_count == 1
    assert ask(2, [16, 32])["a"]["largest"] == 32 and made.call_count == 2  # another question
    ask(3, [16, 64], every=True)
    kept = [file for file in (tmp_path / "cache" / "traces").iterdir() if b'"largest": 64' in file.read_bytes()]
    assert len(kept) == 2 and made.call_count == 3
    for file in kept:
        file.write_bytes(file.read_bytes().replace(b'"largest": 64', b'"largest": 48'))
    assert ask(4, [16, 64]) == first and made.call_count == 4


def test_what_a_look_leaves_counts_though_another_dies(tmp_path: Path) -> None:
    place = tmp_path / "looked"
    need = RequiredBytes(1.0, 2.0, math.inf, True)

    def look(number: int) -> bytes:
        if number == 4:
            raise ValueError("this one alone")
        if number == 7:
            os._exit(1)
        return json.dumps([number, {"setting": astuple(need)}]).encode() + b"\n"

    list(trace_workers.forked([(lambda: trace_workers.write_answers((3, 4, 5, 7, 8), look, place), 60.0)], 1))
    assert dict(largest_server._read([place, tmp_path / "none"])) == {3: {"setting": need}, 5: {"setting": need}}
    place.write_bytes(b'[3, {"setting": [1.0, 2.0, 3.0, true]}]\n[5, {"sett')
    assert list(largest_server._read([place])) == [(3, {"setting": RequiredBytes(1.0, 2.0, 3.0, True)})]
