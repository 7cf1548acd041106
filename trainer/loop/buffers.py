"""State that forward passes change, such as batch norm statistics."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainer.common.errors import UserError
from trainer.common.torch_private import foreach_copy_, names_not_persistent, own_buffers
from trainer.loop.module_state import (
    ABSENT,
    Change,
    Entry,
    References,
    State,
    buffers_of,
    contents,
    is_plain,
    named_modules,
)
from trainer.parallel.group import Group
from trainer.parallel.strategy import Strategy
from trainer.task import method_name


class Buffers:
    """Synchronises running statistics and other state that forward passes change; undoes the changes of skipped steps.

    A forward pass updates running statistics before the gradients are known to be finite, and a NaN in the statistics
    would be permanent. After each step the statistics are equal on all processes, so any step's state can be saved.

    forward_state: state other than running statistics. is_active: whether forward passes change any state.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = [module for module in model.modules() if getattr(module, "track_running_stats", False)]
        buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        # One flat tensor each for statistics and counters, because on a GPU every copy costs a kernel launch.
        self._statistics = FlatTensors([buffer for buffer in buffers if buffer.is_floating_point()])
        counters = FlatTensors([buffer for buffer in buffers if not buffer.is_floating_point()])
        self._kinds = [kind for kind in (self._statistics, counters) if kind]
        self.forward_state = ForwardState(model, without=norms)
        self.is_active = bool(self._kinds) or self.forward_state.is_active
        self._num_samples = 0
        self._before_placeholder: Tensor | None = None
        self._pending: tuple[Tensor, Callable[[], None]] | None = None

    def learn(self, changes: Iterable[Change], model: nn.Module, group: Group) -> None:
        """Registers what a trial forward pass changed on any rank. Raises UserError for reshaped persistent buffers."""
        self.forward_state.learn(changes)
        self.forward_state.settle(model, group)
        self.is_active = self.is_active or self.forward_state.is_active

    def keep(self) -> None:
        self._num_samples, self._before_placeholder = 0, None
        for kind in self._kinds:
            kind.keep()
        self.forward_state.keep()

    def of_samples(self, num_samples: int) -> AbstractContextManager[None]:
        """Context for forward and backward passes that restores running statistics on exit if num_samples is 0.

        Counters such as `num_batches_tracked` always advance, so that they are equal on all processes.
        """
        self._num_samples += num_samples
        return nullcontext() if num_samples > 0 else self._unchanged()

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        self._before_placeholder = before = self._statistics.flattened()
        with self.forward_state.unchanged():
            yield
        self._before_placeholder = None
        if self._statistics:
            self._statistics.set(before)

    @contextmanager
    def of_joint_loss(self) -> Iterator[None]:
        """Context for the joint loss after a step's first forward passes, which run again.

        On exit, undoes these forward passes' changes to running statistics, but not the joint loss's.
        """
        before = [kind.flattened() for kind in self._kinds]
        yield
        for kind, values in zip(self._kinds, before, strict=True):
            kind.set(kind.kept + (kind.flattened() - values))
        self._num_samples = 0

    def start_agreement(self, group: Group) -> None:
        """Starts the all-reduce of changes to running statistics after a step's last forward pass; `agree` awaits it.

        The all-reduce overlaps with the backward pass, which does not read running statistics in train mode. All
        processes must call this method, and at least one process must have samples.
        """
        if group.world_size == 1 or not self._statistics:
            return
        before = self._before_placeholder  # set if the last micro-batch has no samples
        changes = (self._statistics.flattened() if before is None else before) - self._statistics.kept
        flat = torch.cat([changes, torch.ones_like(changes[:1])]) * self._num_samples
        self._pending = flat, group.start_all_reduce(flat)

    def agree(self, strategy: Strategy) -> None:
        """After a step's last backward pass, sets running statistics to their sample-weighted mean over processes.

        All processes must call this method. Raises UserError if a persistent buffer changed its shape.
        """
        self.forward_state.agree(strategy)
        if self._pending is None:
            return
        flat, wait = self._pending
        self._pending = None
        wait()
        self._statistics.set(self._statistics.kept + flat[:-1] / flat[-1])

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Context for forward passes after `agree`; on exit, undoes their changes to buffers and attributes.

        All processes must enter this context.
        """
        before, num_samples = [kind.flattened() for kind in self._kinds], self._num_samples
        with self.forward_state.unchanged():
            yield
        if self._pending is not None:
            self._pending[1]()
        self._pending, self._num_samples = None, num_samples
        for kind, values in zip(self._kinds, before, strict=True):
            kind.set(values)

    def undo(self) -> None:
        for kind in self._kinds:
            kind.set(kind.kept)
        self.forward_state.undo()

    def undo_unless(self, applied: bool | Tensor) -> None:
        """Restores buffers and attributes to their values before a step, unless the step changed the weights."""
        if isinstance(applied, Tensor):
            for kind in self._kinds:
                kind.set(torch.where(applied, kind.flattened(), kind.kept))
            self.forward_state.undo_unless(applied)
        elif not applied:
            self.undo()


class FlatTensors:
    """Reads and writes several tensors as one flat tensor. kept: values at the last call of `keep`."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._flat = [tensor.detach().view(-1) for tensor in tensors]
        self._sizes = [tensor.numel() for tensor in tensors]
        self.kept = self.flattened()

    def __bool__(self) -> bool:
        return bool(self._flat)

    def flattened(self) -> Tensor:
        return torch.cat(self._flat) if self._flat else torch.empty(0)

    def keep(self) -> None:
        torch.cat(self._flat, out=self.kept)

    def set(self, values: Tensor) -> None:
        # `.data` hides the writes from autograd, which is safe because the backward does not read the statistics
        foreach_copy_([flat.data for flat in self._flat], values.split(self._sizes))


Kind = tuple[torch.Size, torch.dtype]
"""Shape and dtype of a tensor."""


class ForwardState:
    """Buffers and Python attributes that forward passes change; most models have none.

    `learn` registers three kinds of state that a trial forward pass has changed.

    Shared buffers are either persistent or changed in place. Each process updates its shared buffers with its own
    samples. After the step all processes copy rank 0's buffers, as in DistributedDataParallel.

    Local buffers, such as masks, are non-persistent. Forward passes replace them, so they may differ between processes.

    Attributes may differ between processes, and checkpoints do not contain them.
    """

    def __init__(self, model: nn.Module, without: Iterable[nn.Module]) -> None:
        """without: batch norms to leave out, because `Buffers` synchronises their running statistics."""
        self._name = method_name(model, "forward")
        left_out = set(without)
        self._elsewhere = {id(buffer) for module in left_out for buffer in module.buffers(recurse=False)}
        self._persistent: list[list[Any]] = [
            [f"{path}.{name}".lstrip("."), own_buffers(module), name, buffer, _shape(buffer)]
            for path, module in named_modules(model)
            if module not in left_out
            for name, buffer in own_buffers(module).items()
            if name not in names_not_persistent(module)
        ]
        self.changes: dict[tuple[int, str], Change] = {}
        """Trial forwards' changes, keyed by (module id, name); `before` is None, and `now` is the new value's type."""
        self._shared: dict[str, Entry] = {}
        self._kinds: dict[str, Kind] = {}
        self._local: dict[str, Entry] = {}
        self._saved: dict[str, Entry] = {}
        self._attributes: list[Entry] = []
        self._before, self._local_before = State([]), References([])
        self.is_active = False

    # --- before training ---------------------------------------------------------------------------------------------

    def learn(self, changes: Iterable[Change]) -> None:
        """Registers what a trial forward pass changed. Raises UserError if a persistent buffer changed its shape."""
        for change in changes:
            entry, key = change.entry, (id(change.module), change.name)
            if change.is_persistent:
                self._refuse_another_shape(change.path, _shape(change.before), change.now)
            if key in self.changes or _has_graph(change.now):
                continue
            self.changes[key] = change._replace(before=None, now=type(change.now))
            if id(change.before) in self._elsewhere:
                continue
            if not change.is_buffer:
                self._attributes.append(entry)
                continue
            if _shape(change.before) != _shape(change.now) or change.now.layout != torch.strided:
                continue
            if not change.is_persistent:
                self._saved[change.path] = entry
            if change.is_persistent or change.in_place:
                self._shared[change.path] = entry
                self._kinds[change.path] = change.now.shape, change.now.dtype
            else:
                self._local[change.path] = entry

    def settle(self, model: nn.Module, group: Group) -> None:
        """Makes all processes synchronise the same buffers in the same order. All processes must call this method.

        Processes may have registered different buffers, because their forward passes may skip layers at random.
        """
        kinds = {path: kind for own in group.all_gather_object(self._kinds) for path, kind in own.items()}
        for path in kinds.keys() - self._shared.keys():
            module, _, name = path.rpartition(".")
            self._shared[path] = buffers_of(model.get_submodule(module)), name
            self._local.pop(path, None)
        self._kinds, self._shared = kinds, {path: self._shared[path] for path in kinds}
        self.is_active = bool(self._shared or self._attributes or self._local)

    def remarks(self, world_size: int) -> list[str]:
        lines = []
        attributes = [change.path for change in self.changes.values() if not change.is_buffer and change.is_seen]
        unseen = [
            f"{change.path} ({change.now.__name__})"
            for change in self.changes.values()
            if not (change.is_seen or change.in_place)
        ]
        if attributes:
            lines.append(
                f"Forward passes change plain attributes: {', '.join(attributes)}. Checkpoints lack these attributes, "
                "so a resumed run may differ from an uninterrupted run; store them in buffers."
            )
        if self._shared:
            lines.append(
                f"Forward passes change the buffers {', '.join(self._shared)}. After each step, all ranks copy rank "
                "0's buffers. If they depend on the samples, results depend on how a batch is split, unless the task "
                "computes them in `joint_loss`, which receives all rows of a step (see docs/own_task.md)."
            )
        if unseen:
            lines.append(
                f"Forward passes change objects that cannot be restored: {', '.join(unseen)}. The trial forward pass "
                "before training changed them too, and checkpoints lack them; keep their data in buffers."
            )
        if self._local and world_size > 1:
            lines.append(
                f"Each rank keeps its own buffers: {', '.join(self._local)}. A resumed run starts with rank 0's "
                "buffers on all ranks."
            )
        return lines

    # --- in a step ---------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        if self._shared or self._attributes or self._local:
            self._before = State([*self._shared.values(), *self._attributes])
            self._local_before = References(self._local.values())

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context in which the forward and backward passes of a placeholder batch change only copies of the state.

        Numbers and strings keep their new values, so that counters are equal on all processes. Local buffers keep
        their new values, because they may depend on a counter.
        """
        state = State([*self._shared.values(), *self._attributes])
        state.write(instead=state.copy_of)
        try:
            yield
        finally:
            numbers = [
                (owner, name, owner[name])
                for owner, name, before in state.entries
                if is_plain(before) and is_plain(owner.get(name, ABSENT))
            ]
            state.write()
            for owner, name, value in numbers:
                owner[name] = value

    def agree(self, strategy: Strategy) -> None:
        """Copies rank 0's shared buffers to all processes.

        All processes must call this method after a step's last backward pass, which may read the old values.
        """
        for known in self._persistent:
            path, buffers, name, last, shape = known
            now = buffers.get(name)
            if now is not last:
                self._refuse_another_shape(path, shape, now)
                known[3] = now
        if strategy.group.world_size == 1 or not self._shared:
            return
        own: list[Any] = [owner.get(name) for owner, name in self._shared.values()]
        kinds = self._kinds.values()
        # a forward may have resized a non-persistent buffer, perhaps only on some processes
        fits = [_kind(tensor) == kind for tensor, kind in zip(own, kinds, strict=True)]
        device = strategy.device
        on_main = strategy.broadcast(torch.stack([torch.full((), fit, device=device) for fit in fits])).unbind()
        for tensor, fit, (shape, dtype), is_sent in zip(own, fits, kinds, on_main, strict=True):
            sent = strategy.broadcast(tensor.detach() if fit else torch.zeros(shape, dtype=dtype, device=device))
            if fit and not strategy.group.is_main:
                tensor.data.copy_(torch.where(is_sent, sent, tensor))

    def undo(self) -> None:
        self._before.put_back()
        self._local_before.write()

    @contextmanager
    def once_more(self) -> Iterator[None]:
        """Context in which a step's extra forward passes start from the state before the step; undoes their changes."""
        state, local = State([*self._shared.values(), *self._attributes]), References(self._local.values())
        self.undo()
        try:
            yield
        finally:
            state.put_back()
            local.write()

    def undo_unless(self, applied: Tensor) -> None:
        """Restores tensors to their values before a step if `applied`, a bool tensor on the device, is False.

        The host does not know the value of `applied`, so numbers, strings and local buffers keep their new values.
        """
        for owner, name, before in self._before.entries:
            now, copy = owner.get(name), self._before.copy_of(before)
            if now is not before and isinstance(copy, Tensor) and isinstance(now, Tensor) and _kind(now) == _kind(copy):
                now.data.copy_(torch.where(applied, now, copy))
        for original, copy in self._before.copies.values():
            if isinstance(original, Tensor):
                original.data.copy_(torch.where(applied, original, copy))

    # --- saving and restoring ----------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Tensor]:
        """Returns the non-persistent buffers that forward passes change but do not resize, for checkpoints."""
        return {
            path: owner[name].detach()
            for path, (owner, name) in self._saved.items()
            if _shape(owner.get(name)) is not None
        }

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Loads buffers that `saved` returned; skips buffers whose shape has changed."""
        own = self.saved()
        for path, value in saved.items():
            if path in own and own[path].shape == value.shape:
                own[path].data.copy_(value)

    def _refuse_another_shape(self, path: str, before: tuple[int, ...] | None, now: Any) -> None:
        shape = _shape(now)
        if shape == before:
            return
        if before is None:
            what = f"adds the persistent buffer {path}"
        elif shape is None:
            what = f"removes the persistent buffer {path}"
        else:
            what = f"changes the shape of the persistent buffer {path} from {before} to {shape}"
        raise UserError(
            f"{self._name} {what}, so a new model cannot load a checkpoint of this run; register it with "
            "persistent=False, or in its final shape when the model is built"
        )


def _has_graph(value: Any) -> bool:
    """Returns whether a value contains a tensor with an autograd graph, such as an activation kept for inspection."""
    tensors = (each for each in contents([value]) if isinstance(each, Tensor) and not isinstance(each, nn.Parameter))
    return any(tensor.requires_grad for tensor in tensors)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _kind(value: Any) -> Kind | None:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None
