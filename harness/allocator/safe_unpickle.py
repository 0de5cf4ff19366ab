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

_FIXED = {  # allowed opcodes by the length of their argument in bytes
    0: (pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.EMPTY_DICT, pickle.EMPTY_LIST,
        pickle.EMPTY_TUPLE, pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.MEMOIZE),
    1: (pickle.PROTO, pickle.BININT1, pickle.BINGET),
    2: (pickle.BININT2,),
    4: (pickle.BININT, pickle.LONG_BINGET),
    8: (pickle.FRAME, pickle.BINFLOAT),
}  # fmt: skip
_SPECIAL, _REFUSED = 254, 255
_WIDTH = [_REFUSED] * 256
for _width, _codes in _FIXED.items():
    for _code in _codes:
        _WIDTH[_code[0]] = _width
_COUNTED = {pickle.SHORT_BINUNICODE[0]: 1, pickle.BINUNICODE[0]: 4, pickle.BINUNICODE8[0]: 8, pickle.LONG1[0]: 1}
_PUTS = {pickle.BINPUT[0]: 1, pickle.LONG_BINPUT[0]: 4}
_TUPLES = {pickle.TUPLE1[0]: 1, pickle.TUPLE2[0]: 2, pickle.TUPLE3[0]: 3}
for _op in (*_COUNTED, *_PUTS, *_TUPLES):
    _WIDTH[_op] = _SPECIAL
_INTEGERS = frozenset((pickle.BININT[0], pickle.BININT1[0], pickle.BININT2[0], pickle.LONG1[0]))
_STOP, _LONG = pickle.STOP[0], pickle.LONG1[0]
_LONGEST = 9  # bytes of a number; any number of longer ones can share a hash, and as keys they would take forever


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
    """Walk the opcodes without running them. Raises UnsafePickle."""
    width = _WIDTH
    at, end, puts, integers = 0, len(data), 0, 0
    while at < end:
        op = data[at]
        length = width[op]
        if length < _SPECIAL:
            at += 1 + length
            if op == _STOP:
                return
        elif length == _REFUSED:
            raise UnsafePickle(_name(op, at))
        elif op in _COUNTED:
            head = _COUNTED[op]
            size = int.from_bytes(data[at + 1 : at + 1 + head], "little")
            if op == _LONG and size > _LONGEST:
                raise UnsafePickle(f"it has a number of {size} bytes at byte {at}; a recording's have 64 bits")
            at += 1 + head + size
        elif op in _PUTS:
            head = _PUTS[op]
            puts += 1
            if int.from_bytes(data[at + 1 : at + 1 + head], "little") > puts:
                raise UnsafePickle(f"its memo jumps ahead at byte {at}, which no writer of recordings does")
            at += 1 + head
        else:
            if integers < _TUPLES[op]:
                raise UnsafePickle(f"it has a tuple of something other than integers at byte {at}")
            at += 1
        integers = integers + 1 if op in _INTEGERS and (op != _LONG or size < _LONGEST) else 0
    raise UnsafePickle("it is truncated")


def _name(op: int, at: int) -> str:
    name = {info.code: info.name for info in pickletools.opcodes}.get(chr(op))
    if name is None or at == 0:
        return "it is not a pickle"
    return f"pickle opcode {name} at byte {at}; a recording is made of plain containers only"
