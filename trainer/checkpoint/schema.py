"""What a value read from a file may be: its type, its range, and of a mapping the same for each entry."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Kind = Callable[[str, Any], None]
"""Called with the name of an entry and its value. Raises ValueError that names both, and what the value must be."""

MOST_SHOWN = 60
"""Characters of a value in a message."""


def whole(at_least: int = 0, at_most: int = 2**63 - 1) -> Kind:
    """An integer; the limits are what fits into the arithmetic that it enters."""

    def require(name: str, value: Any) -> None:
        limits = f"at least {at_least}" if at_most == 2**63 - 1 else f"from {at_least} to {at_most}"
        if type(value) is not int or not at_least <= value <= at_most:
            raise wrong(name, value, f"must be a whole number, {limits}")

    return require


def number(at_least: float = -math.inf, above: float = -math.inf, finite: bool = True) -> Kind:
    """finite: neither infinite nor NaN."""

    def require(name: str, value: Any) -> None:
        if type(value) not in (int, float):
            raise wrong(name, value, "must be a number")
        if finite and not (abs(value) < 2.0**1023 and value >= at_least and value > above):  # NaN is none of that
            limits = [f"at least {at_least:g}"] * (at_least > -math.inf) + [f"above {above:g}"] * (above > -math.inf)
            raise wrong(name, value, ", ".join(["must be a finite number", *limits]))

    return require


def text(pattern: str = "(?s).*") -> Kind:
    """pattern: of the whole text."""

    def require(name: str, value: Any) -> None:
        if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
            raise wrong(name, value, "must be text" if pattern == "(?s).*" else f"must be text like {pattern}")

    return require


def truth(name: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise wrong(name, value, "must be true or false")


def optional(kind: Kind) -> Kind:
    """Or None."""
    return lambda name, value: kind(name, value) if value is not None else None


def either(*kinds: Kind) -> Kind:
    """One of several kinds; what is wrong is told of the first one."""

    def require(name: str, value: Any) -> None:
        refusals = []
        for kind in kinds:
            try:
                return kind(name, value)
            except ValueError as refusal:
                refusals.append(refusal)
        raise refusals[0]

    return require


def each(kind: Kind, length: int | None = None) -> Kind:
    """A list or tuple, of so many values if told."""

    def require(name: str, value: Any) -> None:
        if not isinstance(value, list | tuple) or length not in (None, len(value)):
            raise wrong(name, value, "must be a list" if length is None else f"must be a list of {length} values")
        for index, item in enumerate(value):
            kind(f"{name}[{index}]", item)

    return require


def by_name(kind: Kind) -> Kind:
    """A mapping from texts."""

    def require(name: str, value: Any) -> None:
        for key, item in _mapping(name, value).items():
            if not isinstance(key, str):
                raise wrong(name, key, "has a name that is no text")
            kind(f"{name}.{key}" if name else key, item)

    return require


def record(needed: Mapping[str, Kind], others: Mapping[str, Kind] | None = None, closed: bool = False) -> Kind:
    """A mapping with entries of their own kinds. others: those that may be left out. closed: there are no more."""
    known = {**needed, **(others or {})}

    def require(name: str, value: Any) -> None:
        entries = _mapping(name, value)
        path = f"{name}." if name else ""
        missing = [key for key in needed if key not in entries]
        if missing:
            raise ValueError(f"{path}{missing[0]} is missing")
        for key, item in entries.items():
            if key in known:
                known[key](f"{path}{key}", item)
            elif closed:
                raise ValueError(f"{path}{key if isinstance(key, str) else brief(key)} is no entry of it")

    return require


def plain(name: str, value: Any) -> None:
    """A value that `trainer.common.files.plain` returns."""
    if isinstance(value, list | tuple):
        each(plain)(name, value)
    elif isinstance(value, dict):
        for key, item in value.items():
            if type(key) not in (str, int):
                raise wrong(name, key, "has a name that is neither text nor a whole number")
            plain(f"{name}.{brief(key) if type(key) is int else key}", item)
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise wrong(name, value, "must be a plain value")


def anything(name: str, value: Any) -> None:
    """Whatever the reader brings back, with tensors of the kinds that can be loaded."""
    if isinstance(value, Tensor):
        tensor(name, value)
    elif isinstance(value, dict):
        for key, item in value.items():
            anything(f"{name}.{key if isinstance(key, str) else brief(key)}", item)
    elif isinstance(value, list | tuple):
        each(anything)(name, value)


def tensor(name: str, value: Any) -> None:
    """A tensor of any numbers in memory of its own: dense, or with coordinates of its values (COO)."""
    if not isinstance(value, Tensor):
        raise wrong(name, value, "must be a tensor")
    if value.is_meta:
        raise ValueError(f"{name} has no content: it is a tensor on the meta device")
    if value.is_nested or value.is_quantized:
        raise ValueError(f"{name} is a {'nested' if value.is_nested else 'quantized'} tensor, of which none is kept")
    if value.layout not in (torch.strided, torch.sparse_coo):
        raise ValueError(f"{name} is a sparse tensor ({value.layout}), of which none is kept")


def dense_tensor(name: str, value: Any) -> None:
    """With a place in memory for each of its numbers."""
    tensor(name, value)
    if value.layout != torch.strided:
        raise ValueError(f"{name} is a sparse tensor, where checkpoints hold dense ones")


def tensor_of_numbers(name: str, value: Any) -> None:
    """A dense one without NaN. Infinities are for `not_finite`, which knows what is a mask."""
    dense_tensor(name, value)
    real = _real(value)
    if real is not None and bool(real.sum().isnan()) and bool(real.isnan().any()):
        raise ValueError(f"{name} holds NaN")


def not_finite(tensors: Mapping[str, Tensor], may_be_infinite: Container[str] = ()) -> list[str]:
    """The names of those that hold NaN, or infinities which they may not."""
    reals = {name: real for name, value in tensors.items() if (real := _real(value)) is not None}
    # A sum is read faster than every value is judged, and tells unless it overflows.
    is_finite = defaultdict(list)  # by device: parts that were gathered are on the host, and buffers on a GPU
    for real in reals.values():
        is_finite[real.device].append(torch.isfinite(real.sum()))
    if all(bool(torch.stack(each).all()) for each in is_finite.values()):
        return []
    return [
        name
        for name, real in reals.items()
        if bool(real.isnan().any() if name in may_be_infinite else torch.isfinite(real).logical_not_().any())
    ]


def _real(value: Tensor) -> Tensor | None:
    """The numbers of a dense tensor in a type that torch can add up; None for types that have no NaN and no infinity.

    Raises RuntimeError for one of four bits.
    """
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if not value.is_floating_point():
        return None
    return value.float() if value.element_size() == 1 else value


def _mapping(name: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise wrong(name or "all of it", value, "must be a mapping")
    return value


def wrong(name: str, value: Any, what: str) -> ValueError:
    """To be raised."""
    return ValueError(f"{name} {brief(value)}: {what}")


def brief(value: Any) -> str:
    """A value in a few words, whatever it is."""
    if isinstance(value, Tensor):
        return f"of {value.dtype} {tuple(value.shape)}"
    if isinstance(value, str | bytes | bytearray):
        value = value[: MOST_SHOWN + 1]  # whatever its length, a message shows no more
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists in lists
        return f"of type {type(value).__name__}"
    return shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}..."


def first_schema_error(kinds: Iterable[Kind], value: Any) -> str | None:
    """What is wrong with a value that was read from a file; None where it is of all kinds."""
    try:
        for kind in kinds:
            kind("", value)
    except ValueError as error:
        return str(error)
    except (RecursionError, OverflowError, TypeError, AttributeError, RuntimeError):
        return "it is nested too deeply, or holds what cannot be"
    return None
