"""Times of kernels and steps, computed by hand from an H100: 989.4 TFLOP/s in bf16, 67 in fp32, 3.35 TB/s."""

import pytest

from vramsweep.harness.hardware.gpu_lookup import gpu_named
from vramsweep.harness.hardware.roofline import ATTENTION, BACKWARD, UNALIGNED, Work
from vramsweep.harness.hardware.step_time import Speeds, time_kernel, time_step

H100 = gpu_named("h100-80gb")
FACTORS = {
    "product half": 2.0, "product fp32": 3.0, "product tf32": 4.0, "product unaligned": 5.0, "attention forward": 6.0,
    "attention backward": 7.0, "stream": 8.0, "optimizer foreach": 9.0, "optimizer fused": 10.0, "optimizer 8bit": 11.0,
}  # fmt: skip
HOST = {"plain": 28e-6, "checkpointing": 42e-6}
SPEEDS = Speeds("h100-80gb", "made up", FACTORS, 1e-5, HOST, {"gpu": 0.0953102, "host": 0.6931472})
BF16, FP32, BYTES = round(989.4e9), round(67e9), round(3.35e9)  # each takes 1 ms


@pytest.mark.parametrize(
    ("work", "tf32", "milliseconds"),
    [
        (Work("bf16", BF16, 1, 1), False, 2),
        (Work(UNALIGNED + "bf16", BF16, 1, 1), False, 5),
        (Work("fp32", FP32, 1, 1), False, 3),
        (Work(UNALIGNED + "fp32", FP32, 1, 1), False, 3),  # no tensor cores, so no alignment
        (Work("fp32", round(494.7e9), 1, 1), True, 4),  # 494.7 TFLOP/s in tf32
        (Work("3xtf32", round(494.7e9 / 3), 1, 1), False, 4),
        (Work(ATTENTION + "bf16", BF16, 1, 1), False, 6),
        (Work(BACKWARD + "bf16", BF16, 1, 1), False, 7),
        (Work("bf16", 1, BYTES, 1), False, 8),  # a product that is bound by its bytes
        (Work("", 0, BYTES, 1), False, 8),
        (Work("optimizer foreach", 0, BYTES, 1), False, 9),
        (Work("optimizer 8bit", 0, BYTES, 1), False, 11),
        (Work("unknown", 1, 1, 1), False, None),
    ],
)
def test_a_kernel_takes_its_factor_times_its_bound(work: Work, tf32: bool, milliseconds: float | None) -> None:
    found = time_kernel(work, H100, tf32, SPEEDS)
    assert (found and found[1]) == (None if milliseconds is None else pytest.approx(milliseconds / 1000, rel=1e-3))


def test_the_slower_of_gpu_and_host_decides() -> None:
    product, tiny = Work("bf16", BF16, 1, 1), Work("", 0, 1, 1)
    gpu = time_step([(product, 10)], H100, False, SPEEDS, "plain")
    assert gpu is not None and (gpu.bound_by, gpu.host_s) == ("gpu", pytest.approx(28e-5))
    assert gpu.kernels_s == pytest.approx({"product half": 0.02, "least time of kernels": 1e-4}, rel=1e-3)
    assert (gpu.low_s, gpu.step_s, gpu.high_s) == pytest.approx((0.0201 / 1.1, 0.0201, 0.0201 * 1.1), rel=1e-3)
    host = time_step([(tiny, 1000)], H100, False, SPEEDS, "checkpointing")
    assert host is not None and (host.bound_by, host.gpu_s) == ("host", pytest.approx(0.01, rel=1e-3))
    assert (host.low_s, host.step_s, host.high_s) == pytest.approx((0.021, 0.042, 0.084), rel=1e-3)
    sent = time_step([(product, 10)], H100, False, SPEEDS, "plain", 0.03)
    near = time_step([(product, 10), (tiny, 600)], H100, False, SPEEDS, "plain")  # 26.1 ms of the GPU, 17.1 of the host
    assert near is not None and (near.bound_by, near.step_s) == ("gpu", pytest.approx(0.0261, rel=1e-3))
    assert (near.low_s, near.high_s) == pytest.approx((0.0261 / 1.1, 0.01708 * 2), rel=1e-3)  # the host may take twice
    assert sent is not None and sent.step_s == 0.03
    assert (sent.low_s, sent.high_s) == pytest.approx((0.03 / 1.1, 0.0501 * 1.1), rel=1e-3)  # overlap is unknown
    assert time_step([(Work("unknown", 1, 1, 1), 1)], H100, False, SPEEDS, "plain") is None


def test_a_gpu_without_tf32_takes_as_long_as_in_fp32() -> None:
    v100 = gpu_named("v100-16gb")
    assert time_kernel(Work("fp32", FP32, 1, 1), v100, True, SPEEDS) == time_kernel(
        Work("fp32", FP32, 1, 1), v100, False, SPEEDS
    )
