"""Text for a terminal: anything that a terminal would act on instead of showing is written out, as \\x1b.

Names, reasons and files come from outside: a library's last words, an imported journal, a model's name. They could move
the cursor, hide a line, set the window's title or turn the order of letters round. The front door
(vramsweep/__main__.py) prints through `Escaped`, and tables through console.py, so no other code need think of it.

A stream whose reader has gone (`| head`), or whose disk is full, ends the verb by `Unwritten`. No code in between takes
that for an error of a file of its own. A sweep ends so too: finished rows are kept, and the same command resumes.

Not escaped: log files, which hold what a worker wrote, as it wrote it; line ends, which a name may hold too.
"""

import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TextIO, cast

# C0 and C1 controls but for line ends and tabs; what turns the direction of writing (Unicode Annex 9); line and
# paragraph separators; tag characters, which nobody sees.
_CODES = (
    *(set(range(0x20)) - {0x09, 0x0A}), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F),
    *range(0x2066, 0x206A), 0xFEFF, *range(0xE0000, 0xE0080),
)  # fmt: skip
_WRITTEN = {code: chr(code).encode("unicode_escape").decode() for code in _CODES}


def escape_text(text: str) -> str:
    """Return the text without anything that a terminal would act on; line ends and tabs stay."""
    return text if text.isascii() and text.isprintable() else text.translate(_WRITTEN)


class Unwritten(BaseException):
    """A failure to write what was printed on the stream. As with a KeyboardInterrupt, no code in between handles it."""

    def __init__(self, stream: IO[str], error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.stream, self.number = stream, error.errno


class _Guarded:
    """A stream that raises `Unwritten` if a write or a flush fails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise Unwritten(self._stream, error) from None

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise Unwritten(self._stream, error) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_streams() -> str | None:
    """Open closed standard streams on the null device, and return a message if the output was closed, else None.

    The next file that a sweep opens would get the closed stream's number, and whoever prints would write into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    closed = sys.stdout is None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 as long as the process
    return "standard output is closed; to discard it, use >/dev/null" if closed else None


def discard(descriptors: Iterable[int]) -> None:
    """Drop what is written to these descriptors from now on. Raises OSError."""
    null = os.open(os.devnull, os.O_WRONLY)
    for number in descriptors:
        os.dup2(null, number)
    os.close(null)


def status_of_lost_stream(lost: Unwritten) -> int:
    """Return the exit status if a stream could not be written: 141, as of a process that SIGPIPE ends, if its reader
    has gone; else 2, and a line says why. What is left in the stream is dropped, because Python would report it at
    exit."""
    with contextlib.suppress(OSError, ValueError):
        discard([lost.stream.fileno()])
    if lost.number == errno.EPIPE:
        return 128 + 13
    with contextlib.suppress(Unwritten):
        print(f"vramsweep: the output cannot be written: {lost}", file=sys.stderr)
    return 2


class Escaped(_Guarded):
    """A stream that escapes what it prints (`escape_text`). Rich writes behind it, because its sequences are wanted."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.rich_proxied_file = stream  # where Rich looks for what is behind a stream

    def write(self, text: str) -> int:
        """Print the text, escaped."""
        return super().write(escape_text(text))


def behind_escapes(stream: IO[str]) -> IO[str]:
    """Return the stream itself if it is wrapped: by `Escaped`, by Rich while a bar is there, or by both."""
    while (inner := getattr(stream, "rich_proxied_file", None)) is not None:
        stream = inner
    return stream


def escape_others() -> None:
    """Escape all text from now on after Rich took the streams over, because Rich accepts many sequences."""
    sys.stdout, sys.stderr = (cast(TextIO, Escaped(stream)) for stream in (sys.stdout, sys.stderr))


def _unforeseen(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """Print Python's own last words escaped, because they quote text from outside."""
    text = "".join(traceback.format_exception(kind, error, where))
    print(escape_text(text), end="", file=sys.stderr)


@contextlib.contextmanager
def escaped() -> Iterator[None]:
    """Escape whatever is printed meanwhile, on either stream; a name that cannot be encoded raises no error.

    What Python prints of an uncaught error is escaped too, from then on.
    """
    sys.excepthook = _unforeseen
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    out, err = (cast(TextIO, Escaped(cast(TextIO, _Guarded(stream)))) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield
