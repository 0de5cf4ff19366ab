"""Times of kernels (roofline) and collectives, computed by hand from data sheets and the constants of NCCL's model."""

import pytest
from conftest import parametrized

from vramsweep.harness.hardware import gpu_lookup, interconnects
from vramsweep.harness.hardware.interconnects import Collective, communication, link_named
from vramsweep.harness.hardware.roofline import ATTENTION, LAUNCH_S, Work, estimate, total_flops

H100 = gpu_lookup.gpu_named("h100-80gb")


def test_each_kernel_counts_for_what_bounds_it() -> None:
    kernels = [
        (Work("bf16", 10**12, 10**6, 1), 2),  # a large matrix product
        (Work(f"{ATTENTION}bf16", 10**12, 10**6, 1), 5),  # fused attention over a long sequence
        (Work(f"{ATTENTION}bf16", 10**6, 10**9, 1), 1),  # and over a short one, which moves more than it multiplies
        (Work("", 0, 10**9, 1), 3),  # moves a gigabyte
        (Work("", 0, 512, 1), 100),  # tiny
        (Work("", 0, 1024, 40), 1),  # tiny, but 40 launches
    ]
    found = estimate(kernels, H100, tf32=False)
    assert found is not None
    assert found.compute_s == pytest.approx(2 * 10**12 / 989.4e12)
    assert found.attention_s == pytest.approx(5 * 10**12 / 989.4e12)
    assert found.memory_s == pytest.approx(4 * 10**9 / 3.35e12)
    assert found.launch_s == pytest.approx(140 * LAUNCH_S)
    assert found.step_s == pytest.approx(found.compute_s + found.attention_s + found.memory_s + found.launch_s)
    assert total_flops(kernels) == 7 * 10**12 + 10**6


@parametrized("peaks_by_kind")
def test_peaks_by_kind(kind: str, gpu: str, tf32: bool, peak: float | None) -> None:
    found = estimate([(Work(kind, 10**15, 1, 1), 1)], gpu_lookup.gpu_named(gpu), tf32)
    assert (found and found.step_s) == (None if peak is None else pytest.approx(10**15 / peak))


GB = 1e9


def seconds(
    kind: str, nbytes: int, ranks: int, per_node: int = 8, link: str = "nvlink4", network: str | None = None
) -> float:
    between = None if network is None else link_named(network)
    found = communication([(Collective(kind, nbytes), 1)], ranks, per_node, link_named(link), between)
    assert found is not None
    return found.seconds


def test_large_collectives_run_at_the_link_s_rate() -> None:
    """An all-reduce on 8 H100: 2 x 7/8 of 8 GB over 450 GB/s; a gathering half of that."""
    assert seconds("all_reduce", 8_000_000_000, 8) == pytest.approx(14 / 450, rel=1e-3)
    assert seconds("all_gather", 8_000_000_000, 8) == pytest.approx(7 / 450, rel=1e-3)
    assert seconds("broadcast", 8_000_000_000, 8) == pytest.approx(8 / 450, rel=1e-3)


def test_small_ones_take_nccl_s_latency() -> None:
    """8 ranks take a ring's 7 steps of 0.47 us after 3.6 us; an all-reduce takes 14, or a tree's 7 there and back."""
    assert seconds("all_gather", 8, 8) == pytest.approx(3.6e-6 + 7 * 0.47e-6, rel=1e-3)
    assert seconds("all_reduce", 8, 8) == pytest.approx(3.6e-6 + 14 * 0.47e-6, rel=1e-3)
    assert seconds("all_reduce", 8, 64, network="ib-ndr400") == pytest.approx(
        4.4e-6 + 2 * (7 * 1.8 * 0.52e-6 + 3 * 5e-6), rel=1e-2
    )


def test_between_nodes_the_network_is_the_bottleneck() -> None:
    assert seconds("all_gather", 16_000_000_000, 16, network="ib-ndr400") == pytest.approx(15 / 50, rel=1e-3)
    alone = seconds("all_gather", 16_000_000_000, 16, per_node=1, link="pcie3", network="ib-ndr400")
    assert alone == pytest.approx(15 / 50, rel=1e-3)  # a card a node: its own link is not in the way
    slow = seconds("all_gather", 16_000_000_000, 16, link="pcie3", network="ib-ndr400")
    assert slow == pytest.approx(15 / 15.754, rel=1e-3)


def test_what_is_not_known_gives_no_estimate() -> None:
    many = [(Collective("all_gather", 1), 1)]
    for found in (
        communication(many, 16, 8, link_named("nvlink4"), None),
        communication(many, 8, 8, None, link_named("ib-ndr400")),
    ):
        assert found is not None and found.seconds is None and found.nbytes > 0
    assert communication([(Collective("send", 1), 1)], 8, 8, link_named("nvlink4"), None) is None
    alone = communication(many, 1, 8, None, None)
    assert alone is not None and alone.seconds == 0


def test_cards_name_links_that_exist() -> None:
    assert {gpu.link for gpu in gpu_lookup.GPUS} - {None} <= set(interconnects.link_names(between_nodes=False))
    assert gpu_lookup.gpu_named("a100-40gb").link is None  # one name for modules with NVLink and for PCIe cards
