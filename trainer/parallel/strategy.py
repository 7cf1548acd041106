"""Strategies that spread a model over devices: the interface, and its single-process form."""

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
"""Range of batch bytes worth copying to a GPU ahead of use, during its computation."""
COUNTED = ("index", "weight")
"""Entries of a batch that the host reads."""
_SIX_NUMBERS = struct.Struct("<6q")


class Strategy:
    """Places the model, exchanges its gradients, and assembles its state for checkpoints.

    This form is the identity: one process, whose devices each see the whole model. In a step the loop calls
    `seed_dropout`, `to_device` and the wrapped module for each micro-batch, backwards within `gradient_sync`, and
    `exchange` once after the last backward. Before `exchange`, a gradient covers this process's samples, or was reduced
    during the backward; after it, the global batch, with the same bits on every process that has it.

    group: the processes of the run.
    num_parts: parts into which every global batch is cut, whatever the devices; a multiple of the number of processes,
        both powers of two; 0 for one share per process.
    gradient_divisor: by which the exchange divides summed gradients; the loss is multiplied by it before.
    overlaps: gradients travel during a step's last backward.
    exchanges_in_forward: every forward runs collectives, so all processes must make equally many.
    shard_size: consecutive ranks that share one copy of the parameters.
    has_full_state: this process holds all that a checkpoint needs, and can save after others fail.
    draws_on_host: forwards draw from host generators (Python, NumPy, or torch's with the model on a GPU), as layer
        dropping or input masking may.
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
        """Returns this process's devices. The model lives on the first one."""
        return self.group.devices

    @property
    def device(self) -> torch.device:
        """Returns the device of this process's model."""
        return self.group.device

    @property
    def num_replicas(self) -> int:
        """Returns the number of devices among which this process divides each micro-batch."""
        return len(self.devices)

    @property
    def num_devices(self) -> int:
        """Returns the number of devices of all processes."""
        return self.num_replicas * self.group.world_size

    @property
    def device_kind(self) -> str:
        """Names the kind of this process's devices."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type

    @property
    def shards(self) -> Sequence[tuple[int, int]]:
        """Returns (shard, number of shards) pairs that this process computes of each global batch and data set.

        They are consecutive, so that the summation tree of parts starts within a process.
        """
        num_shards = self.num_parts or self.group.world_size
        num_own = num_shards // self.group.world_size
        return [(self.group.rank * num_own + own, num_shards) for own in range(num_own)]

    def describe(self) -> str:
        """Describes the devices briefly. All processes call it."""
        return ", ".join(map(device_label, self.devices))

    # --- the model ---------------------------------------------------------------------------------------------------

    def place(
        self,
        build: Callable[[], Objective],
        blocks: Callable[[nn.Module], Sequence[nn.Module]],
        complete: Callable[[Objective], None],
    ) -> Objective:
        """Builds an objective, identical on every process, on its devices. All processes call it.

        build: builds it on the CPU, identical everywhere. blocks: see `Task.blocks`. complete: loads what comes from
        elsewhere. Raises UserError.
        """
        objective = build().to(self.device)
        self.group.together(lambda: complete(objective))
        return objective

    def wrap(self, net: nn.Module) -> nn.Module:
        """Wraps the module trained in a phase; only its trained parameters require gradients by now."""
        return net

    def evaluation_module(self, net: nn.Module) -> nn.Module:
        """Returns the module for evaluation: without gradient hooks, but on all devices of this process."""
        return net

    def unsharded(self, objective: Objective) -> AbstractContextManager[None]:
        """Gathers full parameters on every process, for reading without collectives. All processes enter it.

        It serves code that computes with the model in its own ways.
        """
        return nullcontext()

    def to_device(self, batch: Batch) -> Batch:
        """Moves a batch to the wrapped module's device; copies may be asynchronous."""
        device = self.group.devices[0]
        if device.type == "cpu":
            return batch
        return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}

    def upload(self, batch: Batch) -> Batch:
        """Starts to copy a batch's large tensors to the device during its computation; see `to_device`.

        Kernels launched later wait for them. Skips entries that the host reads, batches too small to matter, and
        batches so large that an early copy would take memory from the model.
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
            tensor.record_stream(current)  # keeps the memory from reuse before this stream is done
        return {name: sent.get(name, value) for name, value in batch.items()}

    def seed_dropout(self, *key: int, same_everywhere: bool = False) -> None:
        """Seeds all generators from the key, this process and the device.

        Seeds Python's and NumPy's only if `draws_on_host`, because they are slower to seed than torch's.

        key: five numbers, the last one of a micro-batch; for a part, its global number replaces it and the process does
        not count. same_everywhere: seed from the key only.
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
        """Returns the positions of the host generators that forwards may draw from."""
        numpy_state: Any = np.random.get_state()
        of_torch = b"" if self.device.type == "cpu" else torch.default_generator.get_state().numpy().tobytes()
        return random.getstate()[1][-1], numpy_state[2], of_torch

    @contextmanager
    def keeping_generators(self) -> Iterator[None]:
        """Restores all generators afterwards."""
        of_python, of_numpy = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng([device for device in self.devices if device.type == "cuda"]):
                yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def gradient_sync(self, net: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Wraps forward and backward of a wrapped module. enabled: exchange gradients in this backward."""
        return nullcontext()

    def exchange(self, params: Sequence[Tensor]) -> None:
        """Exchanges gradients after a step's last backward, or waits for their arrival. All processes call it.

        params: all parameters trained in the step. Sets each `grad` to the gradient of the global batch, or None where
        no process has one.
        """

    def flat_gradients(self, params: Sequence[Tensor]) -> FlatGradients:
        """Returns a phase's flat gradient buffers, which `exchange` sums if it uses flat buffers."""
        return FlatGradients(params)

    def build_buckets(self, net: nn.Module) -> None:
        """Arranges buckets once, after a wrapped module's first backward, which is outside any step."""

    def global_norm(self, own: Tensor) -> Tensor:
        """Combines the norms of all processes' `local_shards` into the global norm. All processes call it."""
        return own

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raises UserError for an optimizer that cannot train this process's shards."""

    # --- a checkpoint and back ---------------------------------------------------------------------------------------

    def from_main(self, value: Tensor) -> Tensor:
        """Broadcasts rank 0's value to this process's device, contiguous. Elsewhere only its shape and type matter."""
        return value

    def sync_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Broadcasts rank 0's tensors, such as buffers before evaluating and saving. All processes call it.

        tensors: by name. Raises UserError on all processes if names, shapes or types differ.
        """

    def load_on_main(self, function: Callable[[], T], large: Collection[str]) -> T:
        """Works like `Group.on_main`, for checkpoints: other ranks get meta tensors for the entries in `large`."""
        return self.group.on_main(function)

    def full_weights(self, model: nn.Module, instead: Mapping[Tensor, Tensor] | None = None) -> dict[str, Any]:
        """Assembles a model's full state on rank 0. All processes call it.

        instead: replacements for some of its parameters.
        """
        weights = model.state_dict(keep_vars=True)
        found: dict[Tensor, Tensor] = {}  # tied tensors stay tied
        for name, own in weights.items():
            value = (instead or {}).get(own, own)
            if value not in found:
                found[value] = self.full_tensor(value.detach())
            weights[name] = found[value]
        return weights

    def full_state(
        self, objective: Objective, optimizers: Mapping[str, Sequence[torch.optim.Optimizer]]
    ) -> dict[str, Any]:
        """Assembles weights and optimizer states on rank 0, without wrapper prefixes. All processes call it."""
        return {
            "model": self.full_weights(objective.model),
            "optimizers": {
                phase: [map_tensors(state_of(each), self.full_tensor) for each in several]
                for phase, several in optimizers.items()
            },
        }

    def full_tensor(self, value: Tensor) -> Tensor:
        """Gathers a full tensor on rank 0. All processes call it."""
        return value

    def own_moments(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Selects this process's part of an optimizer state in a `full_state`."""
        return state

    def load_weights(self, weights: Mapping[str, Tensor], model: nn.Module) -> None:
        """Loads weights of a `full_state` that the model has; others stay unchanged. All processes call it."""
        model.load_state_dict(weights, strict=False)

    def load_moments(
        self,
        state: Mapping[str, Any],
        optimizers: Mapping[str, Sequence[torch.optim.Optimizer]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Loads optimizer states of a `full_state`. Raises UserError if they do not fit.

        dtype: of the parameters when it was saved.
        """
        for phase, several in optimizers.items():
            load_states(phase, several, state.get(phase, []), self.own_moments, dtype)


class SingleDevice(Strategy):
    """One process on one device."""

    def __init__(self, device: torch.device, num_parts: int = 0) -> None:
        super().__init__(Group([device]), num_parts)
