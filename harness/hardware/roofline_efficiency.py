"""Factors by which GPUs are slower than the roofline, learnt from published speeds, for a calibrated estimate.

A step is taken to last f_compute C + f_attention A + f_memory M + f_launch L + f_communication X. C, A, M and L are the
roofline's seconds (roofline.py) bound by the peak, of fused attention, bound by memory, and of launches. X is the
seconds of collectives (interconnects.py); the computation hides a part of X, which makes its factor smaller than 1. A
step lasts at least h for each launch, the time of the host. `efficiencies.json` holds factors for each GPU and kind of
arithmetic with published speeds, and for any GPU ("any"). benchmarks/efficiencies.py, with speed_factors.py, writes it
from reference runs. The file names its sources, and how far off the factors were where they were not made for.

The result is an estimate: it never enters a measured column.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

ANY = "any"
PARTS = ("compute", "attention", "memory", "launch", "communication")
FILE = "efficiencies.json"


@dataclass(frozen=True)
class Efficiency:
    """Factors of a GPU (or `ANY`) and a kind of arithmetic, in the order of `PARTS`; `host_s`: the host's seconds a
    launch.

    `error` is the median size of the relative error of readings that the factors were not made from, `spread` its 90th
    percentile. A GPU's are of its own readings, by factors of the other sources, which may be of other GPUs. Those of
    `ANY` are of all readings, each GPU's by factors of the other GPUs. None if no other has this kind of arithmetic.
    """

    gpu: str
    kind: str
    factors: tuple[float, ...]
    host_s: float
    readings: int
    sources: tuple[str, ...]
    error: float | None
    spread: float | None

    def seconds(self, parts: Sequence[float], launches: int) -> float:
        """Return a step's seconds from those of the estimate, in the order of `PARTS`, and its launches."""
        card = sum(factor * part for factor, part in zip(self.factors, parts, strict=True))
        return max(card, self.host_s * launches)

    def text(self) -> str:
        """Return in a line what the factors depend on."""
        where = "all GPUs, because none is known for this one" if self.gpu == ANY else self.gpu
        own = "GPU" if self.gpu == ANY else "source"
        off = f"error unchecked, because there is only one {own}"
        if self.error is not None:
            off = f"median error {self.error:.0%} for a {own} left out"
        sources = f"{len(self.sources)} source{'s' * (len(self.sources) > 1)}"
        return f"{self.readings} published speeds of {sources} on {where}, {self.kind}; {off}"


def arithmetic_kind(precision: str) -> str:
    """Return the kind of arithmetic that a trial's precision means."""
    return precision if precision in ("fp32", "tf32", "fp8") else "half"


def find_efficiency(product: str | None, precision: str) -> Efficiency | None:
    """Return the entry of this listed GPU, else of any; None if nobody published speeds of this kind of arithmetic."""
    known = _shipped()
    return known.get((product or ANY, arithmetic_kind(precision))) or known.get((ANY, arithmetic_kind(precision)))


@cache
def _shipped() -> Mapping[tuple[str, str], Efficiency]:
    text = (resources.files(__package__) / FILE).read_text(encoding="utf-8")
    rows = [Efficiency(**one | {name: tuple(one[name]) for name in ("factors", "sources")}) for one in json.loads(text)]
    return {(one.gpu, one.kind): one for one in rows}
