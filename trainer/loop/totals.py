"""Accumulates metric sums on the device, and gathers per-sample outputs in the order of the data set."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.common.errors import UserError
from trainer.parallel.devices import queue_of
from trainer.parallel.group import Group, require_shape
from trainer.task import Objective, Outputs, PerSample, Sums, method_name

COARSE = torch.float16, torch.bfloat16
"""Types that round a sum over samples, or overflow."""
OWN_METRICS = {
    "skipped_steps", "covered_samples", "learning_rate", "grad_norm", "samples_per_second", "epoch_seconds",
    "data_wait_seconds",
}  # fmt: skip
"""Metrics that the trainer logs, in the group "train/" in metrics.jsonl or TensorBoard."""
HOST = torch.device("cpu")
FOLD_EVERY = 64
"""Number of `add` calls after which stored tensors are summed: large enough for speed, small enough for memory."""


class Totals:
    """Running sums over this process's samples, by name; the sum "weight" is the number of loss terms.

    A sum that a batch or a process lacks counts as zero. `add` never waits for the device; it stores tensors, and sums
    them every `FOLD_EVERY` calls.
    """

    def __init__(self, sums: Mapping[str, Tensor] | None = None) -> None:
        self._sums = dict(sums or {})
        self._shapes = {name: value.shape for name, value in self._sums.items()}
        self._kept: list[Sums] = []
        self._weights: list[float] = []
        self._applied: list[Tensor] = []

    def add(self, sums: Sums, weight: Any, applied: bool | Tensor = True) -> None:
        """Adds sums by name. weight: number of loss terms, a float.

        applied: whether the step changed the weights, a bool or a bool tensor; if not, its sums are ignored.

        Raises UserError if the shape of a sum has changed.
        """
        for name, value in sums.items():
            if self._shapes.setdefault(name, value.shape) != value.shape:
                require_shape(name, value.shape, self._shapes[name])
        if isinstance(applied, Tensor):
            self._applied.append(applied)
        elif not applied:
            sums, weight = {name: torch.zeros_like(value) for name, value in sums.items()}, 0.0
        self._kept.append(sums)
        self._weights.append(weight)
        if len(self._kept) == FOLD_EVERY:
            self._fold()

    def _fold(self) -> None:
        if not self._kept:
            return
        counts = torch.stack(self._applied) if self._applied else None
        examples = {name: value for sums in self._kept for name, value in sums.items()}
        device = next((value.device for value in examples.values()), HOST)
        parts = {name: self._stacked(name, torch.zeros_like(value)) for name, value in examples.items()}
        weights = torch.tensor(self._weights, dtype=torch.float64, pin_memory=queue_of(device).pins_memory)
        parts["weight"] = weights.to(device, non_blocking=True)
        for name, part in parts.items():
            if counts is not None:
                part = torch.where(counts.view(-1, *[1] * (part.dim() - 1)), part, 0)
            self._sums[name] = self._added(self._sums.get(name), part.double())
        self._kept, self._weights, self._applied = [], [], []

    def _added(self, before: Tensor | None, parts: Tensor) -> Tensor:
        """Sums `parts`, (n, ...), along dim 0 and adds `before`, the sum so far; None counts as zero."""
        added = parts.sum(0)
        return added if before is None else before + added

    def _stacked(self, name: str, zero: Tensor) -> Tensor:
        values = [sums.get(name, zero) for sums in self._kept]
        if len({value.dtype for value in values}) > 1:  # type promotion may choose a dtype too small for counts
            values = [value.double() for value in values]
        return torch.stack(values)

    def unreduced(self) -> dict[str, Tensor]:
        """Returns this process's sums, including "weight", on the CPU. Runs no collective."""
        self._fold()
        return {name: value.cpu() for name, value in self._sums.items()}

    def reduced(self, group: Group) -> dict[str, Tensor]:
        """Returns the sums over all processes, including "weight", in float64 on the CPU; {} if nothing was added.

        Waits for the device. All processes must call this method. Raises UserError if shapes differ between ranks.
        """
        parts = self.unreduced()
        shapes = _common_shapes({name: tuple(parts[name].shape) for name in sorted(parts)}, group)
        if not shapes:
            return {}
        zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items() if name not in parts}
        flat = group.sum(torch.cat([(zeros | parts)[name].flatten() for name in shapes]))
        sums = dict(zip(shapes, flat.split([math.prod(shape) for shape in shapes.values()]), strict=True))
        return {name: sums[name].view(shapes[name]) for name in {**parts, **shapes}}


def _common_shapes(own: dict[str, tuple[int, ...]], group: Group) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all processes' sums, in the same order on each process."""
    if group.agrees(own):
        return own
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, its in enumerate(group.all_gather_object(own)):
        for name, shape in its.items():
            require_shape(name, shape, shapes.setdefault(name, shape), f" on rank {rank}")
    return {name: shapes[name] for name in sorted(shapes)}


def require_sums(sums: object, objective: nn.Module, phase: str | None) -> None:
    """Raises UserError unless a forward returned a dict of sums. phase: the phase in training, or None in eval mode."""
    if not isinstance(sums, dict):
        problem = f"must return a dict of tensors (sums), not a {type(sums).__name__}"
    elif other := [each for each in sums.items() if not isinstance(each[1], Tensor if phase else Tensor | PerSample)]:
        name, value = other[0]
        problem = f"must return a tensor for {name!r}, a sum over the samples, not a {type(value).__name__}"
        if isinstance(value, int | float):
            problem += "; return the tensor itself instead of float(...), or batch['weight'].sum() for a count"
    elif strange := [name for name in sums if not isinstance(name, str)]:
        problem = f"returns a value named {strange[0]!r} of type {type(strange[0]).__name__}; name it by a string"
    elif "weight" in sums:
        problem = "returns 'weight', a name reserved for the number of loss terms; rename it"
    elif own := sorted(OWN_METRICS & sums.keys()):
        problem = f"returns {own[0]!r}, the name of a metric of the trainer; rename it"
    elif coarse := [name for name, value in sums.items() if getattr(value, "dtype", None) in COARSE]:
        problem = f"returns {coarse[0]!r} in {sums[coarse[0]].dtype}; sum in at least float32, as with .double().sum()"
    elif (phase or getattr(objective, "given_as", None)) and "loss" not in sums:
        problem = f"returns {', '.join(sums) or 'nothing'}, but must return 'loss'"
    elif phase and sums["loss"].dim() > 0:
        shape = tuple(sums["loss"].shape)
        problem = f"returns a loss of shape {shape}, but must return one number, the sum over the samples"
    else:
        return
    raise UserError(f"{forward_name(objective, phase)} {problem}")


def forward_name(objective: nn.Module, phase: str | None) -> str:
    """Returns the name of an objective's forward for messages. phase: training phase, or None in eval mode."""
    if phase is not None and isinstance(objective, Objective) and objective.is_joint:
        return f"{type(objective).__name__}.joint_loss(rows, {phase!r})"
    name = method_name(objective, "forward")
    if name.endswith(".forward"):
        name += "(batch)" if phase is None else f"(batch, {phase!r})"
    return f"{name} in {'eval' if phase is None else 'train'} mode"


def add_sums(sums: Sums, part: Mapping[str, Tensor]) -> None:
    """Adds the detached sums of a micro-batch to `sums` in place. Raises UserError if a sum has changed its shape."""
    for name, value in part.items():
        value = value.detach() if value.requires_grad else value
        if name in sums:
            require_shape(name, value.shape, sums[name].shape)
            value = sums[name] + value
        sums[name] = value


def share_of(reduced: Mapping[str, Tensor], group: Group) -> Totals:
    """Returns totals whose sum over all ranks is `reduced`: `reduced` on rank 0, zeros on other ranks."""
    share = 1 if group.is_main else 0
    return Totals({name: (value * share).to(group.device) for name, value in reduced.items()})


def without_counting(sums: Sums) -> Sums:
    """Replaces the sums of a placeholder batch, whose samples do not count, with zeros.

    Multiplying the sums by zero would turn an infinite loss into NaN on all ranks.
    """
    return {name: torch.where(torch.zeros_like(value, dtype=torch.bool), value, 0) for name, value in sums.items()}


MOST_IN_FLIGHT = 32
"""Number of batches in transfer from a GPU at which the host waits for the older half."""


class PerSampleOutputs:
    """Collects the `PerSample` outputs of this process's samples in host memory."""

    def __init__(self) -> None:
        self._index: list[Tensor] = []
        self._parts: list[dict[str, Tensor]] = []
        self._arrived: list[torch.cuda.Event] = []  # one for each batch still in pinned memory
        self._names: set[str] | None = None

    def add(self, index: Tensor, outputs: Outputs) -> None:
        """Adds the `PerSample` outputs of a batch. index: the batch's sample indices, (B,) int64 in host memory.

        Raises UserError if the names differ from the names in earlier batches.
        """
        found = {name: value.values for name, value in outputs.items() if isinstance(value, PerSample)}
        self._names = set(found) if self._names is None else self._names
        if found.keys() != self._names:
            name = min(found.keys() ^ self._names)
            raise UserError(f"PerSample {name!r}: the objective must return it for all batches, not only for some")
        if found:
            self._index.append(index)
            # Copies, because a slice would keep a whole tensor alive; copies from a GPU are asynchronous.
            self._parts.append({k: values.to("cpu", non_blocking=True, copy=True) for k, values in found.items()})
            device = next(iter(found.values())).device
            if device != HOST:
                self._arrived.append(torch.cuda.current_stream(device).record_event())
            if len(self._arrived) == MOST_IN_FLIGHT:
                self._land(MOST_IN_FLIGHT // 2)

    def _land(self, num: int) -> None:
        """Moves the `num` oldest outputs from pinned to pageable memory, while the GPU still works on newer batches."""
        self._arrived[num - 1].synchronize()
        landing = slice(len(self._parts) - len(self._arrived), len(self._parts) - len(self._arrived) + num)
        self._parts[landing] = [{k: values.clone() for k, values in part.items()} for part in self._parts[landing]]
        del self._arrived[:num]

    def gathered(self, group: Group, num_samples: int) -> dict[str, Tensor]:
        """On rank 0, returns the outputs for the whole data set by name, (num_samples, ...); on other ranks, {}.

        All processes must call this method. Raises UserError on all processes if outputs are inconsistent.
        """
        names = {"the set of PerSample outputs": sorted(self._names or ())}
        group.require_same(names, "the objective must return the same sums for all batches and ranks")
        if not self._index:
            return {}
        if self._arrived:
            self._land(len(self._arrived))
        shares = group.gather_object((torch.cat(self._index), group.together(self._joined)))
        whole: dict[str, Tensor] = {}
        group.on_main(lambda: whole.update(in_order(shares, num_samples)))
        return whole

    def _joined(self) -> dict[str, Tensor]:
        for index, part in zip(self._index, self._parts, strict=True):
            for name, values in part.items():
                if values.shape[:1] != index.shape:
                    raise UserError(
                        f"PerSample {name!r}: the objective returned values of shape {tuple(values.shape)} for a batch "
                        f"of {len(index)} samples; it must return one row per sample"
                    )
        return joined(self._parts)


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenates outputs along dim 0 by name. Raises UserError if dtypes or the shapes of samples differ."""
    for name in parts[0]:
        kinds = {(tuple(part[name].shape[1:]), part[name].dtype) for part in parts}
        if len(kinds) > 1:
            (one, its), (other, theirs) = sorted(kinds, key=str)[:2]
            raise UserError(
                f"PerSample {name!r}: the objective returned rows of shape {one} ({its}) and of {other} ({theirs}); "
                "all rows must have the same shape and type; pad or convert them"
            )
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def in_order(shares: Sequence[tuple[Tensor, dict[str, Tensor]]], num_samples: int) -> dict[str, Tensor]:
    """Sorts outputs by sample index. shares: (index, outputs) of each process. Raises UserError if a sample is missing.

    Uses only the first output of each sample, because placeholder batches, which come later, repeat samples.
    """
    samples, first = np.unique(torch.cat([index for index, _ in shares]).numpy(), return_index=True)
    if len(samples) != num_samples:
        raise UserError(
            f"PerSample: over all batches, batch['index'] covered only {len(samples)} of {num_samples} samples; set "
            "it to `keys.index` in `collate`"
        )
    outputs = joined([share for _, share in shares])
    return {name: values[torch.from_numpy(first)] for name, values in outputs.items()}
