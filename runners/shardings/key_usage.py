"""A configuration that records which of its keys a library reads, because keys that it ignores have no effect."""

from collections.abc import Iterator, KeysView, Mapping
from typing import Any


class KeyUsage(dict[str, Any]):
    """Node of a configuration that remembers which of its keys were read; nodes inside it do likewise."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({k: KeyUsage(v) if isinstance(v, Mapping) else v for k, v in values.items()})
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default`, and note that the key was read."""
        self.asked.add(key)
        return super().get(key, default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, which is set to `default` if missing, and note that the key was read."""
        self.asked.add(key)
        return super().setdefault(key, default)

    def keys(self) -> Any:
        """Return a view of the keys, whose `in` notes that the key was read."""
        return KeysView(self)

    def __iter__(self) -> Iterator[str]:  # so that ** asks key by key
        return super().__iter__()
