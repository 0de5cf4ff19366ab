"""Out-of-memory errors in logs, which are read as streams: messages, the stacks above them, and texts of a full host.

allocator/oom_message.py reads the message itself.
"""

import json
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vramsweep.harness.allocator.oom_message import read_message, read_others
from vramsweep.harness.allocator.oom_state import UNKNOWN, categorize
from vramsweep.harness.allocator.peak_blocks import TORCH
from vramsweep.harness.files.bounded_reads import open_regular
from vramsweep.harness.rows import outcome
from vramsweep.harness.rows.schema import Outcome

KINDS: dict[str, str] = json.loads(Path(__file__).with_name("oom_kinds.json").read_text("utf-8"))
_DEVICE = re.compile(r"\bGPU (\d+)\b|on device (\d+)")
_START = re.compile(r"(CUDA|HIP|XPU) out of memory|would exceed allowed memory", re.IGNORECASE)
_HINT = re.compile(r"memory|alloc|\boom\b|killed|SIGKILL|-9\b|exhausted", re.IGNORECASE)  # else no line is searched
_KILLED = re.compile(
    r"^(\S+: line \d+: +\d+ )?Killed\b|oom-kill|Killed process \d+|SIGKILL"
    r"|(exit ?code|return code|exit status)\W*(= |is )?-9\b"
)
_PREFIX = re.compile(  # "> " of a mail; time stamps; [rank3]: rank:  3 | [default3]: and srun's "3: "
    r"^(?:> )?(?:\[?(?P<time>\d{4}-\d\d-\d\d[ T_]\d\d:\d\d:\d\d(?:[.,]\d+)?)Z?\]?\s?)?"
    r"(?:\[?(?:rank|default):?\s*(?P<rank>\d+)\]?\s?[:|]|(?P<task>\d{1,5}):(?= ))?"
)
_FRAME = re.compile(r'(?:(?:^|\s)File "([^"\n]{1,400})", line |^\s*(\S+\.py):)(\d+),? in\s+(\S*)')
_CODE = re.compile(r"❱\s*\d+\s+(\S.*)|^\s{4,}([A-Za-z_(*@].*)")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_LIBRARY = re.compile(r"(^|/)(site|dist)-packages/|/lib/python3[^/]*/|^<")
LONGEST, KEPT, AFTER = 4096, 600, 8  # characters of a line; lines before an error, and after it
MOST, ERROR_FILE = 200, 1 << 20  # errors of a file; bytes of torchrun's error file


@dataclass(frozen=True)
class OomReport:
    """One out-of-memory error of a log. `kind` is "gpu", "host" or "killed" (by SIGKILL, for whatever reason).

    `sizes` are bytes as rounded in the message (see read_message), `others` those of other processes by process id.
    `own` and `model` are the innermost lines of code outside libraries and outside torch, "file:line function"; `code`
    is the text of `own`. `category` is what the request was for, as in oom_state. `moment` is a text that sorts by
    time. Unknown is None.
    """

    kind: str
    text: str
    file: str
    line: int
    rank: int | None = None
    moment: str | None = None
    device: int | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)
    own: str | None = None
    code: str | None = None
    model: str | None = None
    category: str = UNKNOWN


@dataclass
class Log:
    """What was read of a log: its errors in order (at most `MOST`), how many more, its lines, and another fault."""

    reports: list[OomReport] = field(default_factory=list)
    more: int = 0
    lines: int = 0
    last: str = ""
    fault: str | None = None


def read_log(path: Path, name: str) -> Log:
    """Read the out-of-memory errors of a log, or of torchrun's error file. Raises OSError."""
    found = re.search(r"rank[_-]?(\d+)", path.name) or re.fullmatch(r"(\d{1,5})", path.parent.name)
    rank = int(found[1]) if found else None
    with open_regular(path) as file:
        if (error := _error_file(file.read(ERROR_FILE))) is not None:
            return find_reports(error[1].splitlines(), name, rank, error[0])
        file.seek(0)
        lines = iter(lambda: file.readline(LONGEST * 4), b"")
        return find_reports((one.decode(errors="replace") for one in lines), name, rank)


def find_reports(lines: Iterable[str], name: str, rank: int | None = None, moment: str | None = None) -> Log:
    """Return the out-of-memory errors in a log's lines; `rank` and `moment` are for lines that name none."""
    log = Log()
    before: dict[int | None, deque[str]] = {}
    open_: dict[int | None, tuple[OomReport, list[str], list[str]]] = {}

    def close(of: int | None) -> None:
        if of in open_:
            report = _finished(*open_.pop(of))
            log.more += len(log.reports) == MOST
            log.reports += [report] * (len(log.reports) < MOST)

    for raw in lines:
        log.lines += 1
        raw = _COLOUR.sub("", raw.rstrip("\r\n").rpartition("\r")[2])  # of a bar of progress the last state
        begun = _PREFIX.match(raw)
        assert begun is not None  # every part of it may be missing
        text = raw[begun.end() :].replace("│", " ").rstrip()[:LONGEST]
        number = begun["rank"] or begun["task"]
        of = rank if number is None else int(number)
        log.last = text.strip() or log.last
        kind = _kind(text) if _HINT.search(text) else None
        if kind in KINDS:
            close(of)
            report = OomReport(str(kind), text.strip(), name, log.lines, of, moment or begun["time"])
            open_[of] = report, [text], list(before.get(of, ()))
        elif kind is not None:
            log.fault = kind
        elif of in open_:
            after = open_[of][1]
            after.append(text)
            if len(after) > AFTER or "reserved" in " ".join(after[:-1]):
                close(of)
        if of not in before and len(before) > 4096:
            before.clear()
        before.setdefault(of, deque(maxlen=KEPT)).append(text)
    for of in list(open_):
        close(of)
    log.reports = _distinct(sorted(log.reports, key=lambda one: one.line))
    return log


def first_report(reports: Sequence[OomReport]) -> tuple[OomReport, str]:
    """Return the error that came first, and how that is known."""
    if len(reports) > 1 and all(one.moment for one in reports):
        return min(reports, key=lambda one: (one.moment or "", one.line)), "by its time stamp"
    files = len({one.file for one in reports}) > 1
    return reports[0], "by the order of the files; no time stamps" if files else "by the order in the log"


def _kind(text: str) -> str | None:
    """Return a key of `KINDS` for an out-of-memory line; another fault's text; None for any other line."""
    if _START.search(text):
        return "gpu"
    if (found := outcome.find_fault(text)) is not None:
        return {Outcome.OOM: "gpu", Outcome.HOST_OOM: "host"}.get(found.outcome, f"a fault: {found.fault}")
    return "killed" if _KILLED.search(text) else None


def _finished(report: OomReport, after: Sequence[str], stack: Sequence[str]) -> OomReport:
    """Return the report with what the lines of its message and the stack before it say."""
    text = " ".join(" ".join(after).split())
    device = _DEVICE.search(text)
    begun = max((at for at, one in enumerate(stack) if "Traceback (most recent" in one), default=0)
    frames: list[dict[str, Any]] = []  # as a recording has them, the innermost first
    for at, line in enumerate(stack[begun:], begun + 1):
        if found := _FRAME.search(line):
            code = next((hit[1] or hit[2] for one in stack[at : at + 11] if (hit := _CODE.search(one))), None)
            path = (found[1] or found[2]).replace("\\", "/")
            frames.insert(0, {"filename": path, "line": int(found[3]), "name": found[4], "code": code})
    own = next((one for one in frames if not _LIBRARY.search(one["filename"])), None)
    model = next((one for one in frames if not TORCH.search(one["filename"])), own)
    return replace(
        report,
        device=None if device is None else int(device[1] or device[2]),
        sizes=read_message(text),
        others=read_others(text),
        own=_place(own),
        code=own["code"] if own else None,
        model=_place(model) if model is not own else None,
        category=categorize(frames),
    )


def _place(frame: Mapping[str, Any] | None) -> str | None:
    if frame is None:
        return None
    return f"{'/'.join(frame['filename'].split('/')[-3:])}:{frame['line']} {frame['name']}".strip(" ?")


def _distinct(reports: Sequence[OomReport]) -> list[OomReport]:
    """Drop errors that repeat one of the same file (a logger prints it again), and those without sizes if others have
    some. Of repeated ones, a rank's own or the one with a stack stays."""
    found: dict[tuple[object, ...], OomReport] = {}
    for one in [one for one in reports if one.sizes.get("request")] or reports:
        key = (one.device, *one.sizes.items(), None if one.sizes else (one.rank, one.kind))
        known = found.setdefault(key, one)
        if (known.rank is None and one.rank is not None) or (not known.own and one.own):
            found[key] = replace(one, line=known.line)
        elif one.rank not in (None, known.rank):
            found[(*key, one.rank)] = one
    return list(found.values())


def _error_file(content: bytes) -> tuple[str | None, str] | None:
    """Return time and text of a file that torchrun wrote for a failed rank; None for any other file."""
    try:
        data = json.loads(content) if content.lstrip().startswith(b"{") else {}
    except (ValueError, RecursionError):
        return None
    told = data.get("message")
    if not isinstance(told, dict):
        return (None, told) if isinstance(told, str) else None
    extra = told.get("extraInfo")
    stack, at = (extra.get("py_callstack"), extra.get("timestamp")) if isinstance(extra, dict) else (None, None)
    return None if at is None else str(at)[:40], str(stack or told.get("message"))
