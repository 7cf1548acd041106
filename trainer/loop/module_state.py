"""Copies, restores and compares the buffers and ordinary Python attributes of modules."""

import copy
import pickle
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import is_
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from trainer.common.errors import UserError
from trainer.common.torch_private import NOT_PERSISTENT, RNN_CACHES, names_not_persistent, num_writes, own_buffers

_OF_TORCH = RNN_CACHES.union(vars(nn.Module())) - {NOT_PERSISTENT}
_CONTAINERS = frozenset([list, set, dict, deque, OrderedDict, defaultdict, Counter])
_CONTAINERS_AND_TUPLES = (list, tuple, set, dict, deque)
_LARGEST_OUTLINED = 2**12
_PLAIN = frozenset([bool, int, float, complex, str, bytes, type(None)])
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_HOLDS_NOTHING = (type, FunctionType, ModuleType, nn.Module, Tensor)
"""Types whose attributes are ignored, because forward passes rarely change them or other code compares them."""

ABSENT: Any = type("Absent", (), {"__slots__": ()})()
"""Marks a dictionary entry as missing."""

Entry = tuple[dict[str, Any], str]
"""A dictionary, such as a module's attributes or buffers, and one of its keys."""
Copies = dict[int, tuple[Any, Any]]
"""Maps the id of each object to the tuple (object, copy)."""


def is_plain(value: Any) -> bool:
    """Returns whether a value is a number, a string or None."""
    return type(value) in _PLAIN


def copied(value: Any, copies: Copies) -> Any:
    """Copies a tensor, an array, or a container with its items; returns other values unchanged.

    copies: earlier copies, to which this function adds new copies. Does not copy tensors that require a gradient,
    because they belong to the autograd graph of one forward. Does not copy lists of parameters, such as
    `nn.LSTM._flat_weights`, because assigning a parameter also updates the list.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if id(value) in copies:
        return copies[id(value)][1]
    if kind in _CONTAINERS:
        if kind is list and any(isinstance(item, nn.Parameter) for item in value):
            return value
        twin = copy.copy(value)
        copies[id(value)] = value, twin  # before copying items, which may contain the container
        for name, item in value.items() if isinstance(value, dict) else enumerate(value) if kind is not set else ():
            twin[name] = copied(item, copies)
        return twin
    if isinstance(value, tuple):
        items = [copied(item, copies) for item in value]
        if all(map(is_, items, value)):
            return value
        twin = value._make(items) if hasattr(value, "_make") else kind(items)
    elif kind is np.ndarray:
        twin = value.copy()
    elif kind is Tensor and not value.requires_grad:
        twin = value.detach().clone()
    else:
        return value
    copies[id(value)] = value, twin
    return twin


def contents(values: Iterable[Any]) -> Iterator[Any]:
    """Yields each object in `values` and in nested containers once, except numbers, strings and None."""
    waiting, seen = [*values], set[int]()
    while waiting:
        value = waiting.pop()
        if is_plain(value) or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if type(value) in _CONTAINERS or isinstance(value, tuple):
            waiting.extend(value.values() if isinstance(value, dict) else value)


def outline(module: nn.Module) -> dict[str, Any]:
    """Summarises a module with its submodules: tensor addresses, `requires_grad` of parameters, attribute values.

    Equal outlines mean that no tensor or attribute was replaced between the calls; tensors may have changed in place.
    """
    found: dict[str, Any] = {name: (p.data_ptr(), p.requires_grad) for name, p in module.named_parameters()}
    found |= {name: outline_of(buffer) for name, buffer in module.named_buffers()}
    for path, each in named_modules(module):
        found |= {f"{path}.{name}".lstrip("."): outline_of(value) for name, value in own_attributes(each).items()}
    return found


def outline_of(value: Any, most: int = _LARGEST_OUTLINED) -> Any:
    """Summarises one value for `outline`.

    For an object of unknown type, keeps its id, and its attributes that are numbers, strings or None. most: maximum
    number of items in a container, or bytes in an array; larger values are summarised by their id.
    """
    if is_plain(value):
        return value
    if isinstance(value, Tensor):
        return value.data_ptr() if value.layout == torch.strided else id(value)
    if isinstance(value, nn.Module):  # held by an attribute, not a submodule
        return [outline_of(tensor) for tensor in chain(value.parameters(), value.buffers())]
    if isinstance(value, _CONTAINERS_AND_TUPLES) and len(value) <= most:
        items = chain(*value.items()) if isinstance(value, dict) else value
        return [outline_of(item, most // 2) for item in items]
    if isinstance(value, np.ndarray) and value.nbytes <= most:
        return value.tobytes()
    held = {} if isinstance(value, _HOLDS_NOTHING) else getattr(value, "__dict__", {})
    return id(value), {name: item for name, item in held.items() if is_plain(item)}


def first_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Returns the first name whose value differs between two outlines, or None."""
    # compares lists, because list comparison treats an object as equal to itself even if it is NaN
    names = (name for name in [*now, *before] if [before.get(name, ABSENT)] != [now.get(name, ABSENT)])
    return next(names, None)


class References:
    """Stores references to the values of dictionary entries, to restore them."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = [(owner, name, owner.get(name, ABSENT)) for owner, name in entries]

    def write(self, instead: Callable[[Any], Any] = lambda value: value) -> None:
        """Writes the stored values to the dictionary entries. instead: maps each stored value to the value to write."""
        for owner, name, value in self.entries:
            if value is ABSENT:
                owner.pop(name, None)
            else:
                owner[name] = instead(value)


class State(References):
    """Stores the values of dictionary entries, and copies of their tensors, arrays and containers, to restore them."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        super().__init__(entries)
        self.copies: Copies = {}
        for _, _, value in self.entries:
            copied(value, self.copies)

    def copy_of(self, value: Any) -> Any:
        return self.copies.get(id(value), (value, value))[1]

    def put_back(self) -> None:
        """Restores the dictionary entries, and the contents of their tensors, arrays and containers."""
        originals = {id(twin): original for original, twin in self.copies.values()}
        for original, twin in self.copies.values():
            if isinstance(original, Tensor):
                original.data.copy_(twin)  # .data hides the write from a running backward
            elif isinstance(original, np.ndarray):
                original[...] = twin
            elif isinstance(original, dict):
                original.clear()
                original.update({name: originals.get(id(item), item) for name, item in twin.items()})
            elif not isinstance(original, tuple):
                items = [originals.get(id(item), item) for item in twin]
                original.clear()
                original.update(items) if isinstance(original, set) else original.extend(items)
        self.write()


class WholeState(State):
    """Stores buffers and attributes of a module and its submodules; `write` also deletes those added later."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = [
            (path, each, own_attributes(each), dict(own_buffers(each))) for path, each in named_modules(module)
        ]
        attributes = [(vars(each), name) for _, each, own, _ in self.modules for name in own]
        super().__init__(
            [*attributes, *((own_buffers(each), name) for _, each, _, own in self.modules for name in own)]
        )

    def write(self, instead: Callable[[Any], Any] = lambda value: value) -> None:
        for _, each, attributes, _ in self.modules:
            for name in own_attributes(each).keys() - attributes.keys():
                del vars(each)[name]
            own_buffers(each).clear()  # so that `super().write` restores the order of buffers
        super().write(instead)


def named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns (path, module) for a module and its submodules, except TorchScript modules, whose state is in C++."""
    return [each for each in module.named_modules() if not isinstance(each[1], ScriptModule)]


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Returns a module's attributes, except the internal dictionaries of `nn.Module` (parameters, buffers, hooks)."""
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


# --- forwards without side effects -------------------------------------------------------------------------------


class Change(NamedTuple):
    """A buffer or attribute that a forward replaced or changed in place.

    path: name within the whole module. before, now: old and new value, or ABSENT. in_place: whether the forward changed
    the old value in place. is_seen: whether `before` is intact, so that assigning it undoes the change.
    """

    module: nn.Module
    path: str
    name: str
    is_buffer: bool
    is_persistent: bool
    before: Any
    now: Any
    in_place: bool
    is_seen: bool

    @property
    def entry(self) -> Entry:
        return buffers_of(self.module) if self.is_buffer else vars(self.module), self.name


@contextmanager
def leaving_no_trace(module: nn.Module) -> Iterator[Callable[[], list[Change]]]:
    """Context where forward passes change copies of a module's buffers and attributes; restores the originals on exit.

    Yields a function that returns all changes that forward passes have made so far. They change TorchScript buffers
    directly; the values are restored on exit. Exit also restores each submodule's mode (train or eval).
    """
    modes = [(each, each.training) for each in module.modules()]
    scripted = _Scripted(module)
    state = WholeState(module)
    comparison = _Comparison(state)
    state.write(instead=state.copy_of)
    try:
        yield lambda: comparison.changes() + scripted.changes()
    finally:
        state.write()
        scripted.put_back()
        for each, mode in modes:
            each.training = mode


class _Scripted:
    """Restores buffers of TorchScript modules, which forward passes change in place, from copies."""

    def __init__(self, module: nn.Module) -> None:
        self._found = [
            (path, each, name, buffer, buffer.clone())
            for path, each in module.named_modules()
            if isinstance(each, ScriptModule)
            for name, buffer in each.named_buffers(recurse=False)
        ]

    def changes(self) -> list[Change]:
        """Returns the changed buffers. Raises UserError if a forward replaced a buffer."""
        changed = []
        for path, module, name, buffer, copy_ in self._found:
            full = f"{path}.{name}" if path else name
            now = buffers_of(module)[name]
            if now is not buffer:
                raise UserError(f"{full}: a TorchScript forward replaces this buffer; write to it in place")
            if not _is_same_content(buffer, copy_):
                persistent = name not in names_not_persistent(module)
                changed.append(Change(module, full, name, True, persistent, buffer, now, in_place=True, is_seen=False))
        return changed

    def put_back(self) -> None:
        for _, module, name, buffer, copy_ in self._found:
            buffer.data.copy_(copy_)
            if buffers_of(module)[name] is not buffer:
                own_buffers(module)[name] = buffer


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """Returns a module's own dictionary of buffers; for TorchScript, a new dictionary of the same tensors."""
    return dict(own_buffers(module).items()) if isinstance(module, ScriptModule) else own_buffers(module)


class _Comparison:
    """Finds buffers and attributes that forward passes have changed. state: the values before the forward passes."""

    def __init__(self, state: WholeState) -> None:
        self._state = state
        self._views = {id(value): _view(value) for value in contents(value for _, _, value in state.entries)}
        self._versions = {key: version_of(twin) for key, (_, twin) in state.copies.items()}
        self._unseen = False
        self._compared: set[int] = set()

    def changes(self) -> list[Change]:
        found, copy_of = [], self._state.copy_of
        for path, module, attributes, buffers in self._state.modules:
            prefix, local = f"{path}." if path else "", attributes[NOT_PERSISTENT] | names_not_persistent(module)
            for is_buffer, before, after in (
                (True, buffers, own_buffers(module)),
                (False, attributes, own_attributes(module)),
            ):
                for name in dict.fromkeys([*before, *after]):
                    old, new = before.get(name, ABSENT), after.get(name, ABSENT)
                    self._unseen = False
                    self._compared.clear()
                    if name == NOT_PERSISTENT or self._is_same(old, new):
                        continue
                    persistent, in_place = is_buffer and name not in local, new is not old and new is copy_of(old)
                    found.append(
                        Change(module, prefix + name, name, is_buffer, persistent, old, new, in_place, not self._unseen)
                    )
        return found

    def _is_same(self, before: Any, now: Any) -> bool:
        if isinstance(before, tuple) and type(before) is type(now):
            return len(before) == len(now) and all(map(self._is_same, before, now))
        if id(before) in self._state.copies:
            if now is not self._state.copy_of(before):
                return False
            if isinstance(before, Tensor | np.ndarray):
                return version_of(now) == self._versions[id(before)] and _is_same_content(before, now)
            if id(before) in self._compared:
                return True
            self._compared.add(id(before))
            return self._has_same_members(before, now)
        if now is before:
            is_same = _is_same_view(self._views.get(id(before)), _view(before))
            self._unseen |= not is_same
            return is_same
        if is_plain(before) or isinstance(before, torch.device | np.generic):
            return type(before) is type(now) and bool(before == now or (before != before and now != now))
        return False

    def _has_same_members(self, before: Any, now: Any) -> bool:
        if isinstance(before, set):
            return bool(before == now)
        if isinstance(before, dict):
            if [*before] != [*now]:
                return False
            before, now = before.values(), now.values()
        return len(before) == len(now) and all(map(self._is_same, before, now))


def _is_same_content(original: Any, copy_: Any) -> bool:
    """Returns whether a copy has the same bits as its original; True for sparse, quantized, meta and nested tensors."""
    if not isinstance(copy_, Tensor):
        return bool(original.tobytes() == copy_.tobytes())
    both = original.detach(), copy_.detach()
    if original.layout != torch.strided or original.is_quantized or original.is_meta or original.is_nested:
        return True
    if copy_.numel() == 0:  # its strides may not allow a view as another dtype
        return original.shape == copy_.shape
    return torch.equal(*(each.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for each in both))


def version_of(value: Any) -> int:
    """Returns a tensor's version counter, or 0 for a value without a counter."""
    return num_writes(value) if type(value) is Tensor and not value.is_inference() else 0


def _view(value: Any) -> Any:
    """Returns an object's state for comparisons: its attributes, or the internal state of a random number generator."""
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    if isinstance(value, _GENERATORS):
        return pickle.dumps(value)
    if isinstance(value, _HOLDS_NOTHING) or not hasattr(value, "__dict__"):
        return None
    return {name: (item, version_of(item)) for name, item in vars(value).items()}


def _is_same_view(before: Any, now: Any) -> bool:
    """Returns whether two results of `_view` agree; ignores added attributes, which may be caches."""
    if not isinstance(before, dict):
        return bool(before == now)
    return all(name in now and _is_same_value(before[name], now[name]) for name in before)


def _is_same_value(one: tuple[Any, int], other: tuple[Any, int]) -> bool:
    is_same = one[0] is other[0] or (is_plain(one[0]) and is_plain(other[0]) and bool(one[0] == other[0]))
    return is_same and one[1] == other[1]


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that checkpoints contain, by name; a buffer with several names appears once."""
    names = {
        f"{path}.{name}" if path else name
        for path, each in module.named_modules()
        for name in names_not_persistent(each)
    }
    return {name: buffer for name, buffer in module.named_buffers() if name not in names}
