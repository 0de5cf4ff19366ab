"""`gpus`: the table of GPUs that device.gpu can name."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from vramsweep.harness.verbs.cli import read_parser


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep gpus`; return the exit status."""
    from vramsweep.harness.hardware.gpu_lookup import GIB, GPUS, TERA, memory_limit

    if read_parser("gpus").parse_args(argv).json:
        print(json.dumps([asdict(gpu) | {"memory_limit_bytes": memory_limit(gpu)} for gpu in GPUS], indent=1))
        return 0
    from vramsweep.harness.messages.console import Console, make_table

    rates = ("fp32", "tf32", "half", "bf16", "fp8")
    numbers = ("GiB", "limit", "cap.", "GB/s", "fp32", "tf32", "fp16", "bf16", "fp8")
    table = make_table(("device.gpu", *numbers, "link"), numbers=numbers)
    table.padding = 0  # to fit 80 columns
    for gpu in GPUS:
        known = ("–" if rate is None else f"{rate / TERA:.0f}" for rate in (getattr(gpu, name) for name in rates))
        sizes = (f"{gpu.memory_gib:g}", f"{memory_limit(gpu) / GIB:.1f}")
        capability = ".".join(map(str, gpu.capability))
        table.add_row(gpu.name, *sizes, capability, f"{gpu.bandwidth / 1e9:.0f}", *known, gpu.link or "–")
    console = Console()
    console.print(table)
    console.print(
        "\nGiB: nominal memory; limit: GiB that the allocator may use; cap.: compute capability; fp32 to fp8: dense "
        "peaks in TFLOP/s. For a GPU not listed, set device.memory_gib=8 device.capability=7.5. --json prints sources."
    )
    return 0
