"""Plain values, and their form in JSON, which knows no NaN and no infinity: null stands for them."""

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any


def plain(value: Any, name: str = "it") -> Any:
    """A copy made of None, truth values, numbers, texts, lists, tuples, and dicts with texts or whole numbers as keys.

    Arrays, tensors and sets become lists, a set in an order of its own. name: what a message calls the value. Raises
    ValueError for whatever none of that says, with the name of the entry.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if hasattr(value, "tolist"):  # of numpy and torch
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {_key(key, name): plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((plain(item, name) for item in value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        items = [plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    kind = "a whole number of more than 64 bits" if isinstance(value, int) else f"a {type(value).__name__}"
    raise ValueError(f"{name} is {kind}: must be a number, a text, None, or lists and mappings of these")


def _key(key: Any, name: str) -> Any:
    key = plain(key, f"a name in {name}")
    if type(key) not in (int, str):
        raise ValueError(f"{name} has the name {key!r}: must be a text or a whole number")
    return key


def alike(one: Any, other: Any) -> bool:
    """Whether two plain values are equal; NaN equals NaN, and a tuple a list."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other or (one != one and other != other))


def without_nan(value: Any) -> Any:
    """The same with None for each of them, in mappings and sequences of any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: without_nan(item) for name, item in value.items()}
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return [without_nan(item) for item in value] if is_list else value


def with_nan(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Metrics by name, as they were before they were written; an infinity comes back as NaN."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}
