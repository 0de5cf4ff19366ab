"""The table of GPUs: names as drivers give them."""

import pytest
from conftest import cases, parametrized

from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.hardware.roofline import Work, estimate


@pytest.mark.parametrize(("name", "card", "note"), cases("gpu_names"))
def test_the_card_of_a_driver_s_name(name: str, card: str, note: str) -> None:
    found = gpu_lookup.find_gpu(name)
    assert (found.name if found else "") == card, note


def test_peaks_follow_the_precision_and_the_unknown_is_none() -> None:
    assert gpu_lookup.peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989.4e12
    assert gpu_lookup.peak_flops("NVIDIA H100 80GB HBM3", "fp32") == 67e12
    assert gpu_lookup.peak_flops("NVIDIA A100-SXM4-80GB", "tf32") == 156e12
    assert gpu_lookup.peak_flops("NVIDIA H200", "bf16") == 989.4e12
    assert gpu_lookup.peak_flops("NVIDIA H200 NVL", "bf16") == 835.5e12  # not the SXM module's: data sheet, dense
    assert gpu_lookup.peak_flops("Tesla T4", "bf16") is None
    assert gpu_lookup.peak_flops("Some Future Card", "bf16") is None


def test_names_are_unique() -> None:
    assert len({gpu.name for gpu in gpu_lookup.GPUS}) == len(gpu_lookup.GPUS)
    devices = [device for gpu in gpu_lookup.GPUS for device in gpu.devices]
    assert len(set(devices)) == len(devices)


def test_names_in_rows_and_configurations_of_older_versions_are_still_there() -> None:
    older = (
        "b200 h200-141gb h100-nvl-94gb h100-pcie-80gb h100-80gb a100-40gb a100-80gb l40s-48gb l4-24gb a10-24gb "
        "a30-24gb v100-32gb v100-16gb t4-16gb rtx4090-24gb rtx3090-24gb"
    )
    assert [gpu_lookup.gpu_named(name).name for name in older.split()] == older.split()


def test_a_figure_in_another_unit_would_stand_out() -> None:
    """FLOPs per byte at the peaks: fp32 from 9.6 (A100) to 106 (L40S), half from 37 (H20) to 419 (L40S); torch reports
    91 to 100 % of the nominal memory.
    """
    for gpu in gpu_lookup.GPUS:
        assert 5 < gpu.fp32 / gpu.bandwidth < 150, gpu.name
        if gpu.half is not None:
            assert 30 < gpu.half / gpu.bandwidth < 500, gpu.name
        for smaller, larger in ((gpu.tf32, gpu.half), (gpu.fp32, gpu.tf32)):
            assert smaller is None or larger is None or smaller <= larger, gpu.name
        if gpu.reported_mib is not None:
            assert (1 - gpu_lookup.SHORTFALL) * 1024 < gpu.reported_mib / gpu.memory_gib < 1024, gpu.name


@parametrized("memory_by_gpu_name")
def test_memory_is_what_out_of_memory_messages_say(name: str, gib: float) -> None:
    """The capacity that torch prints, and the allocator has less by a context of some hundred MiB."""
    card = gpu_lookup.gpu_named(name)
    reported = gpu_lookup.reported_bytes(card)
    assert reported is not None
    assert reported / 2**30 == pytest.approx(gib, abs=0.01)
    assert 0.2 < (reported - gpu_lookup.memory_limit(card)) / 2**30 < 1


def test_a_card_whose_memory_nobody_published_is_taken_to_have_less_than_its_name_says() -> None:
    card = gpu_lookup.gpu_named("rtx4080-16gb")
    assert gpu_lookup.reported_bytes(card) is None
    assert 12 << 30 < gpu_lookup.memory_limit(card) < 15 << 30


def test_a_size_stands_for_the_smallest_card_that_has_it() -> None:
    found = gpu_lookup.lowest_limit_gpu(24)
    assert found is not None and found.name == "l4-24gb"
    eighty = gpu_lookup.lowest_limit_gpu(80)
    assert eighty is not None and eighty.reported_mib is not None  # not one whose memory is only estimated
    assert gpu_lookup.lowest_limit_gpu(23) is None


def test_a_card_that_is_not_listed_is_like_one_with_its_memory_and_generation() -> None:
    like = gpu_lookup.resolve_gpu("rtx3090-24gb", 12, None, 0.0)
    listed = gpu_lookup.gpu_named("rtx3090-24gb")
    assert like.product == listed.product == "rtx3090-24gb"
    assert (like.name, like.capability, like.fp32) == ("rtx3090-24gb with 12 GiB", listed.capability, listed.fp32)
    assert (10 << 30) < gpu_lookup.memory_limit(like) < (12 << 30)
    old = gpu_lookup.resolve_gpu("h100-80gb", 8, "7.5", 0.0)
    assert (old.name, old.capability, old.multiprocessors) == ("8 GiB of capability 7.5", (7, 5), 36)  # as a 2070's
    assert old.product is None
    assert not any((old.fp32, old.tf32, old.half, old.bf16, old.fp8, old.link))  # an H100's are not its own
    work = [(Work("half", 10**9, 10**6, 1), 1)]
    assert estimate(work, old, tf32=False) is None
    assert gpu_lookup.find_gpu("8 GiB of capability 7.5") is None
    with pytest.raises(KeyError):
        gpu_lookup.resolve_gpu("voodoo2", 8, "7.5", 0.0)


def test_headroom_stays_free() -> None:
    whole, less = gpu_lookup.resolve_gpu("l4-24gb", None, None, 0.0), gpu_lookup.resolve_gpu("l4-24gb", None, None, 1.5)
    assert whole == gpu_lookup.gpu_named("l4-24gb") and less.name == whole.name
    assert gpu_lookup.memory_limit(whole) - gpu_lookup.memory_limit(less) == 3 << 29


@pytest.mark.parametrize(("gib", "headroom", "least", "name"), cases("least_gpus"))
def test_the_least_card_that_has_room(gib: str, headroom: str, least: str, name: str) -> None:
    """An L4 has 21.4 GiB without a context, an RTX 4090 22.8; a V100 of 32 GB has 2 MiB less than 31 GiB."""
    major, minor = map(int, least.split("."))
    found = gpu_lookup.gpus_with_enough(int(gib) << 30, float(headroom), (major, minor))
    assert (found[0].name if found else "none") == name


def test_a_card_s_own_memory_is_enough_with_its_own_headroom() -> None:
    for name, headroom in (("t4-16gb", 1.5), ("h20-96gb", 3.0)):
        gpu = gpu_lookup.resolve_gpu(name, None, None, headroom)
        found, *_ = gpu_lookup.gpus_with_enough(gpu_lookup.memory_limit(gpu), gpu.headroom_gib, gpu.capability)
        assert found.headroom_gib == gpu.headroom_gib
        assert found.memory_gib == gpu.memory_gib  # a T4's 16 GiB are in no smaller card, an H20's 96 neither


def test_a_help_text_has_every_card_and_its_lines_are_short() -> None:
    lines = gpu_lookup.gpu_lines().splitlines()
    assert max(map(len, lines)) < 80 and len(lines) < len(gpu_lookup.GPUS) / 2
    assert "t4-16gb 13.8" in gpu_lookup.gpu_lines().partition("  7.5   ")[2].partition("  7.0   ")[0]
    words = gpu_lookup.gpu_lines().split()
    assert [words.count(gpu.name) for gpu in gpu_lookup.GPUS] == [1] * len(gpu_lookup.GPUS)
