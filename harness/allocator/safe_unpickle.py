"""Unpickle plain containers from an untrusted file.

A pickle is a program, so it is read twice. First its opcodes are scanned without running them: only those that
build dicts, lists, strings, numbers, None, booleans and tuples of integers pass. That rules out code execution and
the known bombs: huge memo indices (the C unpickler sizes a table by them), preallocated buffers, numbers with
millions of digits, and tuples nested in tuples (hashing those recurses). Then an unpickler that refuses every
global runs the pickle.
"""

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any, NoReturn

from vramsweep.harness.files.bounded_reads import read_content
from vramsweep.harness.messages.errors import UserError

DEFAULT_MAX_BYTES = 1 << 30

_INTEGERS, _PUTS = ("BININT", "BININT1", "BININT2", "LONG1"), ("BINPUT", "LONG_BINPUT")
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PLAIN = {  # names of opcodes that pass, besides STOP
    *(*_INTEGERS, *_PUTS, *_TUPLES, "MARK", "NONE", "NEWTRUE", "NEWFALSE", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "MEMOIZE", "PROTO", "FRAME", "BINGET", "LONG_BINGET", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
}
_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}


class UnsafePickle(UserError):
    """The file is not a complete pickle of plain containers, or is too large."""


class _NoGlobals(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise UnsafePickle(f"it names the Python object {module_name}.{global_name}")


def load(path: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> Any:
    """Return the plain data in the pickle at `path`.

    Raises UnsafePickle if the file is missing, larger than `max_bytes`, truncated, damaged or holds anything but
    plain containers.
    """
    try:
        if (size := path.stat().st_size) > max_bytes:
            raise UnsafePickle(
                f"{path.name} has {size / 2**20:,.1f} MiB, more than the {max_bytes / 2**20:,.1f} MiB allowed: "
                "record fewer events (max_entries), or raise the limit with --max-file-size"
            )
        data = read_content(path, max_bytes)
    except (OSError, ValueError) as error:  # a name with a NUL in it, as an imported row may have
        raise UnsafePickle(f"cannot read {path.name}: {getattr(error, 'strerror', None) or error}") from None
    return loads(data, path.name)


def loads(data: bytes, name: str) -> Any:
    """Return the plain data in a pickle; error messages call it `name`. Raises UnsafePickle."""
    try:
        _scan(data)
        return _NoGlobals(io.BytesIO(data)).load()
    except UnsafePickle as error:
        raise UnsafePickle(f"{name} is refused: {error}") from None
    except Exception as error:  # the unpickler raises nearly anything on damaged input
        raise UnsafePickle(f"{name} is damaged or not a pickle: {type(error).__name__}: {error!s:.80}") from None


def _scan(data: bytes) -> None:
    """Read the opcodes without running them. Raises UnsafePickle."""
    stream, puts, integers = io.BytesIO(data), 0, 0
    while (code := stream.read(1)) != pickle.STOP:
        at, opcode = stream.tell() - 1, _OPCODES.get(code)
        if opcode is None or (at == 0 and opcode.name not in _PLAIN):
            raise UnsafePickle("it is not a pickle" if code else "it is truncated")
        name = opcode.name
        if name not in _PLAIN:
            raise UnsafePickle(f"pickle opcode {name} at byte {at}; a recording is made of plain containers only")
        try:
            argument = opcode.arg.reader(stream) if opcode.arg else 0
        except ValueError:
            raise UnsafePickle("it is truncated") from None
        if name == "LONG1" and (size := argument.bit_length() // 8 + 1) > 9:
            # any number of longer ones can share a hash, and as keys they would take forever
            raise UnsafePickle(f"it has a number of {size} bytes at byte {at}; a recording's have 64 bits")
        puts += name in _PUTS
        if name in _PUTS and argument > puts:
            raise UnsafePickle(f"its memo jumps ahead at byte {at}, which no writer of recordings does")
        if integers < _TUPLES.get(name, 0):
            raise UnsafePickle(f"it has a tuple of something other than integers at byte {at}")
        integers = integers + 1 if name in _INTEGERS and argument.bit_length() < 64 else 0
