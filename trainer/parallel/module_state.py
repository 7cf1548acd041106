"""The state of modules besides their parameters, in buffers and plain attributes: kept, put back, compared."""

import copy
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_, is_not
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from trainer.common.errors import UserError

_BUFFERS, _NOT_PERSISTENT = "_buffers", "_non_persistent_buffers_set"
_OF_TORCH = frozenset(vars(nn.Module())) - {_BUFFERS, _NOT_PERSISTENT}
_CONTAINERS = frozenset([list, set, dict, deque, OrderedDict, defaultdict, Counter])
_PLAIN = frozenset([bool, int, float, complex, str, bytes, type(None)])
_HOLDS_NOTHING = (type, FunctionType, ModuleType, nn.Module, Tensor)
"""Whose own state no forward is expected to change, or is looked at elsewhere."""

ABSENT: Any = type("Absent", (), {"__slots__": ()})()
"""In place of the value of an entry that is not there."""

Entry = tuple[dict[str, Any], str]
"""A dictionary, such as the attributes or the buffers of a module, and a name in it."""


def entry_of(module: nn.Module, name: str) -> Entry:
    """The entry of a buffer, or else of an attribute."""
    return (module._buffers, name) if name in module._buffers else (module.__dict__, name)


def is_plain(value: Any) -> bool:
    """Whether it is a number, a text, or nothing."""
    return type(value) in _PLAIN


class State:
    """Values of entries at a moment, with all that lists, dictionaries, sets, deques and tuples among them hold.

    It refers to all values, and copies none. copyable: the tensors and arrays among them, by their ids; but for those
    with a gradient, which belong to one forward.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = [(owner, name, owner.get(name, ABSENT)) for owner, name in entries]
        self.contents: dict[int, tuple[Any, Any]] = {}
        """Each container, by its id, with a shallow copy."""
        self.copyable: dict[int, Any] = {}
        self.others: dict[int, Any] = {}
        """Objects of any other kind."""
        waiting = [value for _, _, value in self.entries]
        while waiting:
            value = waiting.pop()
            kind = type(value)
            if kind in _PLAIN:
                continue
            if kind in _CONTAINERS:
                items = value.values() if isinstance(value, dict) else value
                # A list of parameters, as LSTMs have one, is kept up to date by whoever replaces these, such as fsdp.
                is_of_params = kind is list and any(isinstance(item, nn.Parameter) for item in items)
                if id(value) not in self.contents and not is_of_params:
                    self.contents[id(value)] = value, copy.copy(value)
                    waiting.extend(items)
            elif isinstance(value, tuple):
                waiting.extend(value)
            elif kind is np.ndarray or (kind is Tensor and not value.requires_grad):
                self.copyable[id(value)] = value
            else:
                self.others[id(value)] = value

    @property
    def has_graph(self) -> bool:
        """Whether a tensor within it belongs to the graph of a forward, as an activation that is to be looked at."""
        return any(isinstance(value, Tensor) and value.requires_grad for value in self.others.values())

    def copies(self) -> dict[int, Any]:
        """Copies of all that is copyable, by the id of the original."""
        return copied(self.copyable)

    def of_now(self) -> "State":
        """Values of the same entries now."""
        return State((owner, name) for owner, name, _ in self.entries)

    def write(self, instead: Mapping[int, Any] | None = None) -> None:
        """The entries hold again what they held. instead: other values in place of some, by the ids of these."""
        instead = instead or {}
        for container, content in self.contents.values():
            _fill(container, content, instead)
        for owner, name, value in self.entries:
            if value is ABSENT:
                owner.pop(name, None)
            else:
                owner[name] = _replaced(value, instead)

    def put_back(self, copies: Mapping[int, Any]) -> None:
        """The entries hold what they held, tensors and arrays with the content of these copies."""
        self.write()
        for key, value in copies.items():
            original = self.copyable[key]
            if isinstance(original, Tensor):
                original.data.copy_(value)  # unseen by autograd, whose backward may be under way
            else:
                original[...] = value


class WholeState(State):
    """All that a module and its submodules hold. What comes to it later `write` takes away again."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = [each for _, each in named_modules(module)]
        super().__init__((vars(each), name) for each in self._modules for name in _own_names(each))

    def write(self, instead: Mapping[int, Any] | None = None) -> None:
        before = {(id(owner), name) for owner, name, _ in self.entries}
        for attributes in map(vars, self._modules):
            for name in [name for name in attributes if name not in _OF_TORCH]:
                if (id(attributes), name) not in before:
                    del attributes[name]
        super().write(instead)


def named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Itself and its submodules by their paths, but for those of TorchScript, whose state is no Python object."""
    return [each for each in module.named_modules() if not isinstance(each[1], ScriptModule)]


def _own_names(module: nn.Module) -> list[str]:
    return [name for name in vars(module) if name not in _OF_TORCH]


def held_by(module: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The attributes and the buffers of a module and its submodules, each with a shallow copy: quicker than a state."""
    held = []
    for each in module.modules():
        if isinstance(each, ScriptModule):
            continue
        attributes, buffers = vars(each), each._buffers
        held.append((attributes, attributes.copy()))
        if buffers:
            held.append((buffers, buffers.copy()))
    return held


def is_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two dictionaries hold the same objects in the same order."""
    return len(one) == len(other) and all(map(is_, one.values(), other.values()))


def copied(values: Mapping[int, Any]) -> dict[int, Any]:
    """Copies of tensors and arrays."""
    return {key: value.detach().clone() if isinstance(value, Tensor) else value.copy() for key, value in values.items()}


def _fill(container: Any, content: Any, instead: Mapping[int, Any]) -> None:
    """Gives a container this content, and leaves one alone that has it."""
    if isinstance(container, set):
        if container != content:
            container.clear()
            container.update(content)
        return
    is_dict = isinstance(container, dict)
    values = [_replaced(value, instead) for value in (content.values() if is_dict else content)]
    names = [*content] if is_dict else []
    if is_dict and [*container] != names:
        container.clear()
    if is_dict:
        for name, value in zip(names, values, strict=True):
            container[name] = value
    elif len(container) != len(values) or any(map(is_not, container, values)):
        container.clear()
        container.extend(values)


def _replaced(value: Any, instead: Mapping[int, Any]) -> Any:
    if id(value) in instead:
        return instead[id(value)]
    if not isinstance(value, tuple):
        return value
    items = [_replaced(item, instead) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return value._make(items) if hasattr(value, "_make") else type(value)(items)


# --- forwards that leave no trace --------------------------------------------------------------------------------


class Change(NamedTuple):
    """A buffer or a plain attribute that is another one, or holds something else, than before.

    path: its name within the whole module. before, now: values, ABSENT where there is none; before is of the time
    before, also in its content. in_place: whether `now` is the same tensor. is_seen: whether all that changed can be
    put back; else it is within an object of an unknown kind.
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
    """Within it forwards change copies of what the module holds; after it the module holds what it held.

    What it yields tells what they have changed so far. Buffers of TorchScript get their content back.
    """
    scripted = _Scripted(module)
    state = WholeState(module)
    copies = state.copies()
    comparison = _Comparison(module, state, copies)
    state.write(copies)
    try:
        yield lambda: comparison.changes() + scripted.changes()
    finally:
        state.write()
        scripted.put_back()


class _Scripted:
    """The buffers in modules of TorchScript, with copies of them. Forwards cannot be given others to work on."""

    def __init__(self, module: nn.Module) -> None:
        self._found = [
            (path, each, name, buffer, buffer.clone())
            for path, each in module.named_modules()
            if isinstance(each, ScriptModule)
            for name, buffer in each.named_buffers(recurse=False)
        ]

    def changes(self) -> list[Change]:
        """Raises UserError for a buffer in the place of another one."""
        changed = []
        for path, module, name, buffer, copy_ in self._found:
            full = f"{path}.{name}" if path else name
            now = buffers_of(module)[name]
            if now is not buffer:
                raise UserError(f"{full}: a forward of TorchScript replaces this buffer; let it write into it in place")
            if not _is_same_content(buffer, copy_):
                persistent = name not in module._non_persistent_buffers_set
                changed.append(Change(module, full, name, True, persistent, buffer, now, in_place=True, is_seen=False))
        return changed

    def put_back(self) -> None:
        for _, module, name, buffer, copy_ in self._found:
            buffer.data.copy_(copy_)
            if buffers_of(module)[name] is not buffer:
                module._buffers[name] = buffer


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """Its own buffers, to be changed; of TorchScript, a dictionary of the tensors, whose content can be."""
    return dict(module._buffers.items()) if isinstance(module, ScriptModule) else module._buffers


class _Comparison:
    """Compares a module with a state, of which it was given these copies."""

    def __init__(self, module: nn.Module, state: State, copies: Mapping[int, Any]) -> None:
        self._state, self._copies = state, copies
        self._versions = {key: version_of(value) for key, value in copies.items()}
        self._before = []
        for path, each in named_modules(module):
            attributes = {name: vars(each)[name] for name in _own_names(each)}
            buffers, not_persistent = (state.contents[id(attributes.pop(n))][1] for n in (_BUFFERS, _NOT_PERSISTENT))
            self._before.append((path, each, attributes, buffers, not_persistent))
        self._views = {key: _view(value) for key, value in state.others.items()}
        self._unseen = False
        self._compared: set[int] = set()

    def changes(self) -> list[Change]:
        found = []
        for path, module, attributes, buffers, not_persistent in self._before:
            prefix = f"{path}." if path else ""
            own = {name: vars(module)[name] for name in _own_names(module) if name not in (_BUFFERS, _NOT_PERSISTENT)}
            for is_buffer, before, after in ((True, buffers, module._buffers), (False, attributes, own)):
                for name in dict.fromkeys([*before, *after]):
                    old, new = before.get(name, ABSENT), after.get(name, ABSENT)
                    self._unseen = False
                    self._compared.clear()
                    if self._is_same(old, new):
                        continue
                    persistent = is_buffer and name not in (not_persistent | module._non_persistent_buffers_set)
                    in_place = new is self._copies.get(id(old), ABSENT)
                    found.append(
                        Change(module, prefix + name, name, is_buffer, persistent, old, new, in_place, not self._unseen)
                    )
        return found

    def _is_same(self, before: Any, now: Any) -> bool:
        if id(before) in self._copies:
            is_written = version_of(self._copies[id(before)]) != self._versions[id(before)]
            return now is self._copies[id(before)] and not is_written and _is_same_content(before, now)
        if now is before and id(before) in self._state.contents:
            if id(before) in self._compared:
                return True
            self._compared.add(id(before))
            return self._has_same_members(self._state.contents[id(before)][1], now)
        if isinstance(before, tuple) and type(before) is type(now):
            return len(before) == len(now) and all(map(self._is_same, before, now))
        if now is before:
            is_same = id(before) not in self._views or self._views[id(before)] == _view(before)
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
    """Whether a copy has the bits of its original, where these can be read."""
    if not isinstance(copy_, Tensor):
        return bool(original.tobytes() == copy_.tobytes())
    both = original.detach(), copy_.detach()
    if original.layout != torch.strided or original.is_quantized or original.is_meta or original.is_nested:
        return True
    if copy_.numel() == 0:  # of strides that no view of other types accepts
        return original.shape == copy_.shape
    return torch.equal(*(each.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for each in both))


def version_of(value: Any) -> int:
    """How often a tensor was written into."""
    return value._version if type(value) is Tensor and not value.is_inference() else 0


def _view(value: Any) -> Any:
    """The visible state of an object of any kind, to be compared: its attributes, or how far a generator has come."""
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, _HOLDS_NOTHING) or not hasattr(value, "__dict__"):
        return None
    return _Attributes(value)


class _Attributes:
    """Attributes of an object at a moment, without their own. One that appears later may be a cache, and is ignored."""

    def __init__(self, value: Any) -> None:
        self.held = {name: (item, version_of(item)) for name, item in vars(value).items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Attributes) and all(
            name in other.held and _is_same_value(self.held[name], other.held[name]) for name in self.held
        )

    __hash__ = None  # type: ignore[assignment]


def _is_same_value(one: tuple[Any, int], other: tuple[Any, int]) -> bool:
    is_same = one[0] is other[0] or (is_plain(one[0]) and is_plain(other[0]) and bool(one[0] == other[0]))
    return is_same and one[1] == other[1]


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that a checkpoint has, by their names; a buffer of several names is there once."""
    names = {
        f"{path}.{name}" if path else name
        for path, each in module.named_modules()
        for name in each._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in module.named_buffers() if name not in names}
