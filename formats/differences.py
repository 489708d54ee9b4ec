"""What differs between two manifests: every field but ``run``, found by the name of what it belongs to, not by its position."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from formats.manifest import Manifest

_LEFT_OUT: dict[str, Any] = {
    "run": True,
    "evaluations": {"__all__": {"finished_utc", "seconds"}},
    "gates": {"__all__": {"judged_utc"}},
}
_KEYS = ("name", "file", "slug", "part", "policy")
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Difference:
    """One place, for example ``tensors[model.norm.weight].scheme``, and its two values as JSON text (``-`` where absent)."""

    where: str
    left: str
    right: str

    def __str__(self) -> str:
        return f"{self.where}: {_short(self.left)} against {_short(self.right)}"


def diff(left: Manifest, right: Manifest) -> tuple[Difference, ...]:
    """All differences, in the order of the schema; numbers differ when they are not equal, without any tolerance.

    Entries of lists are matched by name, file or slug where these are unique on both sides, by position otherwise; the order of
    matched entries does not count.
    """
    a, b = (manifest.model_dump(mode="json", exclude=_LEFT_OUT) for manifest in (left, right))
    return tuple(_walk("", a, b))


def _walk(where: str, a: Any, b: Any) -> Iterator[Difference]:
    if isinstance(a, list) and isinstance(b, list):
        key = _common_key(a, b)
        left, right = _by_key(a, key), _by_key(b, key)
        for name in [*left, *(name for name in right if name not in left)]:
            yield from _walk(f"{where}[{name}]", left.get(name, _ABSENT), right.get(name, _ABSENT))
    elif isinstance(a, dict) and isinstance(b, dict):
        for name in [*a, *(name for name in b if name not in a)]:
            yield from _walk(f"{where}.{name}" if where else name, a.get(name, _ABSENT), b.get(name, _ABSENT))
    elif type(a) is not type(b) or a != b:
        yield Difference(where, _text(a), _text(b))


def _common_key(a: list[Any], b: list[Any]) -> str | None:
    for key in _KEYS:
        if all(_unique(items, key) for items in (a, b)):
            return key
    return None


def _unique(items: list[Any], key: str) -> bool:
    names = [item.get(key) for item in items if isinstance(item, dict)]
    return len(names) == len(items) and all(isinstance(name, str) for name in names) and len(set(names)) == len(names)


def _by_key(items: list[Any], key: str | None) -> dict[str, Any]:
    return {str(position) if key is None else item[key]: item for position, item in enumerate(items)}


def _text(value: Any) -> str:
    return "-" if value is _ABSENT else json.dumps(value, ensure_ascii=False)


def _short(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
