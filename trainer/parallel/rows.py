"""Gathers outputs for all samples of a step from all processes, in the order of the global batch (`trainer.gather`)."""

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.common.errors import UserError
from trainer.common.torch_private import TorchDispatchMode, tree_flatten
from trainer.parallel.group import Group
from trainer.parallel.strategy import Strategy

ALIKE = "the objective must return rows of the same names, shapes and types for all samples, on all ranks"


class Gathered(NamedTuple):
    """Result of `gather`.

    rows: one row per sample of the step. own: 1-D int64 tensor with the positions of this process's samples in `rows`.
    """

    rows: Tensor
    own: Tensor


class _Forward:
    """State of the current forward pass: strategy, number of samples (0: placeholder batch), and passes per step."""

    now: tuple[Strategy, int, int] | None = None


FORWARD = _Forward()


def gather(rows: Tensor) -> Gathered:
    """Gathers rows of all samples of an optimizer step. Call it in a forward pass whose loss couples samples.

    rows: of shape (B, ...), one row per sample of the batch. All processes must call this function the same number of
    times. Each row receives gradients from the losses of all processes. A process without samples adds no rows, and its
    loss is ignored. In eval mode, or without gradients, the function returns the batch's own rows.

    Raises UserError in a step of several micro-batches, with `--parts`, and with `--multi-gpu dp`.
    """
    own = torch.arange(len(rows), device=rows.device)
    if FORWARD.now is None or not torch.is_grad_enabled():
        return Gathered(rows, own)
    strategy, num_samples, num_forwards = FORWARD.now
    group = strategy.group
    refuse_coupling("trainer.gather", strategy)
    if num_forwards > 1:
        raise UserError(
            f"trainer.gather: gathers the rows of one forward pass, but this step has {num_forwards} passes on each "
            "device; raise --batch-size until one pass holds all samples of a step on a device, or write the loss as "
            "`outputs` and `joint_loss`; see docs/own_task.md"
        )
    if num_samples not in (0, len(rows)):
        raise UserError(f"trainer.gather: got {len(rows)} rows for {num_samples} samples; pass one row per sample")
    if group.world_size == 1:
        return Gathered(rows, own)
    if rows.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("trainer.gather runs a collective, which the replay of a CUDA graph would not repeat")
    # A process without samples gets a placeholder batch: the first samples of the global batch.
    own = own if num_samples == 0 else own * group.world_size + group.rank
    return Gathered(_Gather.apply(rows, num_samples, group), own)


def refuse_coupling(what: str, strategy: Strategy) -> None:
    """Raises UserError if the strategy does not support losses that couple samples. what: name of the feature."""
    if strategy.num_parts:
        raise UserError(f"--parts {strategy.num_parts}: {what} couples samples of different parts; leave --parts out")
    if strategy.num_replicas > 1:
        raise UserError(f"--multi-gpu dp: {what} needs one process per device; use --multi-gpu ddp")


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_samples: int, group: Group) -> Tensor:
        ctx.group, ctx.num_samples, ctx.shape = group, num_samples, rows.shape
        return in_global_order(group, {"rows": rows[:num_samples]})["rows"]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        group = ctx.group
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True).contiguous()
        group.sum_gradients(total)
        own = gradient.new_zeros(ctx.shape)
        own[: ctx.num_samples] = total[group.rank :: group.world_size]
        return own, None, None


def in_global_order(group: Group, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Gathers each named tensor's rows for all samples of a step; results carry no autograd graph.

    own: rows of this process's samples, in order; possibly empty. All processes must call this function. All raise
    UserError if their rows differ in name, shape or dtype. The host waits for other processes, but not for a device.
    """
    if group.world_size == 1:
        return own
    num_own, kinds = len(next(iter(own.values()))), kinds_of(own)
    digest = int.from_bytes(blake2b(repr(kinds).encode(), digest_size=2).digest())
    num_rows, total, squares = group.sum(torch.tensor([num_own, digest, digest**2])).tolist()
    if group.world_size * squares != total**2:  # not all digests are equal
        group.require_same({"the objective's output": kinds}, ALIKE)
    # One message for all tensors, as bytes, because gloo does not support all dtypes.
    flat = [value.detach().reshape(num_own, *value.shape[1:], 1).flatten(1).contiguous() for value in own.values()]
    packed = torch.cat([value.view(torch.uint8) for value in flat], dim=1)
    padded = packed.new_zeros(-(-num_rows // group.world_size), packed.shape[1])
    padded[:num_own] = packed
    # Process r of w has samples r, r + w, r + 2w, ...
    found = group.all_gather(padded).transpose(0, 1).flatten(0, 1)[:num_rows]
    parts = found.split([value.shape[1] * value.itemsize for value in flat], dim=1)
    return {
        name: part.contiguous().view(value.dtype).view(num_rows, *value.shape[1:])
        for (name, value), part in zip(own.items(), parts, strict=True)
    }


def kinds_of(rows: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the shape and dtype of each named tensor's rows, which must be equal in all batches of a step."""
    return {name: f"{tuple(value.shape[1:])} of {value.dtype}" for name, value in rows.items()}


# --- collectives within a forward pass ---------------------------------------------------------------------------

NAMESPACES = ("c10d", "_c10d_functional")
END, FAILED = "no further collective", "an error"


def require_equal_exchanges(where: str, group: Group, forward: Callable[[], object]) -> None:
    """Raises UserError on all processes if their forward passes run different collectives, which would abort the run.

    where: names the forward pass in messages. All processes must call this function. Ignores exceptions of the pass.
    """
    compared = _Compared(group)
    try:
        with compared:
            forward()
        compared.tell(END)
    except _Differ:
        pass
    except Exception:
        compared.told = group.all_gather_object(FAILED)
    told = compared.told
    if FAILED in told or len(set(told)) == 1:
        return
    rank = next(rank for rank, own in enumerate(told) if own != told[0])
    raise UserError(
        f"{where}: if the ranks have different numbers of samples, rank 0 runs {told[0]}, but rank {rank} runs "
        f"{told[rank]}, so the run aborts; use trainer.gather, or give all ranks the same number of samples: set "
        "--drop-last, and --global-batch-size to a multiple of the number of processes"
    )


class _Differ(Exception):
    """Raised if another process runs a different collective next."""


class _Compared(TorchDispatchMode):
    """Compares each collective across processes before it runs. told: next collective of each rank."""

    told: Sequence[str] = ()

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def tell(self, own: str) -> None:
        """Raises _Differ if another process runs a different collective next. own: this process's next collective."""
        self.told = self._group.all_gather_object(own)
        if len(set(self.told)) > 1:
            raise _Differ

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in NAMESPACES:
            leaves, _ = tree_flatten((args, kwargs))
            shapes = [str(tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, Tensor)]
            self.tell(f"the collective {function.__name__.partition('.')[0].strip('_')} of {', '.join(shapes)}")
        return function(*args, **(kwargs or {}))
