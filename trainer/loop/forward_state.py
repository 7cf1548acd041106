"""State that forwards change besides batch norms, such as queues: agreed on after every step, or undone."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.common.errors import UserError
from trainer.parallel.base import Parallel
from trainer.parallel.module_state import ABSENT, Change, Entry, State, buffers_of, is_plain, named_modules

Kind = tuple[torch.Size, torch.dtype]
"""Shape and type: tensors that share both can be copied into each other and sent as one another."""


class ForwardState:
    """A part of `Buffers`, for buffers and plain attributes of any meaning; most models have none.

    The forward that tries a phase shows which entries change (`learn`). There are three kinds.

    Shared: buffers that are persistent, or changed in place. Each process changes them by its own samples, and after
    the step all take the main process's, as by torch's DistributedDataParallel. So a save or an evaluation, before
    which all get the main process's buffers, changes nothing.

    Local: buffers that are not persistent and replaced by others, as tables and masks that a forward makes for its own
    batch. Each process has its own.

    Attributes: each process has its own, and no checkpoint holds them.
    """

    def __init__(self, model: nn.Module, without: Iterable[nn.Module]) -> None:
        """without: modules whose buffers are handled elsewhere."""
        self._name = f"{type(model).__name__}.forward"
        left_out = set(without)
        self._elsewhere = {id(buffer) for module in left_out for buffer in module.buffers(recurse=False)}
        self._persistent: list[list[Any]] = [
            [f"{path}.{name}".lstrip("."), module._buffers, name, buffer, _shape(buffer)]
            for path, module in named_modules(model)
            if module not in left_out
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        ]
        self.changes: dict[tuple[int, str], Change] = {}
        """All that trials have shown, by module and name, without the values."""
        self._shared: dict[str, Entry] = {}
        self._kinds: dict[str, Kind] = {}
        self._local: dict[str, Entry] = {}
        self._saved: dict[str, Entry] = {}
        self._attributes: list[Entry] = []
        self._before = self._local_before = State([])
        self._copies: dict[int, Any] = {}

    # --- before training ---------------------------------------------------------------------------------------------

    def learn(self, changes: Iterable[Change]) -> None:
        """changes: by a forward that tried a phase. Raises UserError for a persistent buffer that changed its shape."""
        for change in changes:
            entry, key = change.entry, (id(change.module), change.name)
            if change.is_persistent:
                self._refuse_another_shape(change.path, _shape(change.before), change.now)
            if key in self.changes or State([entry]).has_graph:
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

    def settle(self, model: nn.Module, parallel: Parallel) -> None:
        """After `learn`: what is shared on one process is on all, in one order. All processes call it.

        They may have seen different changes, where a forward leaves out layers at random.
        """
        kinds = {path: kind for own in parallel.gather(self._kinds) for path, kind in own.items()}
        for path in kinds.keys() - self._shared.keys():
            module, _, name = path.rpartition(".")
            self._shared[path] = buffers_of(model.get_submodule(module)), name
            self._local.pop(path, None)
        self._kinds, self._shared = kinds, {path: self._shared[path] for path in kinds}

    def remarks(self, world_size: int) -> list[str]:
        """Lines for the user about such state, before training."""
        lines = []
        attributes = [change.path for change in self.changes.values() if not change.is_buffer and change.is_seen]
        unseen = [
            f"{change.path} ({change.now.__name__})"
            for change in self.changes.values()
            if not (change.is_seen or change.in_place)
        ]
        if attributes:
            lines.append(
                f"Forwards change plain attributes: {', '.join(attributes)}. No checkpoint holds them: where a later "
                "forward depends on one, a resumed run differs from an unbroken one. Keep it in a buffer."
            )
        if unseen:
            lines.append(
                f"Forwards change what cannot be put back: {', '.join(unseen)}. The forward that tried the model "
                "before training has changed it too, and no checkpoint holds it. Keep it in buffers."
            )
        if self._local and world_size > 1:
            lines.append(
                f"Each rank keeps buffers of its own: {', '.join(self._local)}. A resumed run begins on all ranks with "
                "rank 0's."
            )
        return lines

    # --- in a step ---------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Before a step."""
        if self._shared or self._attributes or self._local:
            self._before = State([*self._shared.values(), *self._attributes])
            self._copies = self._before.copies()
            self._local_before = State(self._local.values())

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Around forward and backward of samples that do not count, which work on copies.

        It counts as a forward nonetheless, since every process has equally many: numbers and texts stay as it leaves
        them, so that counters agree, and so do the local buffers that may belong to them.
        """
        state = State([*self._shared.values(), *self._attributes])
        state.write(state.copies())
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

    def agree(self, parallel: Parallel) -> None:
        """After the last backward of a step, which may read what the forward left. All processes call it.

        Raises UserError for a persistent buffer that has another shape than in a new model.
        """
        for known in self._persistent:
            path, buffers, name, last, shape = known
            now = buffers.get(name)
            if now is not last:
                self._refuse_another_shape(path, shape, now)
                known[3] = now
        if parallel.world_size == 1 or not self._shared:
            return
        own: list[Any] = [owner.get(name) for owner, name in self._shared.values()]
        kinds = self._kinds.values()
        # One that is not persistent may by now have another size, on this process or on the main one.
        fits = [_kind(tensor) == kind for tensor, kind in zip(own, kinds, strict=True)]
        device = parallel.device
        on_main = parallel.from_main(torch.stack([torch.full((), fit, device=device) for fit in fits])).unbind()
        for tensor, fit, (shape, dtype), is_sent in zip(own, fits, kinds, on_main, strict=True):
            sent = parallel.from_main(tensor.detach() if fit else torch.zeros(shape, dtype=dtype, device=device))
            if fit and not parallel.is_main:
                tensor.data.copy_(torch.where(is_sent, sent, tensor))

    def undo(self) -> None:
        """After a step that was broken off, or is known to be left out."""
        self._before.put_back(self._copies)
        self._local_before.write()

    def undo_unless(self, applied: Tensor) -> None:
        """After a step. applied: whether it was, on the device.

        The host does not know, so numbers and texts stay, and so do the local buffers that may belong to them.
        """
        for owner, name, before in self._before.entries:
            now, copy = owner.get(name), self._copies.get(id(before))
            if now is not before and isinstance(copy, Tensor) and isinstance(now, Tensor) and _kind(now) == _kind(copy):
                now.data.copy_(torch.where(applied, now, copy))
        for key, copy in self._copies.items():
            original = self._before.copyable[key]
            if isinstance(original, Tensor):
                original.data.copy_(torch.where(applied, original, copy))

    # --- a checkpoint and back ---------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Tensor]:
        """The buffers that no state dict has, by their names; but for those that change their size."""
        return {
            path: owner[name].detach()
            for path, (owner, name) in self._saved.items()
            if _shape(owner.get(name)) is not None
        }

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """saved: by `saved`. What has another size now, as where flags have changed, stays as it is."""
        own = self.saved()
        for path, value in saved.items():
            if path in own and own[path].shape == value.shape:
                own[path].data.copy_(value)

    def _refuse_another_shape(self, path: str, before: tuple[int, ...] | None, now: Any) -> None:
        shape = _shape(now)
        if shape == before:
            return
        if before is None:
            what = f"makes {path}, a persistent buffer which a new model does not have"
        elif shape is None:
            what = f"removes {path}, a persistent buffer"
        else:
            what = f"gives {path}, a persistent buffer, the shape {shape} in place of {before}"
        raise UserError(
            f"{self._name} {what}: a checkpoint of it would fit no new model; register it with persistent=False, or in "
            "its final shape in build_objective"
        )


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _kind(value: Any) -> Kind | None:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None
