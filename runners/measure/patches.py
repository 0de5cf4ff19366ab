"""Temporary replacements in libraries: attributes of modules and classes, items of dictionaries."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

Replacement = tuple[Any, Any, Any]  # owner, its attribute or key, and the stand-in


@contextlib.contextmanager
def patched(replacements: Iterable[Replacement], create: bool = False) -> Iterator[None]:
    """Put the stand-ins in place until the context is left; all are made before the first is put in place.

    Raises AttributeError for an attribute that does not exist, unless `create` is set.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, value in list(replacements):
            item = mock.patch.dict(owner, {name: value}) if isinstance(owner, dict) else None
            stack.enter_context(item or mock.patch.object(owner, name, value, create=create))
        yield
