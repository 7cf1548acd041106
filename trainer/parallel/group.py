"""Interface to the processes of a run and their collectives."""

import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainer.common.errors import UserError
from trainer.common.process import own_name
from trainer.common.torch_private import when_cuda_is_initialised
from trainer.failure.diagnosis import Diagnosis
from trainer.failure.errors import EXIT_BAD_INPUT, Failure, print_refusal
from trainer.failure.heartbeat import CurrentActivity
from trainer.parallel.devices import device_label, usable_cores
from trainer.parallel.rendezvous import listed, refuse_differences

T = TypeVar("T")

_FOUR_LIMBS = struct.Struct("<4H")


class Group:
    """Connects this process with all processes of the run. This base class is for a single process.

    All processes must call the collective methods in the same order. Most of these methods exchange numbers and small
    objects in host memory; `Strategy.exchange` sums gradients.

    devices: devices of this process; the first one is PyTorch's current GPU. rank, world_size: as in torch.distributed.
    local_world_size: number of the run's processes on this machine. num_cores: number of CPU cores for this process,
    which shares cores with the other processes. is_launched: whether a launcher restarts all
    processes together, so that a single process cannot retry a step. num_idle_gpus: number of GPUs that this process
    sees but for which a launcher started no rank on this machine. exits_with_signal: whether a run stopped by signal
    n exits with status 128 + n, which torchrun would treat as a failure. activity: records what this process is doing.
    diagnosis: explains failures once for all processes.
    """

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    is_launched: bool = False
    num_idle_gpus: int = 0
    exits_with_signal: bool = True

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        self.use(devices)
        self.num_cores = len(usable_cores())
        self.activity = CurrentActivity()
        self.diagnosis = Diagnosis(self.activity)

    def use(self, devices: Sequence[torch.device]) -> None:
        """Sets this process's devices without initialising CUDA, so that the process can still fork workers."""
        self.devices = devices
        if devices and devices[0].type == "cuda":
            when_cuda_is_initialised(partial(torch.cuda.set_device, devices[0]))

    def check_devices(self) -> None:
        """Initialises CUDA. Raises UserError if ranks share a GPU under NCCL. All processes must call this method."""

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    @property
    def is_main(self) -> bool:
        """Returns whether this process is rank 0."""
        return self.rank == 0

    def describe_own(self) -> str:
        return f"{own_name()}, {', '.join(map(device_label, self.devices))}"

    # --- exchanges ---------------------------------------------------------------------------------------------------

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of a CPU tensor over processes, bitwise equal on every process."""
        return values

    def start_sum(self, values: Sequence[float]) -> Callable[[], Sequence[float]]:
        """Starts to sum a few numbers over processes; returns a function that waits for the sums and returns them."""
        return lambda: values

    def start_all_reduce(self, values: Tensor) -> Callable[[], None]:
        """Starts to sum a device tensor over processes in place; returns a function that waits for the sum."""
        return lambda: None

    def all_gather(self, values: Tensor) -> Tensor:
        """Stacks device tensors of equal shape from all processes, ordered by rank, along a new first dimension."""
        return values[None]

    def sum_in_tree(self, values: Tensor) -> None:
        """Sums a contiguous device tensor over processes in place, in a binary tree.

        Adds neighbouring ranks' tensors, then neighbouring sums, and so on; `world_size` must be a power of two.
        """

    def barrier(self) -> None:
        """Makes the host wait until all processes call this method; a wait on the device could not report a timeout."""

    def all_gather_object(self, value: T) -> list[T]:
        """Returns the values of all processes, ordered by rank, on every process."""
        return [value]

    def gather_object(self, value: T) -> list[T]:
        """Returns the values of all processes, ordered by rank, on rank 0, and [] on other ranks."""
        return [value]

    def on_main(self, function: Callable[[], T]) -> T:
        """Calls a function on rank 0 only; every process returns its result or raises its UserError."""
        return function()

    def together(self, function: Callable[[], T]) -> T:
        """Calls a function on every process; if any raises UserError, all raise it with the combined messages.

        A message of only some ranks begins with these ranks and their hosts.
        """
        result, refusal = result_or_refusal(function)
        lines = dict.fromkeys(str(refusal).split("\n")) if refusal is not None else {}
        sources: dict[str, list[str]] = {}
        for rank, (found, host) in enumerate(self.all_gather_object((lines, socket.gethostname()))):
            for line in found:
                sources.setdefault(line, []).append(f"{rank} on {host}")
        if sources:
            told = [
                line if len(ranks) == self.world_size else f"rank {listed(ranks)}: {line}"
                for line, ranks in sources.items()
            ]
            raise UserError("\n".join(told))
        return result  # type: ignore[return-value]

    def agrees(self, value: object) -> bool:
        """Returns whether all processes pass the same value; compares hashes of its `repr`."""
        if self.world_size == 1:
            return True
        limbs = _FOUR_LIMBS.unpack(blake2b(repr(value).encode(), digest_size=_FOUR_LIMBS.size).digest())
        numbers = [float(number) for h in limbs for number in (h, h * h)]
        sums = self.sum(torch.tensor(numbers, dtype=torch.float64)).tolist()
        # n numbers are equal if and only if n times the sum of their squares is the square of their sum.
        return all(self.world_size * squares == total**2 for total, squares in zip(sums[::2], sums[1::2], strict=True))

    def require_same(self, facts: Mapping[str, Any], advice: str) -> None:
        """Raises UserError on all processes if a value differs between a rank and rank 0.

        facts, advice: as in `refuse_differences`.
        """
        if not self.agrees(facts):
            refuse_differences(self.all_gather_object(dict(facts)), advice)

    @property
    def num_exchanges(self) -> int:
        """Returns the number of device collectives so far, including collectives inside a forward pass."""
        return 0

    # --- the end -----------------------------------------------------------------------------------------------------

    def can_replace_rank0(self, lost: Sequence[int], has_state: bool) -> bool:
        """Returns whether this process may save after a failure: as rank 0, or in place of an exited rank 0.

        lost: ranks that have exited or do not respond; lost ranks on this machine are killed, because a suspended
        process would keep its locks. has_state: whether this process holds the full state. May wait until rank 0 exits.
        """
        return self.is_main

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context for all use of the devices: if a process fails, one process prints the error, and all raise Failure.

        Prints the error before `close`, which may wait for other processes.
        """
        try:
            with self.diagnosis.explaining():
                yield
        except UserError as error:
            if self.is_main and self.diagnosis.prints:
                print_refusal(error)
            raise Failure(str(error), EXIT_BAD_INPUT) from None
        finally:
            self.close()

    def close(self) -> None:
        """Leaves the process group, if there is one."""


def require_shape(name: str, found: Sequence[int], expected: Sequence[int], where: str = "") -> None:
    """Raises UserError if a summed output's shape differs between batches or ranks. where: names the rank, if known."""
    if found != expected:
        raise UserError(
            f"forward returned the sum {name!r} with different shapes, {tuple(expected)} and {tuple(found)}{where}; "
            "a sum must have the same shape in all batches and on all ranks"
        )


def result_or_refusal(function: Callable[[], T]) -> tuple[T | None, UserError | None]:
    """Calls a function; returns (result, None), or (None, error) if it raises UserError."""
    try:
        return function(), None
    except UserError as error:
        return None, error
