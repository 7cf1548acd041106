"""Whether a state can be read again once it is written; asked before anything is."""

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.format import schema_error_of_checkpoint
from trainer.checkpoint.schema import brief, by_name, dense_tensor, first_schema_error
from trainer.checkpoint.snapshot import with_tensors_replaced
from trainer.common.errors import reason


def error_of_saving(state: Mapping[str, Any], resumable: bool = True) -> str | None:
    """Why a state would be refused when it is read again, by the name of an entry; None for nothing.

    resumable: it is to have all entries; otherwise those that are there count.

    The reader itself says it, of the state without the content of its tensors, and then `schema_error_of_checkpoint`.
    """
    return _unreadable(state) or schema_error_of_checkpoint(state, resumable)


def error_of_model(weights: Mapping[str, Any]) -> str | None:
    """Why the state dict of a model would be refused when it is read again, or None. weights: values of any kind."""
    return _unreadable(weights) or first_schema_error([by_name(dense_tensor)], weights)


def _unreadable(state: Mapping[str, Any]) -> str | None:
    name = ""
    value: Any = meta_state_of(state)
    if _error_of_reading(value) is None:
        return None
    while isinstance(value, dict | list | tuple):
        named = {f".{key}": item for key, item in value.items()} if isinstance(value, dict) else {}
        parts = named or {f"[{index}]": item for index, item in enumerate(value)}
        refused = next((part for part, item in parts.items() if _error_of_reading(item) is not None), None)
        if refused is None:
            break  # it is a name in a mapping, or the container itself
        name, value = name + refused, parts[refused]
    kind = type(value)
    whose = f"{kind.__module__}.{kind.__qualname__}"
    return f"{name.lstrip('.')} {brief(value)}: is of type {whose}, which no file brings back"


def meta_state_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with an empty tensor in the place of each that is an ordinary one, on whatever device."""
    empty: dict[torch.dtype, Tensor] = {}

    def outlined(value: Tensor) -> Tensor:
        is_ordinary = type(value) in (Tensor, torch.nn.Parameter) or hasattr(value, "to_local")  # or a part of one
        if not is_ordinary or value.is_meta or value.is_nested or value.is_quantized or value.layout != torch.strided:
            return value
        return empty.setdefault(value.dtype, torch.empty(0, dtype=value.dtype))

    outline: dict[str, Any] = with_tensors_replaced(state, outlined)
    return outline


def _error_of_reading(value: Any) -> str | None:
    file = BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # whatever a class does that is asked to be stored
        return reason(error)
    return None
