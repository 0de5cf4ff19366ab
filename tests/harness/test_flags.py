"""Flags: what speaks against a row, from what real rows hold."""

from __future__ import annotations

from typing import Any

import pytest

from vramsweep.harness.flags import FLAGS, flags

MIB = 1 << 20


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({}, []),  # nothing is known, so nothing is said
        ({"foreign_processes": [], "plateau": True, "alloc_retries": 0, "skipped_steps": 0, "node_trials": []}, []),
        ({"foreign_processes": [4711]}, ["contended"]),
        ({"device_baseline_bytes": 600 * MIB}, []),  # an idle H100's own, as nvidia-smi reserves it
        ({"device_baseline_bytes": 9000 * MIB}, ["high_baseline"]),
        ({"throttle_reasons": ["sw_power_cap"]}, []),
        ({"throttle_reasons": ["sw_power_cap", "hw_thermal_slowdown"]}, ["throttled"]),
        ({"plateau": False, "memory_source": "cuda_allocator"}, ["not_plateaued"]),
        ({"plateau": False, "memory_source": "cpu_tensors_and_rss"}, []),
        ({"step_growth_bytes": 512}, ["leaks"]),
        ({"step_growth_bytes": 0}, []),
        ({"step_growth_bytes": -512}, []),  # some step ended with less
        ({"alloc_retries": 2, "skipped_steps": 1}, ["allocation_retries", "steps_skipped"]),
        ({"node_trials": ["0123456789abcdef"]}, ["not_alone"]),
    ],
)
def test_flags(row: dict[str, Any], found: list[str]) -> None:
    assert flags(row) == found


def test_names_are_unique_and_explained() -> None:
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)
    assert all(flag.meaning for flag in FLAGS)
