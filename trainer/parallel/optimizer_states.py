"""States of optimizers: what a checkpoint holds of them, and what an optimizer takes of a checkpoint."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trainer.common.errors import BadInput
from trainer.parallel.parts import is_sharded

TORCH_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.SparseAdam)
OF_A_PARAMETER = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}
"""What these keep in the shape of a parameter."""

CHANGED = "changed"
"""Of a group in a checkpoint: the settings that its optimizer has changed itself, which are a part of its state."""

_initial: "WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, Any]]]" = WeakKeyDictionary()


def remember_settings(optimizer: torch.optim.Optimizer) -> None:
    """Before the first step: those of each group, to be compared with what becomes of them."""
    _initial[optimizer] = [deepcopy(_settings(group)) for group in optimizer.param_groups]


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its `state_dict`, with `CHANGED` in the groups where there are such settings."""
    state = optimizer.state_dict()
    for group, before in zip(state["param_groups"], _initial.get(optimizer, ()), strict=False):
        changed = [
            name for name, value in _settings(group).items() if name not in before or not _same(value, before[name])
        ]
        if changed:
            group[CHANGED] = changed
    return state


def with_settings_of(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state in a checkpoint, but weight decay and the like from this command line."""
    kept = (
        {name: group[name] for name in ("params", "lr", *group.get(CHANGED, ()))} for group in saved["param_groups"]
    )
    groups = [settings | its for settings, its in zip(own["param_groups"], kept, strict=True)]
    return {**saved, "param_groups": groups}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Without the rate, which the schedule sets."""
    return {name: value for name, value in group.items() if name not in ("params", "lr")}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def refuse_other_shapes(phase: str, saved: Mapping[int, Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Raises BadInput for moments of torch's own optimizers in another shape than their parameter's: it takes any."""
    if not isinstance(optimizer, TORCH_OPTIMIZERS):
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, kept in saved.items():
        for name in OF_A_PARAMETER & kept.keys():
            if number < len(parameters) and kept[name].shape != parameters[number].shape:
                raise BadInput(
                    f"optimizers.{phase}.state.{number}.{name} of the checkpoint has shape {tuple(kept[name].shape)}, "
                    "which is not that of its parameter; start over with --fresh, or begin with the weights alone: "
                    "--init-from, in another --save-dir"
                )


def lay_out_as_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Fused optimizers go through parameter and moments by their place in memory: both are to have the same strides."""
    moments = {key: kept for key, kept in optimizer.state.items() if isinstance(key, Tensor) and not is_sharded(key)}
    for parameter, kept in moments.items():
        for name, value in kept.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                kept[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def sizes(optimizers: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Of each optimizer's state: how many parameters are in each of its groups."""
    return [[len(group["params"]) for group in state["param_groups"]] for state in optimizers]
