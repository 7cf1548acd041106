"""Interface of strategies that spread a model over devices."""

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
from trainer.loading.torch_datasets import draws_put_back
from trainer.parallel.devices import device_label
from trainer.parallel.flat_gradients import FlatGradients
from trainer.parallel.group import Group
from trainer.parallel.optimizer_states import load_states, state_of
from trainer.task import Objective

T = TypeVar("T")

SMALLEST_UPLOAD, LARGEST_UPLOAD = 2**18, 2**26
"""Range of batch sizes in bytes for which copying to a GPU ahead of use is worthwhile."""
COUNTED = ("index", "weight")
"""Entries of a batch that stay in host memory, because the host reads them."""
_SIX_NUMBERS = struct.Struct("<6q")


class Strategy:
    """Places the model on devices, sums its gradients over them, and assembles its state for checkpoints.

    This base class is for a single process, whose devices each hold the whole model. The training loop calls
    `seed_dropout`, `to_device` and the wrapped module for each micro-batch, runs backward passes within
    `gradient_sync`, and calls `exchange` once after the last pass. Before `exchange`, a gradient covers only this
    process's samples, unless the backward pass has already reduced it. After `exchange`, a gradient covers the global
    batch, and is bitwise equal on every process that has the gradient.

    group: the processes of the run.
    num_parts: 0, or the value of `--parts`: a power of two, divisible by the number of processes.
    gradient_divisor: number by which summed gradients are divided; the loss is multiplied by this number beforehand.
    overlaps: whether gradients are summed over processes during a step's last backward pass.
    exchanges_in_forward: whether forward passes run collectives, so that all processes must run equally many.
    shard_size: number of consecutive ranks that share one copy of the parameters.
    has_full_state: whether this process holds the full state of a checkpoint, and can save after other processes fail.
    If not, `full_state` returns copies in rank 0's host memory.
    draws_on_host: whether a forward pass uses the host's generators (Python, NumPy, or PyTorch with a model on a GPU).
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
    def device(self) -> torch.device:
        return self.group.device

    @property
    def num_replicas(self) -> int:
        """Returns the number of devices among which this process divides each micro-batch."""
        return len(self.group.devices)

    @property
    def num_devices(self) -> int:
        """Returns the number of devices of all processes."""
        return self.num_replicas * self.group.world_size

    @property
    def device_kind(self) -> str:
        """Returns the model name of this process's GPU, or the type of another device."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type

    @property
    def shards(self) -> Sequence[tuple[int, int]]:
        """Returns this process's shares of each global batch and data set, each as (index, number of shares).

        With `--parts`, the indices are consecutive, so that each process sums one subtree of the binary tree.
        """
        num_shards = self.num_parts or self.group.world_size
        num_own = num_shards // self.group.world_size
        return [(self.group.rank * num_own + own, num_shards) for own in range(num_own)]

    def describe(self) -> str:
        """Returns a short description of the devices. All processes must call this method."""
        return ", ".join(map(device_label, self.group.devices))

    # --- the model ---------------------------------------------------------------------------------------------------

    def place(
        self,
        build: Callable[[], Objective],
        blocks: Callable[[nn.Module], Sequence[nn.Module]],
        complete: Callable[[Objective], None],
    ) -> Objective:
        """Builds an objective on this process's devices, identical on every process.

        build: builds the objective on the CPU, identical on every process. blocks: as in `Task.blocks`. complete: loads
        weights into the objective. All processes must call this method. All raise UserError if `complete` fails on one.
        """
        objective = build().to(self.device)
        self.group.together(lambda: complete(objective))
        return objective

    def wrap(self, net: nn.Module) -> nn.Module:
        """Wraps the module for a training phase. The caller first freezes parameters that the phase does not train."""
        return net

    def evaluation_module(self, net: nn.Module) -> nn.Module:
        """Returns the module for evaluations, which has no gradient hooks and uses all devices of this process."""
        return net

    def unsharded(self, objective: Objective) -> AbstractContextManager[None]:
        """Context in which every process holds the full parameters, for code that uses the model without collectives.

        All processes must enter this context.
        """
        return nullcontext()

    def to_device(self, batch: Batch) -> Batch:
        """Moves a batch to the wrapped module's device; copies may be asynchronous."""
        device = self.group.devices[0]
        if device.type == "cpu":
            return batch
        return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}

    def upload(self, batch: Batch) -> Batch:
        """Starts to copy a batch to the device while the device computes.

        Kernels launched later wait for the copies. Skips entries that the host reads, batches with sparse tensors, and
        batches too small to matter or so large that an early copy would take memory from the model.
        """
        device = self.device
        if device.type != "cuda" or any(value.layout != torch.strided for value in batch.values()):
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
            tensor.record_stream(current)  # keeps the memory from reuse until this stream is done
        return {name: sent.get(name, value) for name, value in batch.items()}

    def seed_dropout(self, *key: int, same_everywhere: bool = False) -> None:
        """Seeds random number generators with a hash of the key, the rank and the device.

        Seeds Python's and NumPy's generators only if `draws_on_host`, because seeding them is slow.

        key: five numbers; the last is the index of the micro-batch. With `--parts`, the part's index in the global
        batch replaces this last number, and the hash omits rank and device. same_everywhere: whether to omit rank and
        device.
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

    def rng_positions(self) -> tuple[Any, ...]:
        """Returns the positions of the host's random generators, which show whether a forward pass drew numbers."""
        numpy_state: Any = np.random.get_state()
        of_torch = b"" if self.device.type == "cpu" else torch.default_generator.get_state().numpy().tobytes()
        return random.getstate()[1][-1], numpy_state[2], of_torch

    @contextmanager
    def preserving_rng_states(self) -> Iterator[None]:
        """Context that restores the states of all random number generators on exit."""
        gpus = [device for device in self.group.devices if device.type == "cuda"]
        with draws_put_back(), torch.random.fork_rng(gpus):
            yield

    # --- gradients ---------------------------------------------------------------------------------------------------

    def gradient_sync(self, net: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Context for a forward and backward pass; if not `enabled`, DistributedDataParallel sums no gradients."""
        return nullcontext()

    def exchange(self, params: Sequence[Tensor]) -> None:
        """Sums gradients over processes after a step's last backward pass, unless this pass has already done so.

        params: parameters that the step trains. Sets each `grad` to the gradient of the global batch, or to None if no
        process has a gradient. All processes must call this method.
        """

    def flat_gradients(self, params: Sequence[Tensor]) -> FlatGradients:
        """Returns flat buffers for the gradients of params: the buffers that `exchange` sums, if it uses any."""
        return FlatGradients(params)

    def build_buckets(self, net: nn.Module) -> None:
        """Rebuilds DistributedDataParallel's buckets, once, after a wrapped module's trial backward pass."""

    def global_norm(self, own: Tensor) -> Tensor:
        """Combines the norms of all processes' shards into the global norm. All processes must call this method."""
        return own

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raises UserError if an optimizer cannot train this process's shards."""

    # --- saving and restoring ----------------------------------------------------------------------------------------

    def broadcast(self, value: Tensor) -> Tensor:
        """Returns rank 0's value, contiguous, on `device`. Other ranks pass a tensor of equal shape and dtype."""
        return value

    def sync_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Broadcasts rank 0's tensors in place; used for buffers before evaluations and saves.

        All processes must call this method. All raise UserError if their tensors differ in name, shape or dtype.
        """

    def load_on_main(self, function: Callable[[], T], large: Collection[str]) -> T:
        """Works like `Group.on_main`, but other ranks get meta tensors for the checkpoint entries named in `large`."""
        return self.group.on_main(function)

    def full_weights(self, model: nn.Module, instead: Mapping[Tensor, Tensor] | None = None) -> dict[str, Any]:
        """Returns a model's state dict with full tensors on rank 0. All processes must call this method.

        instead: maps parameters to tensors that replace them in the result.
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
        """Returns full weights and optimizer states on rank 0, for checkpoints. All processes must call this method."""
        return {
            "model": self.full_weights(objective.model),
            "optimizers": {
                phase: [map_tensors(state_of(each), self.full_tensor) for each in several]
                for phase, several in optimizers.items()
            },
        }

    def full_tensor(self, value: Tensor) -> Tensor:
        """Returns a full tensor on rank 0, gathered from shards. All processes must call this method."""
        return value

    def own_optimizer_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns this process's shards of a full optimizer state."""
        return state

    def load_weights(self, weights: Mapping[str, Tensor], model: nn.Module) -> None:
        """Loads full weights by name; other weights of the model stay the same. All processes must call this method."""
        model.load_state_dict(weights, strict=False)

    def load_optimizer_states(
        self,
        state: Mapping[str, Any],
        optimizers: Mapping[str, Sequence[torch.optim.Optimizer]],
        dtype: torch.dtype,
    ) -> None:
        """Loads optimizer states that `full_state` returned. Raises UserError if a state does not fit its optimizer.

        state: lists of optimizer states by phase. dtype: dtype of the parameters when the states were saved.
        """
        for phase, several in optimizers.items():
            load_states(phase, several, state.get(phase, []), self.own_optimizer_state, dtype)


class SingleDevice(Strategy):
    """Strategy for a single device."""

    def __init__(self, device: torch.device, num_parts: int = 0) -> None:
        super().__init__(Group([device]), num_parts)
