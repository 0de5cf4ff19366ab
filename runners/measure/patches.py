"""What libraries do, replaced for a while: attributes of modules and classes, items of dictionaries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

Replacement = tuple[Any, Any, Any]  # the owner, the name of its attribute or its key, and what stands in


@contextlib.contextmanager
def patched(replacements: Iterable[Replacement], create: bool = False) -> Iterator[None]:
    """Put the stand-ins in place, all made before the first is, until the context is left.

    Raises AttributeError for an attribute that is not there, unless it is to `create` it.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, value in list(replacements):
            item = mock.patch.dict(owner, {name: value}) if isinstance(owner, dict) else None
            stack.enter_context(item or mock.patch.object(owner, name, value, create=create))
        yield
