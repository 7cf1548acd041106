"""Converts optimizer states for a checkpoint, and loads them from a checkpoint."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from trainer.common.errors import UserError, reason
from trainer.common.tensors import is_sharded, map_tensors
from trainer.flags import OPTIMIZERS, OptimizerFacts

CHANGED = "changed"
"""Key in a saved parameter group; the value lists the names of the settings that changed during training."""

_initial: "WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, Any]]]" = WeakKeyDictionary()


def facts_of(optimizer: torch.optim.Optimizer) -> OptimizerFacts | None:
    """Returns the facts about the class in OPTIMIZERS that an optimizer belongs to, or None for other optimizers."""
    return next((facts for facts in OPTIMIZERS.values() if isinstance(optimizer, facts.type)), None)


def remember_settings(optimizer: torch.optim.Optimizer) -> None:
    """Records the settings of each parameter group before the first step, to detect later changes."""
    _initial[optimizer] = [deepcopy(_settings(group)) for group in optimizer.param_groups]


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns an optimizer's `state_dict()`, encoded for a checkpoint; `CHANGED` in a group lists its changed settings.

    Omits unchanged settings that a checkpoint cannot store; a resumed run takes them from its new optimizer.
    """
    state = {**optimizer.state_dict(), _TYPE: type(optimizer).__name__}
    if "param_groups" in state:
        before = _initial.get(optimizer, [None] * len(state["param_groups"]))
        state["param_groups"] = [_kept(*pair) for pair in zip(state["param_groups"], before, strict=False)]
    if isinstance(state.get("state"), dict):
        state["state"] = {
            key: {name: encoded(value) for name, value in kept.items()} if isinstance(kept, dict) else encoded(kept)
            for key, kept in state["state"].items()
        }
    return {name: value if name == "state" else encoded(value) for name, value in state.items()}


def _kept(group: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Selects the entries of a parameter group to save. before: the group's initial settings, if recorded."""
    settings, known = _settings(group), before or {}
    changed = [
        name
        for name, value in settings.items()
        if before is not None and (name not in known or not _same(value, known[name]))
    ]
    kept = {name: value for name, value in group.items() if name not in settings or name in changed or _is_plain(value)}
    if isinstance(group.get("lr"), np.generic):  # a task's `lr_factor` may return a NumPy number
        kept["lr"] = group["lr"].item()
    return kept | ({CHANGED: changed} if changed else {})


def load_states(
    phase: str,
    optimizers: Sequence[torch.optim.Optimizer],
    saved: Sequence[Mapping[str, Any]],
    own_optimizer_state: Callable[[dict[str, Any], torch.optim.Optimizer], dict[str, Any]],
    dtype: torch.dtype,
) -> None:
    """Loads the saved states of a phase's optimizers. Raises UserError if a state does not fit its optimizer.

    saved: results of `state_of`. own_optimizer_state: selects this process's shards of a state. dtype: dtype of the
    parameters when the states were saved.
    """
    own = [optimizer.state_dict() for optimizer in optimizers]
    types = [type(optimizer).__name__ for optimizer in optimizers]
    before = [state.get(_TYPE) for state in saved]
    if before != types and None not in before:  # earlier versions saved no types
        raise UserError(
            f"the optimizers of phase {phase!r} are {', '.join(types)}, but the checkpoint was trained with "
            f"{', '.join(map(str, before))}; use the same optimizers, or load only the checkpoint's weights, with "
            "--init-from and another --save-dir"
        )
    if _sizes(saved) != _sizes(own):
        raise UserError(
            f"the optimizers of phase {phase!r} have parameter groups of {_sizes(own)} tensors, but "
            f"the checkpoint's have {_sizes(saved)}; undo the change to the optimizers or their groups, or load "
            "only the checkpoint's weights with --init-from"
        )
    for optimizer, its_saved, its_own in zip(optimizers, saved, own, strict=True):
        _refuse_other_entries(phase, its_saved, its_own, optimizer)
        moments = own_optimizer_state(_with_settings_of(its_own, its_saved), optimizer)
        try:
            _load_state(optimizer, moments, dtype)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"the {type(optimizer).__name__} of phase {phase!r} cannot load its state from the checkpoint: "
                f"{reason(error)}; undo the change to the optimizers, or load only the "
                "checkpoint's weights with --init-from"
            ) from None
        _lay_out_as_parameters(optimizer)


def _with_settings_of(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a saved state with the current settings, except for the learning rate and those named in `CHANGED`."""
    kept = (
        {name: group[name] for name in ("params", "lr", *group.get(CHANGED, ()))} for group in saved["param_groups"]
    )
    groups = [settings | its for settings, its in zip(own["param_groups"], kept, strict=True)]
    return {**{name: value for name, value in saved.items() if name != _TYPE}, "param_groups": groups}


def _load_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Loads a result of `state_of`. dtype: as in `load_states`.

    `Optimizer.load_state_dict` loads tensors and numbers, but corrupts other values of a parameter's state: a string
    becomes a generator, and a deque loses its maximum length. This function therefore restores other values itself.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    loaded: dict[str, Any] = {name: decoded(value) for name, value in state.items() if name != "state"}
    if "state" in state:
        loaded["state"] = {key: decoded(kept) for key, kept in state["state"].items() if type(key) is not int}
    later: list[tuple[Tensor, str, Any]] = []
    for number, kept in state.get("state", {}).items():
        if type(number) is int:
            odd = [name for name, value in kept.items() if not _is_loaded_by_torch(value)]
            loaded["state"][number] = {name: value for name, value in kept.items() if name not in odd}
            later += [(parameters[number], name, kept[name]) for name in odd]
    optimizer.load_state_dict(loaded)
    _keep_types(optimizer, loaded.get("state", {}), dtype)
    for parameter, name, value in later:
        on_device = map_tensors(value, partial(Tensor.to, device=parameter.device))
        optimizer.state[parameter][name] = decoded(on_device)


def _keep_types(optimizer: torch.optim.Optimizer, state: Mapping[Any, Any], dtype: torch.dtype) -> None:
    """Restores the dtypes of state tensors that `load_state_dict` converted to the dtype of their parameter.

    dtype: dtype of the parameters when the state was saved. Tensors of this dtype are converted to the current dtype of
    the parameters. Other tensors, such as counters, masks and moments in another precision, keep their own dtype.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, kept in state.items():
        own = optimizer.state.get(parameters[number], {}) if type(number) is int else {}
        for name, value in kept.items() if own else ():
            if isinstance(value, Tensor) and name in own and value.dtype not in (dtype, own[name].dtype):
                own[name] = value.to(own[name].device)


# --- containers --------------------------------------------------------------------------------------------------

_TYPE = "__type__"
"""Key of the type name in a saved optimizer state, and in a mapping that encodes another container type."""
_MAPPINGS = {"OrderedDict": OrderedDict, "Counter": Counter}
_FACTORIES = {kind.__name__: kind for kind in (bool, int, float, str, list, dict, set)} | {"None": None}
_SETS = {"set": set, "frozenset": frozenset}
_LEAVES = (bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device, type(None))


def encoded(value: Any) -> Any:
    """Encodes containers and NumPy values as mappings, lists and tensors, which load without executing code.

    `decoded` reverses the encoding. Returns other values unchanged, even if a checkpoint cannot store them.
    """
    kind = type(value)
    if kind in (list, tuple):
        return kind(map(encoded, value))
    if kind is dict:
        return {name: encoded(item) for name, item in value.items()}
    if kind in _MAPPINGS.values():
        return {_TYPE: kind.__name__, "items": encoded(dict(value))}
    if kind is defaultdict and value.default_factory in _FACTORIES.values():
        factory = next(name for name, made in _FACTORIES.items() if made is value.default_factory)
        return {_TYPE: "defaultdict", "items": encoded(dict(value)), "factory": factory}
    if kind in _SETS.values():
        return {_TYPE: kind.__name__, "items": encoded(sorted(value, key=repr))}  # sets are unordered
    if kind is deque:
        return {_TYPE: "deque", "items": encoded(list(value)), "maxlen": value.maxlen}
    if kind is np.ndarray or isinstance(value, np.generic):
        with suppress(TypeError):  # raised for arrays of strings, objects and dates
            return {
                _TYPE: "number" if isinstance(value, np.generic) else "array",
                "items": torch.from_numpy(np.array(value)),
            }
    return value


def decoded(value: Any) -> Any:
    """Reverses `encoded`. All processes must call this function, because each may hold a shard of an array."""
    if type(value) in (list, tuple):
        return type(value)(map(decoded, value))
    if type(value) is not dict:
        return value
    if _TYPE not in value:
        return {name: decoded(item) for name, item in value.items()}
    kind, items = value[_TYPE], value["items"]
    if kind in ("number", "array"):
        array = (items.full_tensor() if is_sharded(items) else items).cpu().numpy().copy()
        return array[()] if kind == "number" else array
    items = decoded(items)
    if kind == "deque":
        return deque(items, value["maxlen"])
    if kind == "defaultdict":
        return defaultdict(_FACTORIES[value["factory"]], items)
    return {**_MAPPINGS, **_SETS}[kind](items)


def _is_plain(value: Any) -> bool:
    """Returns whether a checkpoint can store the value."""
    value = encoded(value)
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    return all(map(_is_plain, value)) if type(value) in (list, tuple) else type(value) in (*_LEAVES, Tensor)


def _is_loaded_by_torch(value: Any) -> bool:
    """Returns whether `Optimizer.load_state_dict` keeps an encoded value intact."""
    if type(value) is dict:
        return _TYPE not in value and all(map(_is_loaded_by_torch, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_loaded_by_torch, value))
    return isinstance(value, Tensor | bool | int | float | complex | None)


# --- settings ----------------------------------------------------------------------------------------------------


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a parameter group, without the learning rate, which the schedule sets."""
    return {name: value for name, value in group.items() if name not in ("params", "lr")}


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    try:
        return bool(np.all(one == other))
    except (RuntimeError, ValueError):  # lists of tensors, or arrays of different shapes, count as changed
        return False


def _refuse_other_entries(
    phase: str, saved: Mapping[str, Any], own: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> None:
    """Raises UserError if a saved state does not fit an optimizer.

    own: the optimizer's current `state_dict()`. For OPTIMIZERS, state tensors must have the shape of their parameter,
    and all parameters of a group must have the same entries; otherwise the first step after a resume would fail.
    """
    advice = "start over with --fresh, or load only the checkpoint's weights with --init-from in another --save-dir"
    missing = [name for name in own if name not in saved]
    if missing:
        raise UserError(
            f"the optimizer {type(optimizer).__name__} of phase {phase!r} keeps {missing[0]!r}, which the checkpoint "
            f"does not have; undo the change to the optimizers, {advice}"
        )
    state, facts = saved.get("state", {}), facts_of(optimizer)
    if facts is None:
        return
    for group in own["param_groups"]:
        its = [state[number] for number in group["params"] if number in state]
        known = [kept for kept in its if kept.keys() & facts.state.keys()]  # of a derived class, maybe none
        for entry, setting in facts.state.items():
            if setting is not None and group.get(setting) and any(entry not in kept for kept in known):
                raise UserError(
                    f"{type(optimizer).__name__} of phase {phase!r} has {setting}={group[setting]}, but the checkpoint "
                    f"was trained without this setting; undo the change, {advice}"
                )
        if any(kept.keys() != its[0].keys() for kept in its):
            raise UserError(
                f"optimizers.{phase} of the checkpoint has different entries for parameters of the same group; {advice}"
            )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, kept in state.items():
        for name in facts.state.keys() & kept.keys() if type(number) is int else ():
            value = kept[name]
            if value is None:  # SGD before its first step
                continue
            is_dense = isinstance(value, Tensor) and value.layout == torch.strided
            found = f"has shape {tuple(value.shape)}, unlike its parameter" if is_dense else "is not a dense tensor"
            if not is_dense or value.shape != parameters[number].shape:
                raise UserError(f"optimizers.{phase}.state.{number}.{name} of the checkpoint {found}; {advice}")


def _lay_out_as_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Gives state tensors the strides of their parameter, because fused optimizers traverse both in memory order."""
    moments = {key: kept for key, kept in optimizer.state.items() if isinstance(key, Tensor) and not is_sharded(key)}
    for parameter, kept in moments.items():
        for name, value in kept.items():
            is_like = isinstance(value, Tensor) and value.layout == torch.strided and value.shape == parameter.shape
            if is_like and value.stride() != parameter.stride():
                kept[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _sizes(optimizers: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    return [[len(group["params"]) for group in state.get("param_groups", ())] for state in optimizers]
