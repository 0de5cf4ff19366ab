"""What a setting leaves of a card when the largest length is looked for."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny

from vramsweep.harness import gpus, trial
from vramsweep.runners import largest
from vramsweep.runners.survey import Edge
from vramsweep.runners.symbolic import Point
from vramsweep.runners.tracer import Tracer


def test_an_edge_is_where_the_setting_s_share_of_the_card_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = {"name": "simulated", "gpu": "a100-80gb"}
    confs = {"whole": "", "half": "per_process_memory_fraction:0.5"}
    family = {
        name: trial.parse(tiny(device=device, allocator={"name": name, "conf": conf})) for name, conf in confs.items()
    }
    asked: dict[str, int] = {}

    def survey(points: int, limits: dict[str, int], *rest: Any) -> dict[str, Edge]:
        asked.update(limits)
        return {}

    class Nothing:
        def bases(self) -> list[str]:
            return []

    def curve(anyone: trial.Trial, points: Collection[Point], tracer: Tracer) -> Nothing:
        return Nothing()

    monkeypatch.setattr(largest, "survey", survey)
    monkeypatch.setattr(largest, "curve", curve)
    largest._of_family(family, "seq_len", [1, 2], False, Tracer(tmp_path, 1), 1)
    limit = gpus.memory_limit(gpus.named("a100-80gb"))
    assert asked == {"whole": limit, "half": limit // 2}
