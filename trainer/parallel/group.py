"""The processes of a run, and what they tell each other: the interface, and its form for one process."""

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
from trainer.parallel.devices import device_label
from trainer.parallel.meeting import refuse_differences

T = TypeVar("T")

_FOUR_LIMBS = struct.Struct("<4H")


class Group:
    """The processes of a run, as one of them sees them. This form has one process, and exchanges nothing.

    Every method that exchanges is called by all processes, in the same order. What goes over the host carries numbers
    and small objects; gradients travel by `Strategy.exchange` alone.

    devices: the devices that this process feeds; the first one is torch's current GPU, for what names none. rank,
    world_size: this process among the processes of the run. local_world_size: processes of this run on this machine.
    is_launched: whether a launcher waits for the exit status of this process and starts it again with the others,
    without whom it cannot try a step again. exits_with_signal: whether that launcher is this trainer's own, to which a
    signal in the exit status is no failure. activity: what this process is doing, which the loop says. diagnosis:
    explains why the run ends, once for all processes.
    """

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    is_launched: bool = False
    exits_with_signal: bool = True

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        self.use(devices)
        self.activity = CurrentActivity()
        self.diagnosis = Diagnosis(self.activity)

    def use(self, devices: Sequence[torch.device]) -> None:
        """Feeds these devices from now on. CUDA is not initialised by that, so processes may still be forked."""
        self.devices = devices
        if devices and devices[0].type == "cuda":
            when_cuda_is_initialised(partial(torch.cuda.set_device, devices[0]))

    def check_devices(self) -> None:
        """Raises UserError, on all processes, for GPUs that cannot train together. All call it; CUDA is initialised."""

    @property
    def device(self) -> torch.device:
        """The first of the devices of this process."""
        return self.devices[0]

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0."""
        return self.rank == 0

    def describe_own(self) -> str:
        """This process and its devices, as a message names them."""
        return f"{own_name()}, {', '.join(map(device_label, self.devices))}"

    # --- exchanges ---------------------------------------------------------------------------------------------------

    def sum(self, values: Tensor) -> Tensor:
        """Sum over processes of a CPU tensor; the same bits on every process."""
        return values

    def start_sum(self, values: Sequence[float]) -> Callable[[], Sequence[float]]:
        """Starts the sum over processes of a few numbers; the function that it returns waits for the sum."""
        return lambda: values

    def start_sum_in_place(self, values: Tensor) -> Callable[[], None]:
        """Starts the sum over processes of a tensor on this process's device, beside gradients.

        The function that it returns waits for the sum.
        """
        return lambda: None

    def stack(self, values: Tensor) -> Tensor:
        """(world_size, ...): a tensor of every process on its device, equally shaped on all, in order of rank."""
        return values[None]

    def sum_in_tree(self, values: Tensor) -> None:
        """Sum over processes of a contiguous tensor on this process's device, in place.

        Neighbours are added, then neighbouring pairs, and so on: the number of processes is a power of two.
        """

    def barrier(self) -> None:
        """Waits on the host until all processes are here, where the devices would wait for each other in silence."""

    def gather(self, value: T) -> list[T]:
        """The value of every process, in order of rank, on every process."""
        return [value]

    def gather_on_main(self, value: T) -> list[T]:
        """The value of every process, in order of rank, on rank 0; nothing on the others."""
        return [value]

    def on_main(self, function: Callable[[], T]) -> T:
        """Calls the function on rank 0 only; its result, or its UserError, reaches every process."""
        return function()

    def together(self, function: Callable[[], T]) -> T:
        """Calls the function on every process. If any of them raises UserError, all raise what was said."""
        result, refusal = result_or_refusal(function)
        refusals = dict.fromkeys(str(error) for error in self.gather(refusal) if error is not None)
        if refusals:
            raise UserError("\n".join(refusals))
        return result  # type: ignore[return-value]

    def agrees(self, value: object) -> bool:
        """Whether all processes give the same value, by a hash of its text."""
        if self.world_size == 1:
            return True
        limbs = _FOUR_LIMBS.unpack(blake2b(repr(value).encode(), digest_size=_FOUR_LIMBS.size).digest())
        numbers = [float(number) for h in limbs for number in (h, h * h)]
        sums = self.sum(torch.tensor(numbers, dtype=torch.float64)).tolist()
        # All of n numbers are the same where n times the sum of their squares is the square of their sum.
        return all(self.world_size * squares == total**2 for total, squares in zip(sums[::2], sums[1::2], strict=True))

    def require_same(self, facts: Mapping[str, Any], advice: str) -> None:
        """Raises UserError, on all processes, where one states another value for a name than rank 0.

        facts: plain values by name; what only one of both states is not compared. advice: what the user is to do.
        """
        if not self.agrees(facts):
            refuse_differences(self.gather(dict(facts)), advice)

    @property
    def num_exchanges(self) -> int:
        """Of tensors on devices, which a forward makes by itself, too."""
        return 0

    # --- the end -----------------------------------------------------------------------------------------------------

    def can_replace_rank0(self, lost: Sequence[int], has_state: bool) -> bool:
        """Once the run has failed: whether this process is rank 0, or has outlived it, and may do its work.

        lost: ranks that are gone, or give no sign of life; those of this machine are ended, for a stopped one would
        keep its locks. has_state: whether this process could do the work at all. Waits for the end of rank 0 where
        that is about to leave too.
        """
        return self.is_main

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Around what is done with the devices. One process tells what goes wrong, and Failure ends all of them.

        The user is told before this process takes the time to close, for the others wait until then.
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
        """Leaves the group of processes."""


def require_shape(name: str, found: Sequence[int], expected: Sequence[int], where: str = "") -> None:
    """Raises UserError for a sum whose shape differs from the shape before, or on another rank."""
    if found != expected:
        raise UserError(
            f"forward returns the sum {name!r} in the shape {tuple(found)}{where}, and returned it in the shape "
            f"{tuple(expected)} before: a sum has one shape in all batches and on all ranks, or it cannot be added up"
        )


def result_or_refusal(function: Callable[[], T]) -> tuple[T | None, UserError | None]:
    """(result, None), or (None, the UserError that was raised)."""
    try:
        return function(), None
    except UserError as error:
        return None, error
