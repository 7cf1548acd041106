"""How a model is spread over the devices of a run: the interface, and its form for one device."""

import random
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from trainer.common.tensors import map_tensors
from trainer.loading.batches import Batch
from trainer.parallel.devices import device_label
from trainer.parallel.flat_gradients import FlatGradients
from trainer.parallel.group import Group
from trainer.parallel.optimizer_states import load_states, state_of
from trainer.task import Objective

T = TypeVar("T")

SMALLEST_UPLOAD, LARGEST_UPLOAD = 2**18, 2**26
"""Bytes of a batch that is copied to a GPU ahead of its use, beside what that computes."""
COUNTED = ("index", "weight")
"""Parts of a batch that the host reads."""
_SIX_NUMBERS = struct.Struct("<6q")


class Strategy:
    """Where the model lives, how its gradients travel, and how its state becomes one checkpoint.

    This form is the identity: one process, whose devices each see the whole model. In a step the loop calls
    `seed_dropout`, `to_device` and the wrapped module for each micro-batch, the backwards within `gradient_sync`, and
    `exchange` once, after the last backward. Before `exchange` a gradient is of this process's samples, or has been
    summed already while the backward went on; after it, it is of the global batch, and the same bits on every process
    that has it.

    group: the processes of the run. num_parts: into which every global batch is cut, whatever the devices, a multiple
    of the number of processes, both powers of two; 0 where each process has one share of it. gradient_divisor: what the
    exchange divides summed gradients by, and the loss is multiplied by before. overlaps: whether gradients travel while
    the last backward of a step goes on, unless `gradient_sync` is disabled. exchanges_in_forward: whether every forward
    waits for the other processes, so that all must make equally many. shard_size: processes of consecutive ranks that
    have one copy of the parameters between them. has_full_state: whether this process has all that a checkpoint holds,
    and can save after a failure without others. draws_on_host: whether forwards draw from generators of the host, as
    some do that leave out layers or mask their inputs: Python's or numpy's, or torch's where the model is on a GPU.
    """

    gradient_divisor: int = 1
    overlaps: bool = False
    exchanges_in_forward: bool = False
    shard_size: int = 1
    has_full_state: bool = True
    draws_on_host: bool = False

    def __init__(self, group: Group, num_parts: int = 0) -> None:
        self.group, self.num_parts = group, num_parts
        self._uploads: torch.cuda.Stream | None = None

    @property
    def devices(self) -> Sequence[torch.device]:
        """The devices that this process feeds. The model lives on the first one."""
        return self.group.devices

    @property
    def device(self) -> torch.device:
        """Where the model of this process lives."""
        return self.group.device

    @property
    def num_replicas(self) -> int:
        """Devices of this process, among which it divides each micro-batch."""
        return len(self.devices)

    @property
    def num_devices(self) -> int:
        """Devices of all processes."""
        return self.num_replicas * self.group.world_size

    @property
    def device_kind(self) -> str:
        """What the devices of this process are called by their maker."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type

    @property
    def shards(self) -> Sequence[tuple[int, int]]:
        """What this process computes of each global batch and data set: of each shard its number and of how many.

        Consecutive ones: the tree in which parts are added is first one over those of a process.
        """
        num_shards = self.num_parts or self.group.world_size
        num_own = num_shards // self.group.world_size
        return [(self.group.rank * num_own + own, num_shards) for own in range(num_own)]

    def describe(self) -> str:
        """The devices, in a few words. All processes call it."""
        return ", ".join(map(device_label, self.devices))

    # --- the model ---------------------------------------------------------------------------------------------------

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
        self.group.together(lambda: complete(objective))
        return objective

    def wrap(self, net: nn.Module) -> nn.Module:
        """The module that training calls in a phase, whose parameters alone require gradients now."""
        return net

    def evaluation_module(self, net: nn.Module) -> nn.Module:
        """The module that evaluation calls: without gradient hooks, but on all devices of this process."""
        return net

    def unsharded(self, objective: Objective) -> AbstractContextManager[None]:
        """Within it every process has the whole parameters, for what computes with the model in its own ways.

        It may read them, without exchanges. All processes enter it.
        """
        return nullcontext()

    def to_device(self, batch: Batch) -> Batch:
        """The batch where the wrapped module takes it; its copies need not have arrived yet."""
        device = self.group.devices[0]
        if device.type == "cpu":
            return batch
        return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}

    def upload(self, batch: Batch) -> Batch:
        """The batch with its large tensors on their way to the device, while that computes; see `to_device`.

        What is launched from now on waits for them. Left as it is: a batch so small that its copies hardly take time,
        or so large that one ahead of its use would take memory from the model, and what the host counts by.
        """
        device = self.device
        if device.type != "cuda":
            return batch
        if not SMALLEST_UPLOAD <= sum(value.nbytes for value in batch.values() if not value.is_cuda) <= LARGEST_UPLOAD:
            return batch
        self._uploads = self._uploads or torch.cuda.Stream(device)
        current = torch.cuda.current_stream(device)
        try:
            with torch.cuda.stream(self._uploads):
                sent = {
                    name: value.to(device, non_blocking=True) for name, value in batch.items() if name not in COUNTED
                }
        except torch.OutOfMemoryError:
            return batch
        current.wait_stream(self._uploads)
        for tensor in sent.values():
            tensor.record_stream(current)  # or its memory might be used for the next batch before this stream is done
        return {name: sent.get(name, value) for name, value in batch.items()}

    def seed_dropout(self, *key: int, same_everywhere: bool = False) -> None:
        """Makes what follows on all generators a function of the key, of this process and of the device.

        The generators of Python and numpy follow only where `draws_on_host`: seeding them takes longer than torch's.

        key: five numbers, the last one of a micro-batch; of a part it is made its number among all parts, and the
        process does not count. same_everywhere: a function of the key alone.
        """
        if self.num_parts and not same_everywhere:
            key, same_everywhere = (*key[:-1], self.shards[key[-1]][0]), True
        packed = _SIX_NUMBERS.pack(*key, 0 if same_everywhere else self.group.rank)
        seed = int.from_bytes(blake2b(packed, digest_size=7).digest(), "little")
        torch.default_generator.manual_seed(seed)
        if self.draws_on_host:
            random.seed(seed)
            np.random.seed(seed % 2**32)
        for replica, device in enumerate(self.group.devices):
            if device.type == "cuda":
                torch.cuda.default_generators[device.index].manual_seed(seed + replica * (not same_everywhere))

    def places_in_generators(self) -> tuple[Any, ...]:
        """How far the generators have come by which forwards draw on the host."""
        numpy_state: Any = np.random.get_state()
        of_torch = b"" if self.device.type == "cpu" else torch.default_generator.get_state().numpy().tobytes()
        return random.getstate()[1][-1], numpy_state[2], of_torch

    @contextmanager
    def keeping_generators(self) -> Iterator[None]:
        """Within it all generators may be drawn from; after it they are where they were."""
        of_python, of_numpy = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng([device for device in self.devices if device.type == "cuda"]):
                yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def gradient_sync(self, net: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a wrapped module. enabled: whether this backward is the last one of a step.

        Where gradients travel while the backward goes on, they do so in the last one only.
        """
        return nullcontext()

    def exchange(self, params: Sequence[Tensor]) -> None:
        """After the last backward of a step: the one place where gradients travel, or where they have arrived.

        params: all that the step trains. Afterwards each has the gradient of the global batch in `grad`, or None where
        no process has one. All processes call it.
        """

    def flat_gradients(self, params: Sequence[Tensor]) -> FlatGradients:
        """Flat buffers for the gradients of a phase, in which `exchange` sums them where it sums flat buffers."""
        return FlatGradients(params)

    def build_buckets(self, net: nn.Module) -> None:
        """After the first backward of a wrapped module, which is no part of a step: what is arranged once."""

    def global_norm(self, own: Tensor) -> Tensor:
        """The norm of the whole gradient from the norm of this process's `local_shards`. All processes call it."""
        return own

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raises UserError for one that cannot train what this process has of the parameters."""

    # --- a checkpoint and back ---------------------------------------------------------------------------------------

    def from_main(self, value: Tensor) -> Tensor:
        """Rank 0's value on this process's device, contiguous. Only the shape and type of the others' count."""
        return value

    def sync_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives every process the tensors of rank 0, as buffers before evaluating and saving. All processes call it.

        tensors: by name. Raises UserError on all of them where one has others, of other shapes or of other types.
        """

    def load_on_main(self, function: Callable[[], T], large: Collection[str]) -> T:
        """As `Group.on_main`, for checkpoints: of the entries named large the others get only the shapes of tensors."""
        return self.group.on_main(function)

    def full_weights(self, model: nn.Module, instead: Mapping[Tensor, Tensor] | None = None) -> dict[str, Any]:
        """The state of a model, whole on rank 0. All processes call it.

        instead: other tensors for some of its parameters.
        """
        weights = model.state_dict(keep_vars=True)
        found: dict[Tensor, Tensor] = {}  # a tied one stays one
        for name, own in weights.items():
            value = (instead or {}).get(own, own)
            if value not in found:
                found[value] = self.whole(value.detach())
            weights[name] = found[value]
        return weights

    def full_state(
        self, objective: Objective, optimizers: Mapping[str, Sequence[torch.optim.Optimizer]]
    ) -> dict[str, Any]:
        """Weights and moments, without any wrapper's prefix, whole on rank 0. All processes call it."""
        return {
            "model": self.full_weights(objective.model),
            "optimizers": {
                phase: [map_tensors(state_of(each), self.whole) for each in several]
                for phase, several in optimizers.items()
            },
        }

    def whole(self, value: Tensor) -> Tensor:
        """A tensor of a state, whole on rank 0. All processes call it."""
        return value

    def own_moments(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What an optimizer of this process takes of its state in a `full_state`."""
        return state

    def load_weights(self, weights: Mapping[str, Tensor], model: nn.Module) -> None:
        """Gives a model some weights of a `full_state`; the others stay as they are. All processes call it."""
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
            load_states(phase, several, state.get(phase, []), self.own_moments, dtype)


class SingleDevice(Strategy):
    """One process on one device."""

    def __init__(self, device: torch.device, num_parts: int = 0) -> None:
        super().__init__(Group([device]), num_parts)
