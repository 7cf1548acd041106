"""What checkpoints, manifest.json and config.json hold: each entry is declared here once, with its kind and range.

A kind says what a value read from a file may be: its type, its range, and of a mapping the same for each entry.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.loading.order import Position

FORMAT_VERSION = 3
"""Of the checkpoints that this trainer writes; version 1 does not say its number.

An entry that is added, or means something else than before, takes the next number: newer files are refused by older
trainers, and an entry that older files lack gets its default here (`Saved.since`).
"""
RUN_ID = "[0-9a-f]{12}"

# --- kinds -----------------------------------------------------------------------------------------------------

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


# --- the entries of a checkpoint ----------------------------------------------------------------------------------

_COUNT, _SIZE, WEIGHTS = whole(), whole(at_least=1), by_name(tensor_of_numbers)


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Saved:
    """An entry of a checkpoint, or of a mapping in one.

    is_optional: files without it are whole. since: the first format version that has it; in older files the default
    stands for it. is_large: its tensors are read by rank 0 alone, and reach the others when they are loaded. name: in
    the file, where the field of a dataclass has another one. read: makes the value of that field from the file's.
    """

    kind: Kind
    is_optional: bool = False
    since: int = 1
    default: Any = None
    is_large: bool = False
    name: str = ""
    read: Callable[[Any], Any] = _as_it_is


def saved(kind: Kind, default: Any = MISSING, *, make: Any = MISSING, **more: Any) -> Any:
    """A field of a dataclass that a file keeps. make: makes the default, where it is a container. more: see `Saved`."""
    value = default if make is MISSING else make()
    return field(
        default=default, default_factory=make, metadata={"saved": Saved(kind, default=_plain_entry(value), **more)}
    )


def saved_fields(kept: Any) -> dict[str, tuple[str, Saved]]:
    """By the names of entries, the `saved` fields of a dataclass: their names and what they declare."""
    found = [(own.name, own.metadata["saved"]) for own in fields(kept) if "saved" in own.metadata]
    return {its.name or name: (name, its) for name, its in found}


def record_of_fields(kept: Any) -> Kind:
    """A mapping of the `saved` fields of a dataclass, and nothing else."""
    return record({name: its.kind for name, (_, its) in saved_fields(kept).items()}, closed=True)


def _plain_entry(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


@dataclass
class Best:
    """The best validation score so far.

    epoch, step: completed epochs and optimizer steps when it was reached.
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
    """How far a run has come, as a checkpoint keeps it. Each field is declared here alone: its entry, kind and default.

    evaluations_since_best: what early stopping looks at.
    last_report: optimizer steps done at the last report, which an epoch's end and every evaluation make.
    train_seconds: wall time of training, evaluation and saving included, over all sessions, as of the last
    `read_clock`, which every save makes.
    reported: of each phase, the loss and the weight of its totals over all processes that the log has shown.
    samples: those that the totals of all processes cover.
    misses_samples: whether that is not all since the last report, because other processes were lost with their totals.
    skipped_steps: optimizer steps left out because they were not finite.
    skipped_in_a_row: the last step skipped, and how many in a row that were.
    rate_drops: how often `--schedule plateau` has lowered the learning rate.
    task_state: what `Task.after_validation` returned last.
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

    def entries(self) -> dict[str, Any]:
        return {entry: _plain_entry(getattr(self, name)) for entry, (name, _) in saved_fields(self).items()}


def read_progress(state: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `SavedProgress` by name, from a checkpoint that was read."""
    return {name: its.read(state[entry]) for entry, (name, its) in saved_fields(SavedProgress).items()}


def _optimizer(name: str, value: Any) -> None:
    """Its state, where each parameter has a number from 0 on, and nothing is kept of others.

    What it keeps of none of them has a name. Values are its own business: a NaN or a step of -1 may say "not yet".
    """
    _OF_OPTIMIZER(name, value)
    anything(name, value)  # in entries of its own too
    numbers = [parameter for group in value["param_groups"] for parameter in group["params"]]
    if numbers != list(range(len(numbers))):
        raise wrong(f"{name}.param_groups", numbers, f"must number its parameters from 0 to {len(numbers) - 1}")
    for parameter, kept in value.get("state", {}).items():
        its = f"{name}.state.{brief(parameter)}"
        if isinstance(parameter, str):
            continue
        if type(parameter) is not int or not 0 <= parameter < len(numbers):
            raise ValueError(f"{its}: is none of its {len(numbers)} parameters")
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
"""The flags that the trainer itself looks up again."""
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
"""What a run is made with: both a checkpoint and config.json hold it."""

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
"""Of a checkpoint, beside its `format_version`. What each means: QUICK_REFERENCE.md, "A checkpoint"."""
LARGE = tuple(name for name, entry in ENTRIES.items() if entry.is_large)


# --- whole files -------------------------------------------------------------------------------------------------


def brought_up_to_date(state: Mapping[str, Any], entries: Mapping[str, Saved] = ENTRIES) -> dict[str, Any]:
    """A checkpoint of this format version or an older one, as today's trainer would have written it.

    Raises ValueError for a version that is none.
    """
    version = state.get("format_version", 1)
    whole(at_least=1)("format_version", version)
    lacking = {name: its.default for name, its in entries.items() if name not in state and version < its.since}
    held = {name: value for name, value in state.items() if name != "checksum"}  # version 1 had one of its entries
    return {**held, **lacking, "format_version": max(version, FORMAT_VERSION)}


def schema_error_of_checkpoint(state: Mapping[str, Any], resumable: bool) -> str | None:
    """What is wrong with a checkpoint, by the name of an entry; None for nothing.

    resumable: a run may go on from it; otherwise only entries that are there count.
    """
    if resumable:
        return first_schema_error([_record_of(ENTRIES), _equally_many_phases, _position_in_epoch], state)
    kinds = {name: entry.kind for name, entry in ENTRIES.items()}
    return first_schema_error([record({}, {**kinds, "config": record({"--seed": _COUNT}, _CONFIG)})], state)


def schema_error_of_config(content: dict[str, Any]) -> str | None:
    """What is wrong with config.json; None for nothing."""
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
        raise wrong("phase_sizes", facts["phase_sizes"], "must be of one phase at least")
    for name in ("batch_sizes", "global_batch_sizes"):
        if len(facts[name]) != num_phases:
            raise wrong(name, facts[name], f"must have {num_phases} values, one of each phase")


def _position_in_epoch(name: str, state: Mapping[str, Any]) -> None:
    """No sample order can be asked for what is beyond its end."""
    position, sizes = state["position"], state["phase_sizes"]
    if position["phase"] >= len(sizes):
        raise wrong("position.phase", position["phase"], f"must be below {len(sizes)}, the number of phases")
    others = [samples for _, samples in position["others"]]
    in_turns = bool(others) or position["turn"] > 0
    whole(at_most=sizes[0 if in_turns else position["phase"]])("position.samples", position["samples"])
    if others and len(others) != len(sizes) - 1:
        raise wrong("position.others", others, f"must have {len(sizes) - 1} pairs, one of each other phase")
    for samples, size in zip(others, sizes[1:], strict=False):
        whole(at_most=size)("position.others", samples)
