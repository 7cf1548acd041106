"""How a run is spread over devices: the interface that everything outside sees, and its form for one device."""

import random
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from trainer.common.errors import UserError, reason
from trainer.common.process import own_name
from trainer.loading.batches import Batch
from trainer.parallel.activity import CurrentActivity
from trainer.parallel.devices import device_label
from trainer.parallel.diagnosis import Diagnosis
from trainer.parallel.errors import EXIT_BAD_INPUT, Failure, print_refusal
from trainer.parallel.meeting import refuse_differences
from trainer.parallel.optimizer_states import (
    lay_out_as_parameters,
    load_state,
    refuse_other_entries,
    sizes,
    state_of,
    with_settings_of,
)
from trainer.task import Objective

T = TypeVar("T")

_SIX_NUMBERS, _FOUR_LIMBS = struct.Struct("<6q"), struct.Struct("<4H")


class Parallel:
    """How the run is spread over devices. Everything outside sees only this interface.

    devices: those that this process feeds; the model lives on the first one. gradient_divisor: what the wrapper divides
    summed gradients by. exchanges_in_forward: whether every forward waits for the other processes, so that all must
    make equally many. local_world_size: processes of this run on this machine. shard_size: processes of consecutive
    ranks that have one copy of the parameters between them. is_launched: whether a launcher waits for the exit status
    of this process, and starts it again with the others, without whom it cannot try a step again. exits_with_signal:
    whether that launcher is this trainer's own, to which a signal in the exit status is no failure. has_full_state:
    whether this process has all that a checkpoint holds, and can save after a failure without others. draws_on_host:
    whether forwards draw from the generators of Python or numpy, as some do that leave out layers or mask their inputs.
    activity: what this process is doing; the loop says so.
    """

    rank: int = 0
    world_size: int = 1
    gradient_divisor: int = 1
    exchanges_in_forward: bool = False
    local_world_size: int = 1
    shard_size: int = 1
    is_launched: bool = False
    exits_with_signal: bool = True
    has_full_state: bool = True
    draws_on_host: bool = False

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        self.use(devices)
        self.activity = CurrentActivity()
        self.diagnosis = Diagnosis(self.activity)

    def use(self, devices: Sequence[torch.device]) -> None:
        """Feeds these devices from now on. The first one is torch's current GPU, for what names none."""
        self.devices = devices
        if devices and devices[0].type == "cuda":
            torch.cuda.set_device(devices[0])

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    @property
    def num_replicas(self) -> int:
        return len(self.devices)

    @property
    def num_devices(self) -> int:
        return self.num_replicas * self.world_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def device_kind(self) -> str:
        """What the devices of this process are called by their maker."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type

    def keeping_generators(self) -> AbstractContextManager[None]:
        """Within it torch's generators may be drawn from; after it they are where they were."""
        return torch.random.fork_rng([device for device in self.devices if device.type == "cuda"])

    def describe(self) -> str:
        """The devices, in a few words. All processes call it."""
        return ", ".join(map(device_label, self.devices))

    def describe_own(self) -> str:
        """This process and its devices."""
        return f"{own_name()}, {', '.join(map(device_label, self.devices))}"

    def place(
        self,
        build: Callable[[], Objective],
        blocks: Callable[[nn.Module], Sequence[nn.Module]],
        complete: Callable[[Objective], None],
    ) -> Objective:
        """A new objective, alike on every process and where training needs it. All processes call it.

        build: makes it on the CPU, alike everywhere. blocks: of its model; see `Task.blocks`. complete: gives it what
        it takes from elsewhere. Raises UserError.
        """
        objective = build().to(self.device)
        self.together(lambda: complete(objective))
        return objective

    def wrap(self, net: nn.Module) -> nn.Module:
        """The module that training calls in a phase, whose parameters alone require gradients now."""
        return net

    def build_buckets(self, net: nn.Module) -> None:
        """After the first backward of a wrapped module: what its wrapper arranges once, with the other processes."""

    def evaluation_module(self, net: nn.Module) -> nn.Module:
        """The module that evaluation calls: without gradient hooks, but on all devices of this process."""
        return net

    def unsharded(self, objective: Objective) -> AbstractContextManager[None]:
        """Within it every process has the whole parameters, for what computes with the model in its own ways.

        It may read them, and without exchanges. Whoever calls it has all processes call it.
        """
        return nullcontext()

    def to_device(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def gradient_sync(self, net: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Around forward and backward: whether this backward adds up gradients over processes."""
        return nullcontext()

    def mark_comm_start(self, loss: Tensor) -> None:
        """Before the backward in which gradients travel: has `activity` see where this process has done its part."""

    def sum(self, values: Tensor) -> Tensor:
        """Sum over processes of a CPU tensor; the same bits on every process."""
        return values

    def start_sum(self, values: Sequence[float]) -> Callable[[], Sequence[float]]:
        """The same for a few numbers, without waiting: the function that it returns waits for the sum."""
        return lambda: values

    def barrier(self) -> None:
        """Before the host waits for the device, whose work may wait for that of other processes: all are there."""

    def start_sum_in_place(self, values: Tensor) -> Callable[[], None]:
        """Sum over processes of a tensor on this process's device, carried by what carries gradients.

        Without waiting: the function that it returns waits for the sum.
        """
        return lambda: None

    def gather(self, value: T) -> list[T]:
        """The value of every process, on every process."""
        return [value]

    def gather_on_main(self, value: T) -> list[T]:
        """The value of every process, in order of rank, on the main one; nothing on the others."""
        return [value]

    def agrees(self, value: object) -> bool:
        """Whether all processes give the same, by a hash of its text. All processes call it."""
        if self.world_size == 1:
            return True
        limbs = _FOUR_LIMBS.unpack(blake2b(repr(value).encode(), digest_size=_FOUR_LIMBS.size).digest())
        numbers = [float(number) for h in limbs for number in (h, h * h)]
        sums = self.sum(torch.tensor(numbers, dtype=torch.float64)).tolist()
        # All of n numbers are the same where n times the sum of their squares is the square of their sum.
        return all(self.world_size * squares == total**2 for total, squares in zip(sums[::2], sums[1::2], strict=True))

    def require_same(self, facts: Mapping[str, Any], advice: str) -> None:
        """Raises UserError, on all processes, where one states another value for a name than the main one.

        facts: plain values by name; what one of both does not state is not compared. advice: what the user is to do.
        All processes call it.
        """
        if not self.agrees(facts):
            refuse_differences(self.gather(dict(facts)), advice)

    def together(self, function: Callable[[], T]) -> T:
        """Calls the function on every process. If any of them raises UserError, all raise what was said."""
        result, refusal = result_or_refusal(function)
        refusals = dict.fromkeys(str(error) for error in self.gather(refusal) if error is not None)
        if refusals:
            raise UserError("\n".join(refusals))
        return result  # type: ignore[return-value]

    def on_main(self, function: Callable[[], T]) -> T:
        """Calls the function on the main process alone; its result, or its UserError, reaches every process."""
        return function()

    def can_replace_rank0(self, lost: Sequence[int]) -> bool:
        """Once the run has failed: whether this process is the main one, or has outlived it, and may do its work.

        lost: ranks that are gone, or give no sign of life; those of this machine are ended, for a stopped one would
        keep its locks. Waits for the end of the main process where that is about to leave too.
        """
        return self.is_main

    def from_main(self, value: Tensor) -> Tensor:
        """The main process's value on this process's device, contiguous. Of the others' only shape and type count."""
        return value

    def sync_buffers(self, objective: nn.Module) -> None:
        """Gives every process the persistent buffers of the main one, before evaluating and saving. All call it."""

    def agree_on_gradients(self, params: Sequence[Tensor]) -> None:
        """After the last backward of a step, which trains `params`: all have gradients of the same ones of them."""

    def global_norm(self, own: Tensor) -> Tensor:
        """The norm of the whole gradient from that of the `local_shards` of this process. All processes call it."""
        return own

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raises UserError for one that cannot train what this process has of the parameters."""

    def seed_dropout(self, *key: int, same_everywhere: bool = False) -> None:
        """Makes what follows on all generators a function of the key, of this process and of the device.

        Of those of Python and numpy where `draws_on_host`, for to seed them takes longer than torch's.

        key: five numbers. same_everywhere: a function of the key alone.
        """
        packed = _SIX_NUMBERS.pack(*key, 0 if same_everywhere else self.rank)
        seed = int.from_bytes(blake2b(packed, digest_size=7).digest(), "little")
        torch.default_generator.manual_seed(seed)
        if self.draws_on_host:
            random.seed(seed)
            np.random.seed(seed % 2**32)
        for replica, device in enumerate(self.devices):
            if device.type == "cuda":
                torch.cuda.default_generators[device.index].manual_seed(seed + replica * (not same_everywhere))

    def load_on_main(self, function: Callable[[], T], large: Collection[str]) -> T:
        """As `on_main`, for what holds checkpoints: of the entries named large the others get the shapes of tensors."""
        return self.on_main(function)

    def full_weights(self, model: nn.Module, instead: Mapping[Tensor, Tensor] | None = None) -> dict[str, Any]:
        """The state of a model, whole on the main process. All processes call it.

        instead: other tensors for some of its parameters.
        """
        weights = model.state_dict(keep_vars=True)
        for name, value in weights.items():
            weights[name] = (instead or {}).get(value, value).detach()
        return weights

    def full_state(
        self, objective: Objective, optimizers: Mapping[str, Sequence[torch.optim.Optimizer]]
    ) -> dict[str, Any]:
        """Weights and moments, without any wrapper's prefix, whole on the main process. All processes call it."""
        return {
            "model": self.full_weights(objective.model),
            "optimizers": {
                phase: [self.full_moments(state_of(each)) for each in several] for phase, several in optimizers.items()
            },
        }

    def full_moments(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state of an optimizer, whole on the main process."""
        return state

    def own_moments(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What an optimizer of this process takes of `full_moments`."""
        return state

    def load_weights(self, weights: Mapping[str, Tensor], model: nn.Module) -> None:
        """Those of a `full_state`, or some of them; the others stay as they are. All processes call it."""
        model.load_state_dict(weights, strict=False)

    def load_moments(
        self,
        state: Mapping[str, Any],
        optimizers: Mapping[str, Sequence[torch.optim.Optimizer]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Loads the moments of a `full_state`. Raises UserError for moments of optimizers that train other parameters.

        dtype: of the parameters when it was saved.
        """
        for phase, several in optimizers.items():
            saved = state.get(phase, [])
            own = [optimizer.state_dict() for optimizer in several]
            if sizes(saved) != sizes(own):
                raise UserError(
                    f"the optimizers of phase {phase!r} have parameter groups of {sizes(own)} tensors, and those of "
                    f"the checkpoint {sizes(saved)}: undo what changed the parameter groups or the optimizers, or "
                    "begin with its weights alone by --init-from"
                )
            for optimizer, its_saved, its_own in zip(several, saved, own, strict=True):
                refuse_other_entries(phase, its_saved, its_own, optimizer)
                moments = self.own_moments(with_settings_of(its_own, its_saved), optimizer)
                try:
                    load_state(optimizer, moments, dtype)
                except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
                    raise UserError(
                        f"the {type(optimizer).__name__} of phase {phase!r} cannot take its state from the checkpoint: "
                        f"{reason(error)}; undo what changed the optimizers, or begin with the weights alone by "
                        "--init-from"
                    ) from None
                lay_out_as_parameters(optimizer)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Around what is done with the devices. What goes wrong is told by one process, and ends all by Failure.

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


class SingleDevice(Parallel):
    """The identity."""

    def __init__(self, device: torch.device) -> None:
        super().__init__([device])


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
