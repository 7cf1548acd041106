"""What checkpoints, manifest.json and config.json hold: every entry with its type and range, and how they fit together.

The checksum that each of these files has of its own contents finds what is right in type and range, and yet not what
was saved. Whoever writes such a file by hand may leave it out.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.schema import (
    Kind,
    anything,
    brief,
    by_name,
    each,
    either,
    first_schema_error,
    number,
    optional,
    plain,
    record,
    tensor,
    tensor_of_numbers,
    text,
    truth,
    whole,
    wrong,
)  # fmt: skip

CHECKSUM = "checksum"
"""Of all other entries of a file."""
CHECKPOINT_NAME = r"checkpoint_\d+(_\d+_\d+(_\d+)?)?(_again\d+)?\.pth"
RUN_ID = "[0-9a-f]{12}"


# --- the entries -------------------------------------------------------------------------------------------------

_COUNT, _SIZE, _WEIGHTS = whole(), whole(at_least=1), by_name(tensor_of_numbers)

_POSITION = record(
    {"epoch": _COUNT, "phase": _COUNT, "samples": _COUNT, "turn": _COUNT, "others": each(each(_COUNT, length=2))},
    closed=True,
)
_GROUP = record({"params": each(_COUNT), "lr": either(number(at_least=0), tensor)}, {"changed": each(text())})
_OF_OPTIMIZER = record({"param_groups": each(_GROUP)}, {"state": record({})})


def _optimizer(name: str, value: Any) -> None:
    _OF_OPTIMIZER(name, value)
    anything(name, value)  # in entries of its own too


_CONFIG: Mapping[str, Kind] = {
    "--epochs": optional(_SIZE), "--max-steps": optional(_SIZE), "--seed": _COUNT,
    "--resume-from": optional(text()), "--optimizer": text(),
}  # fmt: skip
"""The flags that the trainer itself looks up again."""
_FACTS: Mapping[str, Kind] = {
    "task": text(),
    "config": record(_CONFIG),
    "lr_factor": number(above=0),
    "phase_sizes": each(_SIZE),
    "batch_sizes": each(_SIZE),
    "global_batch_sizes": each(_SIZE),
    "data_facts": by_name(plain),
    "environment": record({"world_size": _SIZE, "num_devices": _SIZE}),
    "code": record(
        {
            "commit": optional(text()), "changed": optional(truth), "task_file": optional(text()),
            "task_sha256": optional(text()),
        },
    ),
    "run_id": text(RUN_ID),
}  # fmt: skip
"""What a run is made with: both a checkpoint and config.json hold it."""

_PROGRESS: Mapping[str, Kind] = {
    "optimizers": by_name(each(_optimizer)),
    "scaler": either(
        record({}, closed=True),
        record(
            {
                "scale": number(above=0), "growth_factor": number(above=0), "backoff_factor": number(above=0),
                "growth_interval": _SIZE, "_growth_tracker": _COUNT,
            },
        ),
    ),
    "position": _POSITION,
    "step": _COUNT,
    "value": optional(number(finite=False)),
    "is_best": truth,
    "best": optional(record({"epoch": _COUNT, "step": _COUNT, "value": number(finite=False)}, closed=True)),
    "evaluations_since_best": _COUNT,
    "last_report": _COUNT,
    "train_seconds": number(at_least=0),
    "totals": by_name(by_name(tensor)),
    "reported": by_name(each(number(finite=False), length=2)),
    "covered_samples": _COUNT,
    "misses_samples": truth,
    "skipped_steps": _COUNT,
    "skipped_in_a_row": each(_COUNT, length=2),
}  # fmt: skip
"""How far the run has come."""
_IF_KNOWN: Mapping[str, Kind] = {"data_digest": text()}
"""A fact that not every task tells."""
_OF_AVERAGE: Mapping[str, Kind] = {"training_model": _WEIGHTS, "average_updates": by_name(_COUNT)}
"""Entries of runs whose `model` is an average of the weights."""
_OF_FORWARDS: Mapping[str, Kind] = {"other_buffers": by_name(tensor)}
"""Where forwards change buffers that are not persistent."""

RESUMABLE = (*_PROGRESS, *_FACTS)
"""Entries of a checkpoint without which a run cannot go on."""

ENTRY = record(
    {
        "file": text(CHECKPOINT_NAME), "epoch": _COUNT, "phase": _COUNT, "samples": _COUNT, "step": _COUNT,
        "value": optional(number(finite=False)), "best": truth, "bytes": _COUNT, "sha256": text("[0-9a-f]{64}"),
        "source": optional(text()),
    },
    closed=True,
)  # fmt: skip
"""Of manifest.json."""


# --- whole files -------------------------------------------------------------------------------------------------


def schema_error_of_checkpoint(state: Mapping[str, Any], resumable: bool) -> str | None:
    """What is wrong with a checkpoint, by the name of an entry; None for nothing.

    resumable: a run may go on from it; otherwise only entries that are there count.
    """
    core, others = {**_PROGRESS, **_FACTS}, {**_OF_AVERAGE, **_OF_FORWARDS, **_IF_KNOWN, CHECKSUM: text()}
    if resumable:
        fields = record({"model": _WEIGHTS, **core}, others)
    else:
        fields = record({"model": _WEIGHTS}, {**core, **others, "config": record({"--seed": _COUNT}, _CONFIG)})
    together = [_consistent_steps, _consistent_sizes, _position_in_plan] if resumable else []
    together += [_numbered_moments] if "optimizers" in state else []
    return first_schema_error((fields, *map(_of_state, together), _has_checksum(checksum_of)), state)


def schema_error_of_weights(weights: Mapping[str, Any]) -> str | None:
    """The first flaw of a state dict, or None."""
    return first_schema_error([_WEIGHTS], weights)


def is_as_written(state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint holds what a run has saved, by the checksum of its own contents."""
    return CHECKSUM in state and first_schema_error([_has_checksum(checksum_of)], state) is None


def schema_error_of_config(content: dict[str, Any]) -> str | None:
    """The same of config.json."""
    others = {**_IF_KNOWN, CHECKSUM: text(), "torchrun_agents": each(text()), "command_line": each(text())}
    fields = record(_FACTS, others)
    return first_schema_error((fields, _of_state(_consistent_sizes), _has_checksum(json_checksum)), content)


def schema_error_of_manifest(content: Any) -> str | None:
    """The same of manifest.json."""
    fields = record({"checkpoints": each(ENTRY)}, {CHECKSUM: text()})
    return first_schema_error((fields, _of_state(_one_entry_a_file), _has_checksum(json_checksum)), content)


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON is to hold, with its checksum."""
    return {**content, CHECKSUM: json_checksum(content)}


def json_checksum(content: Mapping[str, Any]) -> str:
    """Of all but the checksum itself. Tuples count as lists."""
    rest = {name: value for name, value in content.items() if name != CHECKSUM}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def checksum_of(state: Mapping[str, Any]) -> str:
    """The same of tensors and plain values: of types, shapes, names, and every bit."""
    found = hashlib.sha256()
    _sum_up({name: value for name, value in state.items() if name != CHECKSUM}, found.update)
    return found.hexdigest()


def _sum_up(value: Any, update: Callable[[Any], None]) -> None:
    if isinstance(value, Tensor):
        update(f"{value.dtype}{tuple(value.shape)}{value.layout}".encode())
        if value.layout == torch.sparse_coo:
            value = value.coalesce()
            parts = [value.indices(), value.values()]
        else:
            parts = [value]
        for part in parts:
            plain = part.detach().resolve_conj().resolve_neg()
            update(plain.contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        update(f"mapping of {len(value)}".encode())
        for name, item in value.items():
            update(f"{name!r}=".encode())
            _sum_up(item, update)
    elif isinstance(value, list | tuple):
        update(f"list of {len(value)}".encode())
        for item in value:
            _sum_up(item, update)
    else:
        update(f"{value!r};".encode())


# --- how they fit together ---------------------------------------------------------------------------------------


def _of_state(require: Callable[[Mapping[str, Any]], None]) -> Kind:
    return lambda name, value: require(value)


def _has_checksum(checksum: Callable[[Mapping[str, Any]], str]) -> Kind:
    def require(name: str, content: Any) -> None:
        if CHECKSUM in content and content[CHECKSUM] != checksum(content):
            raise ValueError("its contents are not those that were saved: their checksum is another one")

    return require


def _consistent_steps(state: Mapping[str, Any]) -> None:
    """Every epoch has a step at least, and nothing came later than the last one."""
    step, position, best = state["step"], state["position"], state["best"]
    _at_most("position.epoch", position["epoch"], step, "optimizer steps done")
    for name in ("last_report", "skipped_steps"):
        _at_most(name, state[name], step, "optimizer steps done")
    last_skipped, in_a_row = state["skipped_in_a_row"]
    _at_most("skipped_in_a_row", last_skipped, step, "optimizer steps done")
    _at_most("skipped_in_a_row", in_a_row, state["skipped_steps"], "steps skipped")
    evaluations = state["evaluations_since_best"]
    _at_most("evaluations_since_best", evaluations, 2 * (step + 1), "most evaluations that so many steps have")
    if best is not None:
        _at_most("best.epoch", best["epoch"], position["epoch"], "epochs done")
        _at_most("best.step", best["step"], step, "optimizer steps done")
        if best["value"] != best["value"]:
            raise wrong("best.value", best["value"], "must not be NaN")
    if state["is_best"] and (best is None or best["value"] != state["value"]):
        raise wrong("is_best", True, "contradicts best")


def _position_in_plan(state: Mapping[str, Any]) -> None:
    """The plan is that of the phases that the checkpoint names."""
    position, sizes = state["position"], state["phase_sizes"]
    others = position["others"]
    if position["phase"] >= len(sizes):
        raise wrong("position.phase", position["phase"], f"must be below {len(sizes)}, the number of phases")
    in_turns = bool(others) or position["turn"] > 0
    size = sizes[0 if in_turns else position["phase"]]
    _at_most("position.samples", position["samples"], size, "samples in an epoch of that phase")
    if others and len(others) != len(sizes) - 1:
        raise wrong("position.others", others, f"must have {len(sizes) - 1} pairs, one of each other phase")
    for other, size in zip(others, sizes[1:], strict=False):
        _at_most("position.others", other[1], size, "samples in an epoch of that phase")


def _consistent_sizes(facts: Mapping[str, Any]) -> None:
    """As many of each as there are phases."""
    num_phases = len(facts["phase_sizes"])
    if num_phases == 0:
        raise wrong("phase_sizes", facts["phase_sizes"], "must be of one phase at least")
    for name in ("batch_sizes", "global_batch_sizes"):
        if len(facts[name]) != num_phases:
            raise wrong(name, facts[name], f"must have {num_phases} values, one of each phase")


def _numbered_moments(state: Mapping[str, Any]) -> None:
    """Each optimizer numbers its parameters from 0 on, and keeps nothing of others.

    What it keeps of none of them has a name. Values are its own business: a NaN or a step of -1 may say "not yet".
    """
    trained = state.get("training_model", state["model"])
    if _shapes(trained) != _shapes(state["model"]):
        raise ValueError("training_model has other names or shapes than model")
    for phase, several in state["optimizers"].items():
        for index, own in enumerate(several):
            _require_numbered(f"optimizers.{phase}[{index}]", own)


def _require_numbered(name: str, own: Mapping[str, Any]) -> None:
    numbers = [parameter for group in own["param_groups"] for parameter in group["params"]]
    if numbers != list(range(len(numbers))):
        raise wrong(f"{name}.param_groups", numbers, f"must number its parameters from 0 to {len(numbers) - 1}")
    for parameter, kept in own.get("state", {}).items():
        if isinstance(parameter, str):
            continue
        its = f"{name}.state.{brief(parameter)}"
        if type(parameter) is not int or not 0 <= parameter < len(numbers):
            raise ValueError(f"{its}: is none of its {len(numbers)} parameters")
        record({})(its, kept)


def _one_entry_a_file(content: Mapping[str, Any]) -> None:
    files = [entry["file"] for entry in content["checkpoints"]]
    if len(set(files)) < len(files):
        raise ValueError("checkpoints: names a file twice")


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def _at_most(name: str, value: int, limit: int, of_what: str) -> None:
    if value > limit:
        raise wrong(name, value, f"must be at most {limit}, the {of_what}")
