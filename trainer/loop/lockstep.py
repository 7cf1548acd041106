"""Whether the processes still have the same model: fingerprints of it, compared while training goes on."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.common.errors import UnfitState
from trainer.common.torch_private import num_writes
from trainer.loop.fingerprint import Fingerprint, num_words
from trainer.loop.host_copy import Arrival
from trainer.loop.step_results import GROUP_SIZE
from trainer.parallel.base import Parallel
from trainer.parallel.module_state import persistent_buffers
from trainer.parallel.parts import local_shards

LIMBS, LIMB_BITS = 4, 16
MOST_NAMED = 4
"""Ranks that hold the same."""


class Account(NamedTuple):
    """What a process says of its model when they differ.

    member, kind: process and device; arithmetic of one kind gives the same bits. hashes: of each tensor. changed: names
    of buffers that something has changed since training began.
    """

    member: str
    kind: str
    hashes: list[int]
    changed: set[str]


class Lockstep:
    """Compares the parameters and persistent buffers of all processes at intervals, and before every save.

    every: optimizer steps; 0 compares nothing. Nobody waits for it: the fingerprint goes along with the numbers that a
    step exchanges anyway, on a GPU once it has long since arrived. Those are added up, so the limbs h of a fingerprint
    travel with their squares: of n processes all have the same where n times the sum of the squares is the square of
    the sum (Cauchy and Schwarz), exactly, in float64 for up to 2^21 processes.

    Which tensors differ on which ranks is found out only then. All methods are called by all processes at the same
    step; notes are for the user.
    """

    def __init__(self, objective: nn.Module, parallel: Parallel, every: int) -> None:
        self._objective, self._parallel, self._every = objective, parallel, every
        self._num_copies = parallel.world_size // parallel.shard_size
        self._delay = 0 if parallel.device.type == "cpu" else GROUP_SIZE
        self._taken: deque[tuple[int, Arrival]] = deque()
        self._sent: deque[int] = deque()
        self._left_out: set[str] = set()
        self._last_agreed: int | None = None
        self._is_on = False

    def remarks(self) -> list[str]:
        """What the user should know of it before training."""
        if self._every == 0 or self._parallel.world_size == 1 or self._num_copies > 1:
            return []
        return ["Every process has a part of the model that no other has: they cannot be compared (--lockstep-every)."]

    def begin(self) -> None:
        """Before the first step of this process."""
        self._is_on = self._every > 0 and self._num_copies > 1
        if self._is_on:
            self._fingerprint = Fingerprint(num_words(self._tensors().values()), self._parallel.device)
            buffers = persistent_buffers(self._objective)
            self._buffers = {name: (buffer, num_writes(buffer)) for name, buffer in buffers.items()}

    def after_step(self, step: int) -> None:
        """Takes the fingerprint where it is due. step: optimizer steps done."""
        if self._is_on and step % self._every == 0:
            self._taken.append((step, Arrival(self._fingerprint.of(self._tensors().values()))))

    def numbers_to_add(self, step: int) -> tuple[float, ...]:
        """What goes along with the exchange that starts after so many steps; see `compare`."""
        if not self._taken or self._taken[0][0] + self._delay > step:
            return ()
        taken, fingerprint = self._taken.popleft()
        self._sent.append(taken)
        return self._limbs(fingerprint.content())

    def compare(self, sums: Sequence[float]) -> list[str]:
        """sums: over all processes, of what `numbers_to_add` gave. Returns notes.

        Raises UnfitState if the processes have drifted apart.
        """
        return self._judge(self._sent.popleft(), sums) if sums and self._is_on else []

    def compare_now(self, step: int) -> list[str]:
        """The same of this moment, which takes an exchange, and a wait for the device."""
        if not self._is_on:
            return []
        self._taken.clear()
        own = int(self._fingerprint.of(self._tensors().values()))
        return self._judge(step, self._parallel.start_sum(self._limbs(own))())

    def _tensors(self) -> dict[str, Tensor]:
        """What is compared, by its name, as far as this process has it."""
        named = {**dict(self._objective.named_parameters()), **persistent_buffers(self._objective)}
        kept = {
            name: tensor
            for name, tensor in named.items()
            if name not in self._left_out and tensor.layout == torch.strided
        }
        return dict(zip(kept, local_shards([*kept.values()]), strict=True))

    def _limbs(self, fingerprint: int) -> tuple[float, ...]:
        """With their squares, in the place of this process's part of the model."""
        shard_size = self._parallel.shard_size
        limbs = [(fingerprint >> LIMB_BITS * i) % 2**LIMB_BITS for i in range(LIMBS)]
        numbers = [[0.0] * 2 * LIMBS for _ in range(shard_size)]
        numbers[self._parallel.rank % shard_size] = [float(number) for h in limbs for number in (h, h * h)]
        return tuple(number for part in numbers for number in part)

    def _judge(self, step: int, sums: Sequence[float]) -> list[str]:
        pairs = zip(map(int, sums[::2]), map(int, sums[1::2]), strict=True)
        if all(self._num_copies * squares == total**2 for total, squares in pairs):
            self._last_agreed = step
            return []
        return self._explain(step)

    def _explain(self, step: int) -> list[str]:
        names, tensors = zip(*self._tensors().items(), strict=True)
        hashes = [int(self._fingerprint.of([tensor])) for tensor in tensors]
        parallel = self._parallel
        accounts = parallel.gather(Account(parallel.describe_own(), _kind(parallel.device), hashes, self._changed()))
        of_tensor = zip(*(account.hashes for account in accounts), strict=True)
        different = {name: found for name, own in zip(names, of_tensor, strict=True) if (found := self._sides(own))}
        may_differ = different.keys() & set().union(*(account.changed for account in accounts))
        self._left_out |= may_differ
        drifted = {name: sides for name, sides in different.items() if name not in may_differ}
        kinds = {account.kind for account in accounts}
        if drifted and len(kinds) == 1:
            raise UnfitState(self._message(step, drifted, [account.member for account in accounts]))
        notes = []
        if may_differ:
            notes.append(f"Not compared between ranks, since forwards change it: {', '.join(sorted(may_differ))}.")
        if drifted:
            self._is_on = False
            notes.append(
                f"The ranks no longer have the same bits after optimizer step {step}, first in {next(iter(drifted))}: "
                f"their devices are of different kinds ({'; '.join(sorted(kinds))}), whose arithmetic may differ in "
                "the last bits. They are not compared any more."
            )
        return notes

    def _changed(self) -> set[str]:
        """Buffers that are not what and as they were before training."""
        return {
            name
            for name, buffer in persistent_buffers(self._objective).items()
            if name not in self._buffers or self._buffers[name][0] is not buffer
            or self._buffers[name][1] != num_writes(buffer)
        }  # fmt: skip

    def _sides(self, hashes: Sequence[int]) -> list[list[int]]:
        """Ranks that have the same part of a tensor, but not alike: those that do, together. The fewest first."""
        for part in range(self._parallel.shard_size):
            ranks = range(part, len(hashes), self._parallel.shard_size)
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
        since = f" (after step {self._last_agreed} they were the same)" if self._last_agreed is not None else ""
        return (
            f"the ranks are no longer in lockstep: after optimizer step {step}{since} {where} held other bits on "
            f"{', others again on '.join(fewer)} than on {most}; nothing of it is saved, and the same command goes on "
            "from the newest checkpoint, before which they agreed. If it comes again at other steps, that device or "
            "its memory may be faulty; if at the same one, the task changes its model on one rank alone; "
            "--lockstep-every 0 compares nothing"
        )


def _side(ranks: Sequence[int], members: Sequence[str]) -> str:
    if len(ranks) > MOST_NAMED:
        return f"{len(ranks)} ranks"
    return " and ".join(f"rank {rank} ({members[rank]})" for rank in ranks)


def _kind(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.backends.cpu.get_cpu_capability()} and {torch.get_num_threads()} thread(s)"
