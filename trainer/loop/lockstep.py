"""Checks during training that all processes have the same model, by comparing hashes (fingerprints)."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.common.errors import UnfitState
from trainer.common.tensors import local_shards
from trainer.common.torch_private import num_writes
from trainer.loop.module_state import persistent_buffers
from trainer.loop.progress import Progress
from trainer.loop.watch import Log, StepRecord, Watch
from trainer.parallel.devices import arithmetic_of, numbers_at_once, queue_of
from trainer.parallel.strategy import Strategy

MOST_NAMED = 4
"""Maximum number of ranks that a message names; for a larger group, the message states only its size."""
_BLOCK_FACTOR = 0x5851F42D4C957F2D
"""Odd factor on the hash before each block of words is added: the multiplier of Knuth's MMIX generator."""


class Fingerprint:
    """Multilinear hash of Lemire and Kaser ("Strongly universal string hashing is fast", 2014), computed on a device.

    The hash is the sum modulo 2^64 of the tensors' 32-bit words, each multiplied by a random odd number for its
    position. Because the factors are odd, a change of one word always changes the hash. Any other change is missed with
    a probability of about 2^-32. Integer sums do not depend on their order, so all devices compute the same hash.
    """

    def __init__(self, num_words: int, device: torch.device) -> None:
        size = min(num_words, numbers_at_once(device))
        generator = torch.Generator().manual_seed(0)
        self._factors = (torch.randint(-(2**63), 2**63 - 1, (size,), generator=generator) | 1).to(device)

    @torch.no_grad()
    def of(self, tensors: Iterable[Tensor]) -> Tensor:
        """Returns the hash of tensors as a scalar int64 tensor on their device."""
        total = self._factors.new_zeros(())
        for block in _blocks(tensors, len(self._factors)):
            total = total * _BLOCK_FACTOR + (block * self._factors[: len(block)]).sum()
        return total


def num_words(tensors: Iterable[Tensor]) -> int:
    """Returns an upper bound on the number of 32-bit words in tensors."""
    return sum(-(-tensor.nbytes // 4) + 1 for tensor in tensors)


def _words(tensor: Tensor) -> Tensor:
    """Returns a tensor's bytes as a flat int32 tensor, padded with zeros."""
    flat = tensor.detach().reshape(-1)
    if flat.element_size() % 4:
        flat = F.pad(flat.view(torch.uint8), (0, 4 - flat.nbytes % 4))
    return flat.view(torch.int32)


def _blocks(tensors: Iterable[Tensor], most: int) -> Iterator[Tensor]:
    """Yields the tensors' 32-bit words in blocks of at most `most` words; small tensors share a block."""
    waiting: list[Tensor] = []
    size = 0
    for piece in (piece for tensor in tensors for piece in _words(tensor).split(most)):
        if size + len(piece) > most:
            yield torch.cat(waiting)
            waiting, size = [], 0
        waiting.append(piece)
        size += len(piece)
    if waiting:
        yield torch.cat(waiting)


class Account(NamedTuple):
    """Description of one process's model; all descriptions are gathered if fingerprints differ.

    member: name of the process. kind: type of device; equal types compute bit-identical results. hashes: hash of
    each tensor. changed: names of buffers that were replaced or written to since training began.
    """

    member: str
    kind: str
    hashes: list[int]
    changed: set[str]


class Lockstep(Watch):
    """Compares parameters and persistent buffers of all processes at intervals and before every save.

    every: optimizer steps between comparisons; 0 disables them. On a GPU, compares fingerprints some steps after
    it computes them, so that the host need not wait. If fingerprints differ, all processes raise UnfitState, which
    names the tensors and ranks. If processes have different types of devices, they log a message instead.
    """

    def __init__(self, objective: nn.Module, strategy: Strategy, every: int) -> None:
        self._objective, self._strategy, self._every = objective, strategy, every
        self._num_copies = strategy.group.world_size // strategy.shard_size
        self._queue = queue_of(strategy.device)
        self._taken: deque[tuple[int, Callable[[], Any]]] = deque()
        self._left_out: set[str] = set()
        self._last_agreed: int | None = None
        self._is_on = False

    def remarks(self) -> list[str]:
        if self._every == 0 or self._num_copies > 1:
            return []
        return ["Every process has a different shard of the model, so --lockstep-every cannot compare ranks."]

    def begin(self, progress: Progress) -> None:
        self._is_on = self._every > 0 and self._num_copies > 1
        if self._is_on:
            self._fingerprint = Fingerprint(num_words(self._tensors().values()), self._strategy.device)
            buffers = persistent_buffers(self._objective)
            self._buffers = {name: (buffer, num_writes(buffer)) for name, buffer in buffers.items()}

    def after_step(self, progress: Progress, record: StepRecord | None, log: Log) -> None:
        if not self._is_on:
            return
        if progress.step % self._every == 0:
            self._taken.append((progress.step, self._queue.fetch(self._fingerprint.of(self._tensors().values()))))
        if self._taken and self._taken[0][0] + self._queue.lag <= progress.step:
            step, arrived = self._taken.popleft()
            self._compare(step, arrived(), progress.step, log)

    def before_save(self, step: int, log: Log) -> None:
        if self._is_on:
            self._taken.clear()
            self._compare(step, int(self._fingerprint.of(self._tensors().values())), step, log)

    def _compare(self, step: int, own: int, now: int, log: Log) -> None:
        """Compares all processes' fingerprints after a step. own: this process's fingerprint. now: the current step."""
        hashes = torch.zeros(self._strategy.group.world_size, dtype=torch.int64)
        hashes[self._strategy.group.rank] = own
        if not self._sides(self._strategy.group.sum(hashes).tolist()):
            self._last_agreed = step
            return
        for note in self._explain(step):
            log.say_of_ranks(now, note)

    def _tensors(self) -> dict[str, Tensor]:
        """Returns the tensors to compare, by name; for a sharded tensor, returns this process's shard."""
        named = {**dict(self._objective.named_parameters()), **persistent_buffers(self._objective)}
        kept = {
            name: tensor
            for name, tensor in named.items()
            if name not in self._left_out and tensor.layout == torch.strided
        }
        return dict(zip(kept, local_shards([*kept.values()]), strict=True))

    def _explain(self, step: int) -> list[str]:
        names, tensors = zip(*self._tensors().items(), strict=True)
        hashes = [int(self._fingerprint.of([tensor])) for tensor in tensors]
        group = self._strategy.group
        account = Account(group.describe_own(), arithmetic_of(group.device), hashes, self._changed())
        accounts = group.all_gather_object(account)
        of_tensor = zip(*(account.hashes for account in accounts), strict=True)
        different = {name: found for name, own in zip(names, of_tensor, strict=True) if (found := self._sides(own))}
        may_differ = different.keys() & set().union(*(account.changed for account in accounts))
        self._left_out |= may_differ
        drifted = {name: sides for name, sides in different.items() if name not in may_differ}
        kinds = {account.kind for account in accounts}
        if drifted and len(kinds) == 1:
            raise UnfitState(self._message(step, drifted, [account.member for account in accounts]))
        notes = []
        if changed := ", ".join(sorted(may_differ)):
            notes.append(f"The values of {changed} may differ between ranks, because forward passes update them.")
        if drifted:
            self._is_on = False
            notes.append(
                f"After optimizer step {step} the ranks are not bit-identical: {next(iter(drifted))} differs, because "
                f"their devices are of different kinds ({'; '.join(sorted(kinds))}). The ranks are no longer compared."
            )
        return notes

    def _changed(self) -> set[str]:
        return {
            name
            for name, buffer in persistent_buffers(self._objective).items()
            if name not in self._buffers or self._buffers[name][0] is not buffer
            or self._buffers[name][1] != num_writes(buffer)
        }  # fmt: skip

    def _sides(self, hashes: Sequence[int]) -> list[list[int]]:
        """Returns the ranks of the first shard whose hashes differ, by hash, smallest group first; [] if all agree."""
        for part in range(self._strategy.shard_size):
            ranks = range(part, len(hashes), self._strategy.shard_size)
            if len({hashes[rank] for rank in ranks}) > 1:
                by_hash: dict[int, list[int]] = {}
                for rank in ranks:
                    by_hash.setdefault(hashes[rank], []).append(rank)
                return sorted(by_hash.values(), key=len)
        return []

    def _message(self, step: int, drifted: Mapping[str, list[list[int]]], members: Sequence[str]) -> str:
        (first, sides), more = next(iter(drifted.items())), len(drifted) - 1
        *fewer, most = (_side(ranks, members) for ranks in sides)
        where = f"{first}{f' and {more} more' if more else ''}"
        since = f" (equal after step {self._last_agreed})" if self._last_agreed is not None else ""
        return (
            f"the ranks are no longer in lockstep: after optimizer step {step}{since} {where} differs on "
            f"{', and differently on '.join(fewer)} from {most}; this state is not saved, and the same command "
            "resumes from the newest checkpoint, at which all ranks agreed. If this recurs at other steps, the device "
            "or its memory may be faulty; if it recurs at this step, the task changes its model on one rank only; "
            "--lockstep-every 0 disables the comparison"
        )


def _side(ranks: Sequence[int], members: Sequence[str]) -> str:
    if len(ranks) > MOST_NAMED:
        return f"{len(ranks)} ranks"
    return " and ".join(f"rank {rank} ({members[rank]})" for rank in ranks)
