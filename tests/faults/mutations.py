"""Seeded changes of one value of a checkpoint, or of a JSON file of a run directory."""

import copy
import random
from typing import Any

import torch
from torch import Tensor

TEXTS = ("", "text", "../../x", "1", "\x00", "\udc80", "ä" * 50)
NUMBERS = (0, 1, -1, -5, 2, 10**9, 10**18, 2**63, 10**400, 10**5000, 0.5, -0.5, 1e308, float("inf"), float("nan"))
OTHERS = (None, True, False, [], {}, [1], {"a": 1}, (1, 2))


def changed(draw: random.Random, content: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the content with one value changed or removed, and a description of the change."""
    content = copy.deepcopy(content)
    places = _places(content, draw.choice(sorted(content)))
    node, key, path = draw.choice(places)
    before = node[key]
    action = draw.random()
    if action < 0.1 and isinstance(node, dict | list):
        del node[key]
        return content, f"{path} deleted"
    node[key] = _other_than(draw, before)
    return content, f"{path} {_shown(before)} -> {_shown(node[key])}"


def _places(content: Any, top: str) -> list[tuple[Any, Any, str]]:
    """Returns (container, key, path) of each value in one entry, so that `changed` does not prefer large entries."""
    found = [(content, top, top)]
    pending = [(content[top], top)]
    while pending:
        node, path = pending.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            found.append((node, key, f"{path}.{key}"))
            pending.append((value, f"{path}.{key}"))
    return found


def _other_than(draw: random.Random, value: Any) -> Any:
    while True:
        other = _other_tensor(draw, value) if isinstance(value, Tensor) else _other_value(draw, value)
        if type(other) is not type(value) or isinstance(other, Tensor) or repr_of(other) != repr_of(value):
            return other


def _other_value(draw: random.Random, value: Any) -> Any:
    if draw.random() < 0.4:
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return value + draw.choice([-1, 1, 12])
        if isinstance(value, float):
            return value * draw.choice([1 + 1e-9, 0.5, 2, -1]) + draw.choice([0, 1e-9])
        if isinstance(value, str) and value:
            place = draw.randrange(len(value))
            return value[:place] + draw.choice("0aZ-") + value[place + 1 :]
        if isinstance(value, list | tuple) and value:
            return type(value)([*value, value[0]])
    return draw.choice([*TEXTS, *NUMBERS, *OTHERS])


def _other_tensor(draw: random.Random, value: Tensor) -> Any:
    action = draw.choice(["element", "element", "poison", "dtype", "shape", "type"])
    flat = value.flatten().clone()
    if action in ("element", "poison") and len(flat) and flat.is_floating_point():
        place = draw.randrange(len(flat))
        poison = draw.choice([float("nan"), float("inf"), -float("inf")])
        flat[place] = poison if action == "poison" else flat[place] * 1.001 + 1e-3
        return flat.view(value.shape)
    if action == "dtype":
        return value.to(torch.float16 if value.dtype != torch.float16 else torch.float32)
    if action == "shape":
        return draw.choice([value[None], flat[:-1], torch.cat([flat, flat])])
    return draw.choice([1.0, None, "text", []])


def repr_of(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:
        return "an integer of thousands of digits"


def _shown(value: Any) -> str:
    return repr_of(value)[:80]
