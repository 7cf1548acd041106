"""Schema of checkpoints, manifest.json and config.json: declares each entry once, with its type and range."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.loading.order import Position

FORMAT_VERSION = 4
"""Format version of checkpoints that this trainer writes; files of version 1 have no entry `format_version`.

Increment the version when an entry is added or changes its meaning. Older trainers then reject newer files, and entries
that older files lack get a default (`Saved.since`).
"""
RUN_ID = "[0-9a-f]{12}"

# --- kinds -----------------------------------------------------------------------------------------------------

Kind = Callable[[str, Any], None]
"""Validates an entry, given its name and value. Raises ValueError with the name, the value and the requirement."""

MOST_SHOWN = 60
"""Largest number of characters of a value that a message shows."""


def integer(at_least: int = 0, at_most: int = 2**63 - 1) -> Kind:
    """Requires an integer between two limits; by default non-negative and within int64."""

    def require(name: str, value: Any) -> None:
        limits = f"at least {at_least}" if at_most == 2**63 - 1 else f"from {at_least} to {at_most}"
        if type(value) is not int or not at_least <= value <= at_most:
            raise wrong(name, value, f"must be a whole number, {limits}")

    return require


def number(at_least: float = -math.inf, above: float = -math.inf, finite: bool = True) -> Kind:
    """Requires a number. finite: whether to reject NaN, infinity and numbers outside the limits."""

    def require(name: str, value: Any) -> None:
        if type(value) not in (int, float):
            raise wrong(name, value, "must be a number")
        if finite and not (abs(value) < 2.0**1023 and value >= at_least and value > above):  # False for NaN
            limits = [f"at least {at_least:g}"] * (at_least > -math.inf) + [f"above {above:g}"] * (above > -math.inf)
            raise wrong(name, value, ", ".join(["must be a finite number", *limits]))

    return require


def text(pattern: str = "(?s).*") -> Kind:
    """Requires a string. pattern: regular expression that must match the whole string."""

    def require(name: str, value: Any) -> None:
        if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
            raise wrong(name, value, "must be text" if pattern == "(?s).*" else f"must be text like {pattern}")

    return require


def truth(name: str, value: Any) -> None:
    """Requires True or False."""
    if not isinstance(value, bool):
        raise wrong(name, value, "must be true or false")


def optional(kind: Kind) -> Kind:
    """Requires None or a value that satisfies `kind`."""
    return lambda name, value: kind(name, value) if value is not None else None


def either(*kinds: Kind) -> Kind:
    """Requires a value that satisfies one of `kinds`; otherwise raises the first kind's error."""

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
    """Requires a list or tuple whose items satisfy `kind`. length: number of items; None: any number."""

    def require(name: str, value: Any) -> None:
        if not isinstance(value, list | tuple) or length not in (None, len(value)):
            raise wrong(name, value, "must be a list" if length is None else f"must be a list of {length} values")
        for index, item in enumerate(value):
            kind(f"{name}[{index}]", item)

    return require


def by_name(kind: Kind) -> Kind:
    """Requires a mapping with string keys, whose values satisfy `kind`."""

    def require(name: str, value: Any) -> None:
        for key, item in _mapping(name, value).items():
            if not isinstance(key, str):
                raise wrong(name, key, "has a key that is not a string")
            kind(f"{name}.{key}" if name else key, item)

    return require


def record(needed: Mapping[str, Kind], others: Mapping[str, Kind] | None = None, closed: bool = False) -> Kind:
    """Requires a mapping. needed, others: required and optional entries. closed: whether to reject unknown entries."""
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
                raise ValueError(f"{path}{key if isinstance(key, str) else brief(key)} is not a known entry")

    return require


def plain(name: str, value: Any) -> None:
    """Requires a plain value: None, a bool, number or string, or a list, tuple or dict of plain values."""
    if isinstance(value, list | tuple):
        each(plain)(name, value)
    elif isinstance(value, dict):
        for key, item in value.items():
            if type(key) not in (str, int):
                raise wrong(name, key, "has a key that is neither a string nor an integer")
            plain(f"{name}.{brief(key) if type(key) is int else key}", item)
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise wrong(name, value, "must be a number, a string, None, or a list or dict of these")


def anything(name: str, value: Any) -> None:
    """Accepts any value whose tensors can be saved and loaded."""
    if isinstance(value, Tensor):
        tensor(name, value)
    elif isinstance(value, dict):
        for key, item in value.items():
            anything(f"{name}.{key if isinstance(key, str) else brief(key)}", item)
    elif isinstance(value, list | tuple):
        each(anything)(name, value)


def tensor(name: str, value: Any) -> None:
    """Requires a tensor that can be saved: strided or sparse COO, and not on the meta device."""
    if not isinstance(value, Tensor):
        raise wrong(name, value, "must be a tensor")
    if value.is_meta:
        raise ValueError(f"{name} has no content: it is a tensor on the meta device")
    if value.is_nested or value.is_quantized:
        raise ValueError(f"{name} is a {'nested' if value.is_nested else 'quantized'} tensor, which cannot be saved")
    if value.layout not in (torch.strided, torch.sparse_coo):
        raise ValueError(f"{name} is a sparse tensor ({value.layout}), which cannot be saved")


def dense_tensor(name: str, value: Any) -> None:
    """Requires a dense tensor."""
    tensor(name, value)
    if value.layout != torch.strided:
        raise ValueError(f"{name} is a sparse tensor, but must be dense")


def tensor_of_numbers(name: str, value: Any) -> None:
    """Requires a dense tensor without NaN. Accepts infinities, since masks may contain them."""
    dense_tensor(name, value)
    real = _real(value)
    if real is not None and bool(real.sum().isnan()) and bool(real.isnan().any()):
        raise ValueError(f"{name} contains NaN")


def not_finite(tensors: Mapping[str, Tensor], may_be_infinite: Container[str]) -> list[str]:
    """Returns the names of tensors that contain NaN or infinity. may_be_infinite: tensors that may contain infinity."""
    reals = {name: real for name, value in tensors.items() if (real := _real(value)) is not None}
    # a sum is faster than an element-wise check, which follows only if a sum is not finite
    is_finite = defaultdict(list)  # by device, since gathered shards are on the CPU and buffers on a GPU
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
    """Returns a dense tensor's values in a dtype that torch can sum; None for dtypes without NaN and infinity.

    Raises RuntimeError for four-bit dtypes.
    """
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if not value.is_floating_point():
        return None
    return value.float() if value.element_size() == 1 else value


def _mapping(name: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise wrong(name or "the content", value, "must be a mapping")
    return value


def wrong(name: str, value: Any, what: str) -> ValueError:
    """Builds the ValueError for an invalid entry. what: the requirement."""
    return ValueError(f"{name} {brief(value)}: {what}")


def brief(value: Any) -> str:
    """Returns a description of a value, shortened to about MOST_SHOWN characters."""
    if isinstance(value, Tensor):
        return f"of {value.dtype} {tuple(value.shape)}"
    if isinstance(value, str | bytes | bytearray):
        value = value[: MOST_SHOWN + 1]  # the rest would be cut off
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # huge integers, recursive lists
        return f"of type {type(value).__name__}"
    return shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}..."


def first_schema_error(kinds: Iterable[Kind], value: Any) -> str | None:
    """Returns the error of the first of `kinds` that rejects a value from a file; None if the value is valid."""
    try:
        for kind in kinds:
            kind("", value)
    except ValueError as error:
        return str(error)
    except (RecursionError, OverflowError, TypeError, AttributeError, RuntimeError):
        return "it is nested too deeply or contains invalid values"
    return None


# --- the entries of a checkpoint ----------------------------------------------------------------------------------

_COUNT, _SIZE, WEIGHTS = integer(), integer(at_least=1), by_name(tensor_of_numbers)


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Saved:
    """Declares an entry of a checkpoint, or of a mapping in a checkpoint.

    is_optional: the entry may be absent. since: first format version with the entry; older files get `default`.
    is_large: only rank 0 reads the tensors, and broadcasts each one when the model or optimizer loads it.
    name: name in the file if it differs from the field's name. read: converts the value in the file.
    """

    kind: Kind
    is_optional: bool = False
    since: int = 1
    default: Any = None
    is_large: bool = False
    name: str = ""
    read: Callable[[Any], Any] = _as_it_is


def saved(kind: Kind, default: Any = MISSING, *, make: Any = MISSING, **more: Any) -> Any:
    """Declares a dataclass field that checkpoints contain. make: default factory. more: other attributes of `Saved`."""
    value = default if make is MISSING else make()
    return field(
        default=default, default_factory=make, metadata={"saved": Saved(kind, default=_plain_entry(value), **more)}
    )


def saved_fields(kept: Any) -> dict[str, tuple[str, Saved]]:
    """Maps the entry names of a dataclass's `saved` fields to (field name, declaration)."""
    found = [(own.name, own.metadata["saved"]) for own in fields(kept) if "saved" in own.metadata]
    return {its.name or name: (name, its) for name, its in found}


def record_of_fields(kept: Any) -> Kind:
    """Requires a mapping with exactly the entries of a dataclass's `saved` fields."""
    return record({name: its.kind for name, (_, its) in saved_fields(kept).items()}, closed=True)


def _plain_entry(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


@dataclass
class Best:
    """Best validation score of a run so far.

    epoch, step: completed epochs and optimizer steps when the score was reached.
    """

    epoch: int = saved(_COUNT)
    value: float = saved(number(finite=False))
    step: int = saved(_COUNT)


_POSITION = record(
    {"epoch": _COUNT, "phase": _COUNT, "samples": _COUNT, "turn": _COUNT, "others": each(each(_COUNT, length=2))},
    closed=True,
)


@dataclass
class SavedProgress:
    """Progress of a run as stored in checkpoints.

    evaluations_since_best: for early stopping. last_report: completed optimizer steps at the last report of metrics,
    after an evaluation or epoch. train_seconds: seconds of training, evaluation and saving until the last call of
    `read_clock`, including earlier starts of the run. reported: each phase's totals of loss and weight at the last
    logged step; totals are sums over all processes since the last report. samples: number of samples in the totals.
    misses_samples: whether totals are incomplete because a process was lost. skipped_steps: optimizer steps skipped
    because a loss or gradient was not finite. skipped_in_a_row: the last skipped step, and the number of consecutive
    skipped steps up to it. rate_drops: how often `--schedule plateau` has lowered the learning rate. task_state: last
    result of `Task.after_validation`. scores: metrics of the best or, without validation, last report.
    """

    position: Position = saved(_POSITION, Position(), read=lambda value: Position(**value))
    step: int = saved(_COUNT, 0)
    best: Best | None = saved(
        optional(record_of_fields(Best)), None, read=lambda value: Best(**value) if value else None
    )
    evaluations_since_best: int = saved(_COUNT, 0)
    last_report: int = saved(_COUNT, 0)
    train_seconds: float = saved(number(at_least=0), 0.0)
    reported: dict[str, tuple[float, float]] = saved(by_name(each(number(finite=False), length=2)), make=dict)
    samples: int = saved(_COUNT, 0, name="covered_samples")
    misses_samples: bool = saved(truth, False)
    skipped_steps: int = saved(_COUNT, 0)
    skipped_in_a_row: tuple[int, int] = saved(each(_COUNT, length=2), (0, 0), read=tuple)
    rate_drops: int = saved(_COUNT, 0, since=3)
    task_state: dict[str, Any] = saved(by_name(plain), make=dict, since=3)
    scores: dict[str, float] = saved(by_name(number(finite=False)), make=dict, since=4)

    def entries(self) -> dict[str, Any]:
        return {entry: _plain_entry(getattr(self, name)) for entry, (name, _) in saved_fields(self).items()}


def read_progress(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `SavedProgress` from a loaded checkpoint."""
    return {name: its.read(state[entry]) for entry, (name, its) in saved_fields(SavedProgress).items()}


def _optimizer(name: str, value: Any) -> None:
    """Requires an optimizer's state dict with parameters numbered from 0, and state for these parameters only.

    State with a string key belongs to no parameter. Values are not checked: NaN or a step of -1 may mean "not yet set".
    """
    _OF_OPTIMIZER(name, value)
    anything(name, value)  # also checks tensors in custom entries
    numbers = [parameter for group in value["param_groups"] for parameter in group["params"]]
    if numbers != list(range(len(numbers))):
        raise wrong(f"{name}.param_groups", numbers, f"must number its parameters from 0 to {len(numbers) - 1}")
    for parameter, kept in value.get("state", {}).items():
        its = f"{name}.state.{brief(parameter)}"
        if isinstance(parameter, str):
            continue
        if type(parameter) is not int or not 0 <= parameter < len(numbers):
            raise ValueError(f"{its}: is not one of the optimizer's {len(numbers)} parameters")
        record({})(its, kept)


_GROUP = record({"params": each(_COUNT), "lr": either(number(at_least=0), tensor)}, {"changed": each(text())})
_OF_OPTIMIZER = record({"param_groups": each(_GROUP)}, {"state": record({})})
_SCALER = record(
    {
        "scale": number(above=0), "growth_factor": number(above=0), "backoff_factor": number(above=0),
        "growth_interval": _SIZE, "_growth_tracker": _COUNT,
    },
)  # fmt: skip
_CONFIG: Mapping[str, Kind] = {
    "--epochs": optional(_SIZE), "--max-steps": optional(_SIZE), "--seed": _COUNT,
    "--resume-from": optional(text()), "--optimizer": text(), "--dtype": text("float32|float64"), "--drop-last": truth,
}  # fmt: skip
"""Validators of the flags in a checkpoint whose values the trainer itself uses."""
_CODE = {
    "commit": optional(text()), "changed": optional(truth), "task_file": optional(text()),
    "task_sha256": optional(text()),
}  # fmt: skip

FACTS: Mapping[str, Saved] = {
    "task": Saved(text()),
    "config": Saved(record(_CONFIG)),
    "lr_factor": Saved(number(above=0)),
    "phase_sizes": Saved(each(_SIZE)),
    "batch_sizes": Saved(each(_SIZE)),
    "global_batch_sizes": Saved(each(_SIZE)),
    "data_facts": Saved(by_name(plain)),
    "data_digest": Saved(text(), is_optional=True),
    "environment": Saved(record({"world_size": _SIZE, "num_devices": _SIZE})),
    "code": Saved(record(_CODE)),
    "helpers": Saved(by_name(text()), is_optional=True),
    "run_id": Saved(text(RUN_ID)),
}
"""Entries about a run's task, settings, data and code, in checkpoints and config.json."""

ENTRIES: Mapping[str, Saved] = {
    "model": Saved(WEIGHTS, is_large=True),
    "training_model": Saved(WEIGHTS, is_optional=True, is_large=True),
    "average_updates": Saved(by_name(_COUNT), is_optional=True),
    "other_buffers": Saved(by_name(tensor), is_optional=True),
    "optimizers": Saved(by_name(each(_optimizer)), is_large=True),
    "scaler": Saved(either(record({}, closed=True), _SCALER)),
    "streams": Saved(
        by_name(record({"epoch": _COUNT, "position": _COUNT, "state": plain}, closed=True)), is_optional=True
    ),
    "totals": Saved(by_name(by_name(tensor))),
    "totals_of_parts": Saved(by_name(by_name(tensor)), is_optional=True),
    "value": Saved(optional(number(finite=False))),
    "is_best": Saved(truth),
    **{entry: its for entry, (_, its) in saved_fields(SavedProgress).items()},
    **FACTS,
}
"""All entries of a checkpoint except `format_version`."""
LARGE = tuple(name for name, entry in ENTRIES.items() if entry.is_large)


# --- whole files -------------------------------------------------------------------------------------------------


def brought_up_to_date(state: Mapping[str, Any], entries: Mapping[str, Saved] = ENTRIES) -> dict[str, Any]:
    """Upgrades a checkpoint to the current format version. Raises ValueError for an invalid version."""
    version = state.get("format_version", 1)
    integer(at_least=1)("format_version", version)
    lacking = {name: its.default for name, its in entries.items() if name not in state and version < its.since}
    held = {name: value for name, value in state.items() if name != "checksum"}  # only version 1 has this entry
    return {**held, **lacking, "format_version": max(version, FORMAT_VERSION)}


def schema_error_of_checkpoint(state: Mapping[str, Any], resumable: bool) -> str | None:
    """Returns a checkpoint's first schema error, with the entry's name; None if the checkpoint is valid.

    resumable: whether to require all entries that resuming needs; otherwise, only the entries in `state` are checked.
    """
    if resumable:
        return first_schema_error([_record_of(ENTRIES), _equally_many_phases, _position_in_epoch], state)
    kinds = {name: entry.kind for name, entry in ENTRIES.items()}
    return first_schema_error([record({}, {**kinds, "config": record({"--seed": _COUNT}, _CONFIG)})], state)


def schema_error_of_config(content: dict[str, Any]) -> str | None:
    """Returns the first schema error of a config.json; None if it is valid."""
    others = {"torchrun_agents": each(text()), "command_line": each(text())}
    return first_schema_error([_record_of(FACTS, others), _equally_many_phases], content)


def _record_of(entries: Mapping[str, Saved], others: Mapping[str, Kind] | None = None) -> Kind:
    return record(
        {name: entry.kind for name, entry in entries.items() if not entry.is_optional},
        {name: entry.kind for name, entry in entries.items() if entry.is_optional} | {**(others or {})},
    )


def _equally_many_phases(name: str, facts: Mapping[str, Any]) -> None:
    num_phases = len(facts["phase_sizes"])
    if num_phases == 0:
        raise wrong("phase_sizes", facts["phase_sizes"], "must have at least one phase")
    for name in ("batch_sizes", "global_batch_sizes"):
        if len(facts[name]) != num_phases:
            raise wrong(name, facts[name], f"must have {num_phases} values, one for each phase")


def _position_in_epoch(name: str, state: Mapping[str, Any]) -> None:
    """Raises ValueError for a position beyond the end of an epoch, where no sample order is defined."""
    position, sizes = state["position"], state["phase_sizes"]
    if position["phase"] >= len(sizes):
        raise wrong("position.phase", position["phase"], f"must be below {len(sizes)}, the number of phases")
    others = [samples for _, samples in position["others"]]
    in_turns = bool(others) or position["turn"] > 0
    integer(at_most=sizes[0 if in_turns else position["phase"]])("position.samples", position["samples"])
    if others and len(others) != len(sizes) - 1:
        raise wrong("position.others", others, f"must have {len(sizes) - 1} pairs, one for each other phase")
    for samples, size in zip(others, sizes[1:], strict=False):
        integer(at_most=size)("position.others", samples)
