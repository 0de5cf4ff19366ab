"""How much slower than the roofline cards really are: factors learnt from published speeds, for a calibrated estimate.

A step is taken to last f_compute C + f_attention A + f_memory M + f_launch L + f_communication X, where C, A, M and L
are the roofline's seconds of what the peak bounds, of fused attention, of what memory bounds and of launches
(roofline.py) and X those of collectives (interconnects.py): what of X is hidden behind the computation makes its factor
smaller than 1; and h for each launch at least, the time of the host. `efficiencies.json` holds factors for each card
and kind of arithmetic that somebody published speeds of, and for any card ("any"); it is written by
benchmarks/efficiencies.py, with speed_factors.py, from reference runs, and says which sources they are from and how
far off they were where they were not made for.

What comes out is an estimate: it never enters a measured column.
"""

from __future__ import annotations

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
    """Factors, in the order of `PARTS`, of a card (or `ANY`) and a kind of arithmetic; `host_s` is the host's time of a
    launch, in seconds.

    `error` is the median size of the relative error of readings that the factors were not made from, `spread` its 90th
    percentile. Of a card they are its own readings, by factors of the other sources, which may be of other cards; of
    `ANY` all readings, each card's by factors of the other cards. None where no other has this kind of arithmetic.
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
        """A step's seconds from those of the estimate, in the order of `PARTS`, and its launches."""
        card = sum(factor * part for factor, part in zip(self.factors, parts, strict=True))
        return max(card, self.host_s * launches)

    def text(self) -> str:
        """What it rests on, in a line."""
        where = "all GPUs, as none is known for this one" if self.gpu == ANY else self.gpu
        own = "GPU" if self.gpu == ANY else "source"
        off = f"not checked: one {own}"
        if self.error is not None:
            off = f"without their own {own} they were off by {self.error:.0%} (median)"
        sources = f"{len(self.sources)} source{'s' * (len(self.sources) > 1)}"
        return f"{self.readings} published speeds of {sources} on {where}, {self.kind}; {off}"


def arithmetic_kind(precision: str) -> str:
    """The kind of arithmetic that a trial's precision means."""
    return precision if precision in ("fp32", "tf32", "fp8") else "half"


def find_efficiency(product: str | None, precision: str) -> Efficiency | None:
    """What is known of this listed card, else of any; None where nobody published speeds of this kind of arithmetic."""
    known = _shipped()
    return known.get((product or ANY, arithmetic_kind(precision))) or known.get((ANY, arithmetic_kind(precision)))


@cache
def _shipped() -> Mapping[tuple[str, str], Efficiency]:
    text = (resources.files(__package__) / FILE).read_text(encoding="utf-8")
    rows = [Efficiency(**one | {name: tuple(one[name]) for name in ("factors", "sources")}) for one in json.loads(text)]
    return {(one.gpu, one.kind): one for one in rows}
