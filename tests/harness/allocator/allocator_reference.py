"""The caching allocator again, slow and obvious: every question is answered by looking at every block.

It shares with the fast one only the settings and the model of addresses; the tests hold the two to each other.
"""

from dataclasses import dataclass, field
from fractions import Fraction

from vramsweep.harness.allocator.address_space import FIRST
from vramsweep.harness.allocator.config import MIB, AllocatorConfig
from vramsweep.harness.allocator.simulator import FIRST_RANGE, UNLIMITED_RANGE, OutOfMemory


@dataclass
class Cell:
    addr: int
    size: int
    state: str  # free, live, pending, unmapped
    handle: object = None
    requested: int = 0
    born: int = 0


@dataclass
class Range:
    """A segment, or an expandable segment's address space: cells in address order, covering it."""

    stream: int
    small: bool
    expandable: bool
    cells: list[Cell] = field(default_factory=list)

    def merge(self) -> None:
        """Melt neighbours that are both free or both unmapped."""
        merged: list[Cell] = []
        for cell in self.cells:
            if merged and merged[-1].state == cell.state and cell.state in ("free", "unmapped"):
                merged[-1].size += cell.size
                merged[-1].born = max(merged[-1].born, cell.born)
            else:
                merged.append(cell)
        self.cells = merged

    @property
    def whole(self) -> bool:
        return len(self.cells) == 1 and self.cells[0].state == "free"


class Reference:
    def __init__(self, config: AllocatorConfig, limit: int | None) -> None:
        self.c, self.limit = config, limit
        self.ranges: list[Range] = []
        self.events: list[tuple[str, int, int, int]] = []
        self.waiting: list[object] = []
        self.searches = self.retries = self.ooms = 0
        self.peaks = dict.fromkeys(("allocated", "active", "requested", "reserved", "inactive_split"), 0)
        self.next_range = FIRST_RANGE
        self.lowest_chunk, self.empty = FIRST // (2 * MIB), set[int]()  # in steps of 2 MiB
        self.large = config.large_segment_size_mb * MIB
        self.max_split = (config.max_split_size_mb or 1 << 60) * MIB
        self.slack = (config.max_non_split_rounding_mb or config.large_segment_size_mb) * MIB
        self.gc = config.garbage_collection_threshold if limit is not None else None

    # what there is

    def cells(self, *states: str) -> list[tuple[Range, Cell]]:
        return [(r, c) for r in self.ranges for c in r.cells if c.state in states]

    def counts(self) -> dict[str, int]:
        return {
            "allocated": sum(c.size for _, c in self.cells("live")),
            "active": sum(c.size for _, c in self.cells("live", "pending")),
            "requested": sum(c.requested for _, c in self.cells("live", "pending")),
            "reserved": sum(c.size for _, c in self.cells("live", "pending", "free")),
            "inactive_split": sum(c.size for r, c in self.cells("free") if len(r.cells) > 1 and not r.expandable),
        }

    def note_peaks(self) -> None:
        for name, value in self.counts().items():
            self.peaks[name] = max(self.peaks[name], value)

    def address(self, handle: object) -> int:
        return next(c.addr for _, c in self.cells("live", "pending") if c.handle == handle)

    # requests

    def rounded(self, size: int) -> int:
        size = max(size, 1)
        interval = 0
        while interval < 15 and size >= MIB * 2 ** (interval + 1):
            interval += 1
        parts = self.c.roundup_power2_divisions[interval]
        if parts > 1 and size > 512 * parts:
            power = 1
            while power * 2 <= size:
                power *= 2
            if power == size:
                return size
            step = power // parts
            return next(power + k * step for k in range(parts + 1) if power + k * step >= size)
        return next_multiple(size, 512)

    def malloc(self, handle: object, size: int, stream: int) -> None:
        want = self.rounded(size)
        small = want <= MIB
        found = self.best_fit(want, stream, small) or self.fresh(want, stream, small)
        home, cell = found
        rest = cell.size - want
        keep = rest >= 512 if small or self.c.expandable_segments else rest > MIB and want < self.max_split
        index = next(i for i, c in enumerate(home.cells) if c is cell)
        cell.state, cell.handle, cell.requested = "live", handle, size
        if keep:
            cell.size = want
            home.cells.insert(index + 1, Cell(cell.addr + want, rest, "free", born=self.searches))
        self.note_peaks()

    def free_requested(self, handle: object) -> None:
        next(c for _, c in self.cells("live") if c.handle == handle).state = "pending"
        self.waiting.append(handle)

    def free_completed(self, handle: object) -> None:
        for home, cell in self.cells("pending"):
            if cell.handle == handle:
                cell.state, cell.handle, cell.requested, cell.born = "free", None, 0, self.searches
                home.merge()
        self.note_peaks()

    def empty_cache(self) -> None:
        for handle in self.waiting:
            self.free_completed(handle)
        self.waiting.clear()
        for small in (False, True):
            for home, cell in self.in_order(small):
                if home.whole and not home.expandable:
                    self.drop(home, cell)
            for home, cell in self.in_order(small):
                if home.expandable:
                    self.unmap(home, cell)

    # places

    def in_order(self, small: bool) -> list[tuple[Range, Cell]]:
        found = [(r, c) for r, c in self.cells("free") if r.small == small]
        return sorted(found, key=lambda rc: (rc[0].stream, rc[1].size, rc[1].addr))

    def best_fit(self, want: int, stream: int, small: bool) -> tuple[Range, Cell] | None:
        if self.gc is not None and not small:
            self.searches += 1
        fits = [(r, c) for r, c in self.in_order(small) if r.stream == stream and c.size >= want]
        while len(fits) > 1 and self.c.expandable_segments and reach(*fits[1]) < reach(*fits[0]):
            fits.pop(0)
        if not fits:
            return None
        size = fits[0][1].size
        oversize = size >= self.max_split if want < self.max_split else size >= want + self.slack
        return None if oversize else fits[0]

    def fresh(self, want: int, stream: int, small: bool) -> tuple[Range, Cell]:
        size = 2 * MIB if small else self.large if want < 10 * MIB else next_multiple(want, 2 * MIB)
        if self.gc is not None:
            self.collect()
        if not self.fits(size) and not (self.free_oversize(want, stream, small) and self.fits(size)):
            self.empty_cache()
            self.retries += 1
            if not self.fits(size):
                self.ooms += 1
                raise OutOfMemory
        if self.c.expandable_segments:
            return self.grow(want, stream, small)
        at = self.place(next_multiple(size, 2 * MIB) // (2 * MIB)) * 2 * MIB
        made = Range(stream, small, False, [Cell(at, size, "free")])
        self.ranges.append(made)
        self.events.append(("segment_alloc", at, size, stream))
        return made, made.cells[0]

    def place(self, steps: int) -> int:
        """The first of so many empty steps, the lowest there are; else of a new chunk."""
        found = next((at for at in sorted(self.empty) if all(at + n in self.empty for n in range(steps))), None)
        if found is None:
            chunk = next_multiple(steps, 16)
            self.lowest_chunk -= chunk
            found = self.lowest_chunk
            self.empty |= set(range(found, found + chunk))
        self.empty -= set(range(found, found + steps))
        return found

    def fits(self, size: int) -> bool:
        return self.limit is None or self.counts()["reserved"] + size <= self.limit

    def grow(self, want: int, stream: int, small: bool) -> tuple[Range, Cell]:
        page = 2 * MIB if small else self.large
        mine = [r for r in self.ranges if r.expandable and r.stream == stream and r.small == small]
        for home in sorted(mine, key=lambda r: r.cells[0].addr):
            for index, cell in enumerate(home.cells):
                if cell.state == "unmapped":
                    first = index - 1 if index and home.cells[index - 1].state == "free" else index
                    room, last = 0, first
                    while last < len(home.cells) and home.cells[last].state in ("free", "unmapped") and room < want:
                        room += home.cells[last].size
                        last += 1
                    if room >= want:
                        return home, self.map(home, first, want, page)
        span = UNLIMITED_RANGE if self.limit is None else self.limit + self.limit // 8
        span = next_multiple(span, page)
        home = Range(stream, small, True, [Cell(self.next_range, span, "unmapped")])
        self.next_range += next_multiple(span, 2 * MIB)
        self.ranges.append(home)
        return home, self.map(home, 0, want, page)

    def map(self, home: Range, first: int, want: int, page: int) -> Cell:
        """Map pages from cell `first` on until it is one free cell of at least `want` bytes."""
        start = home.cells[first].addr
        while True:
            at = next(i for i, c in enumerate(home.cells) if c.addr <= start < c.addr + c.size)
            cell = home.cells[at]
            if cell.state == "free" and cell.size >= want:
                return cell
            hole = cell if cell.state == "unmapped" else home.cells[at + 1]
            missing = want - (cell.size if cell.state == "free" else 0)
            size = min(next_multiple(min(missing, hole.size), page), hole.size)
            index = next(i for i, c in enumerate(home.cells) if c is hole)
            rest = [Cell(hole.addr + size, hole.size - size, "unmapped")] if hole.size > size else []
            home.cells[index : index + 1] = [Cell(hole.addr, size, "free"), *rest]
            self.events.append(("segment_map", hole.addr, size, home.stream))
            home.merge()

    def unmap(self, home: Range, cell: Cell) -> None:
        page = 2 * MIB if home.small else self.large
        base = home.cells[0].addr
        start = base + next_multiple(cell.addr - base, page)
        end = base + (cell.addr + cell.size - base) // page * page
        if end <= start:
            return
        index = next(i for i, c in enumerate(home.cells) if c is cell)
        parts = [
            Cell(cell.addr, start - cell.addr, "free"),
            Cell(start, end - start, "unmapped"),
            Cell(end, cell.addr + cell.size - end, "free"),
        ]
        home.cells[index : index + 1] = [p for p in parts if p.size]
        home.merge()
        self.events.append(("segment_unmap", start, end - start, home.stream))
        if len(home.cells) == 1 and home.cells[0].state == "unmapped":
            self.ranges = [r for r in self.ranges if r is not home]

    def drop(self, home: Range, cell: Cell) -> None:
        self.ranges = [r for r in self.ranges if r is not home]
        self.events.append(("segment_free", cell.addr, cell.size, home.stream))
        at = cell.addr // (2 * MIB)
        self.empty |= set(range(at, at + next_multiple(cell.size, 2 * MIB) // (2 * MIB)))

    # making room

    def collect(self) -> None:
        threshold = int(self.gc * self.limit)
        excess = self.counts()["reserved"] - threshold
        while excess > 0:
            whole = [(r, c) for r, c in self.in_order(small=False) if r.whole and not r.expandable]
            if not whole:
                return
            average = Fraction(sum(self.searches - c.born for _, c in whole), len(whole))
            for home, cell in whole:
                if self.searches - cell.born >= average:
                    excess -= cell.size
                    self.drop(home, cell)

    def free_oversize(self, want: int, stream: int, small: bool) -> bool:
        if self.c.max_split_size_mb is None:
            return False
        want = max(want, self.max_split)
        mine = [(r, c) for r, c in self.in_order(small) if r.stream == stream]
        enough = [(r, c) for r, c in mine if c.size >= want]
        if enough and not enough[0][0].expandable:
            self.drop(*enough[0])
            return True
        freed = 0
        for home, cell in reversed([rc for rc in mine if rc[1].size < want]):
            if freed >= want or cell.size < self.max_split:
                break
            if not home.expandable:
                freed += cell.size
                self.drop(home, cell)
        return freed >= want


def reach(home: Range, cell: Cell) -> int:
    index = next(i for i, c in enumerate(home.cells) if c is cell)
    after = home.cells[index + 1] if index + 1 < len(home.cells) else None
    return cell.size + (after.size if after is not None and after.state == "unmapped" else 0)


def next_multiple(size: int, step: int) -> int:
    while size % step:
        size += step - size % step
    return size
