"""Flags: what speaks against a row, from what real rows hold."""

from __future__ import annotations

from typing import Any

import pytest

from vramsweep.harness import techniques
from vramsweep.harness.flags import BY_NAME, FLAGS, flags

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
        ({"gpu_sm_clock_mhz": 1980, "gpu_sm_clock_before_mhz": 1965, "gpu_sm_clock_max_mhz": 1980}, []),
        ({"gpu_sm_clock_mhz": 1400, "gpu_sm_clock_max_mhz": 1980}, ["low_clocks"]),  # an H100 held by its power cap
        ({"gpu_sm_clock_mhz": 1980, "gpu_sm_clock_before_mhz": 345, "gpu_sm_clock_max_mhz": 1980}, ["low_clocks"]),
        ({"gpu_sm_clock_mhz": 300, "gpu_sm_clock_max_mhz": None}, []),  # nobody says what would be much
        ({"host_load": 1.0, "device": "cpu"}, []),  # what our own trial before leaves
        ({"host_load": 1.8, "device": "cpu"}, ["busy_host"]),
        ({"host_load": 1.8, "device": "cuda"}, ["busy_host"]),
        ({"host_load": 0.9, "device": "cuda"}, []),
        ({"host_load": 9.0, "device": "simulated"}, []),
        ({"step_times_s": [0.1, 0.1, 0.0], "elapsed_s": 0.2}, ["clock_anomaly"]),
        ({"step_times_s": [0.1, -0.1, 0.1], "elapsed_s": 0.1}, ["clock_anomaly"]),
        ({"step_times_s": [0.1, 0.1, 0.1], "elapsed_s": 0.4}, ["clock_anomaly"]),
        ({"step_times_s": [1.0, 1.0, 1.0], "elapsed_s": 3.0, "host_elapsed_s": 3.02}, []),
        ({"step_times_s": [1.0, 1.0, 1.0], "elapsed_s": 3.0, "host_elapsed_s": 3.2}, ["clock_anomaly"]),
        ({"step_times_s": [1.0, 1.0, 1.0], "elapsed_s": 3.0, "host_elapsed_s": 2.5}, ["clock_anomaly"]),
        ({"step_times_s": [0.01, 0.01], "elapsed_s": 0.02, "host_elapsed_s": 0.05}, []),  # the host came late
        ({"step_times_s": [1.0, 1.0, 1.3], "elapsed_s": 3.3}, ["wide_spread"]),
        ({"step_times_s": [1.0, 1.0, 1.1], "elapsed_s": 3.1}, []),
        ({"step_times_s": [1.0, 1.0, 1.3], "elapsed_s": 3.3, "step_tokens": [512, 512, 640]}, []),  # other lengths
        ({"step_times_s": [1.0, 1.0, 1.3], "elapsed_s": 3.3, "step_tokens": [512, 512, 512]}, ["wide_spread"]),
    ],
)
def test_flags(row: dict[str, Any], found: list[str]) -> None:
    assert flags(row) == found


def test_names_are_unique_and_explained() -> None:
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)
    assert all(flag.meaning for flag in FLAGS)
    assert set(BY_NAME) == {flag.name for flag in FLAGS}


ALLOCATOR = "expandable_segments:True,max_split_size_mb:128"


@pytest.mark.parametrize(
    ("row", "differs"),
    [
        ({"allocator_conf": ALLOCATOR, "allocator_conf_effective": ALLOCATOR}, False),
        ({"allocator_conf": ALLOCATOR, "allocator_conf_effective": "expandable_segments:True"}, False),  # not reported
        ({"allocator_conf": ALLOCATOR, "allocator_conf_effective": "max_split_size_mb:256"}, True),
        ({"allocator_conf": "", "allocator_conf_effective": "expandable_segments:True"}, True),
        ({"allocator_conf": ALLOCATOR, "allocator_conf_effective": None}, False),  # a CPU has none
        ({"attention": "sdpa", "attention_effective": "eager"}, True),
        ({"attention": "sdpa_flash", "attention_effective": "sdpa", "attention_kernels": ["flash"]}, False),
        ({"attention": "sdpa_flash", "attention_effective": "sdpa", "attention_kernels": ["flash", "math"]}, True),
        ({"attention": "flash_attention_2", "attention_effective": "sdpa"}, True),
        ({"attention": "sdpa", "attention_effective": "eager", "runner": "custom"}, False),
        ({"attention": None, "attention_effective": "eager", "runner": "script"}, False),  # nothing was asked
        ({"optimizer": "default", "optimizer_effective": "AdamW"}, False),
        ({"optimizer": "adamw_torch_fused", "optimizer_effective": "SGD"}, True),
        ({"optimizer": "adamw_bnb_8bit", "optimizer_effective": "AdamW(8-bit)"}, False),
        ({"optimizer": "paged_adamw_8bit", "optimizer_effective": "AdamW(8-bit, paged)"}, False),
        ({"optimizer": "paged_adamw_8bit", "optimizer_effective": "AdamW(8-bit)"}, True),
        ({"optimizer": "lion_8bit", "optimizer_effective": "Lion(32-bit)"}, True),
        ({"optimizer": "adamw_torch_4bit", "optimizer_effective": "AdamW4bit"}, False),
        ({"optimizer": "deepspeed_cpu_adam", "optimizer_effective": "DeepSpeedZeroOptimizer(DeepSpeedCPUAdam)"}, False),
        ({"optimizer": "sgd_momentum", "optimizer_effective": "SGD"}, False),
        ({"world_size": 1, "trial": {"world_size": 2}}, True),
        ({"world_size": 2, "trial": {"world_size": 2}}, False),
    ],
)
def test_settings_in_effect_other_than_asked_for(row: dict[str, Any], differs: bool) -> None:
    assert flags(row) == ["other_settings"] * differs


def test_every_optimizer_that_can_be_asked_for_is_known_by_the_class_that_runs_it() -> None:
    """The names that the tests of optimizers hold real classes to."""
    ran = {
        "adafactor": "Adafactor", "adamw_bnb_8bit": "AdamW(8-bit)", "adamw_torch_4bit": "AdamW4bit",
        "adamw_torch_8bit": "AdamW8bit", "deepspeed_cpu_adam": "DeepSpeedZeroOptimizer(DeepSpeedCPUAdam)",
        "deepspeed_fused_adam": "DeepSpeedZeroOptimizer_Stage3(FusedAdam)", "lion_32bit": "Lion(32-bit)",
        "lion_8bit": "Lion(8-bit)", "paged_adamw_32bit": "AdamW(32-bit, paged)", "sgd": "SGD", "sgd_momentum": "SGD",
        "paged_adamw_8bit": "AdamW(8-bit, paged)", "paged_lion_8bit": "Lion(8-bit, paged)",
    }  # fmt: skip
    for entry in techniques.entries("optimizer"):
        row = {"optimizer": entry.name, "optimizer_effective": ran.get(str(entry.name), "AdamW")}
        assert flags(row) == [], row
