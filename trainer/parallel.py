"""One device, DataParallel or DistributedDataParallel, behind one interface.

This is the only file that talks to other processes.
"""

import hashlib
import inspect
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.errors import BadInput
from data.loading import Batch
from trainer.ranks import DeviceFlags, MultiDeviceFlags, RankEnvironment, torchrun_agent
from trainer.task import Objective, Sums

T = TypeVar("T")

# Buffers are agreed before evaluating and saving, not in every forward; newer releases renamed the option.
_DDP_OPTIONS = inspect.signature(nn.parallel.DistributedDataParallel).parameters
_NO_BUFFER_BROADCAST: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers": False
}


class PendingSum:
    """A sum over processes under way; for one process it is there at once."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = values

    def wait(self) -> Sequence[float]:
        """The sums."""
        return self._values


class _PendingAllReduce(PendingSum):
    def __init__(self, values: Sequence[float], group: dist.ProcessGroup) -> None:
        self._tensor = torch.tensor(values, dtype=torch.float64)
        self._work = dist.all_reduce(self._tensor, group=group, async_op=True)

    def wait(self) -> Sequence[float]:
        self._work.wait()
        return self._tensor.tolist()


class Parallel(ABC):
    """How the run is spread over devices. Everything outside sees only this interface.

    shard: (rank, world_size) of this process, for splitting data. num_replicas: devices that this process feeds.
    gradient_divisor: what the wrapper divides summed gradients by. local_world_size: processes of this run on this
    machine.
    """

    device: torch.device
    num_replicas: int = 1
    shard: tuple[int, int] = (0, 1)
    gradient_divisor: int = 1
    local_world_size: int = 1

    @cached_property
    def agents(self) -> list[str]:
        """The torchrun agents that started this run's processes; none without torchrun. All processes ask for them."""
        return sorted({agent for agent in self._gather(torchrun_agent()) if agent is not None})

    def _gather(self, value: T) -> list[T]:
        """The value of every process."""
        return [value]

    @property
    def is_main(self) -> bool:
        return self.shard[0] == 0

    @property
    def num_devices(self) -> int:
        return self.num_replicas * self.shard[1]

    @abstractmethod
    def describe(self) -> str:
        """The devices, in a few words."""

    def wrap(self, net: nn.Module, example: Batch, phase: str) -> nn.Module:
        """The module that training calls. `example` is a batch whose samples do not count."""
        return net

    def evaluation_module(self, net: nn.Module) -> nn.Module:
        """The module that evaluation calls: without gradient hooks, but on all devices of this process."""
        return net

    def to_device(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def gradient_sync(self, net: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Around forward and backward: whether this backward adds up gradients over processes."""
        return nullcontext()

    def sum(self, values: Tensor) -> Tensor:
        """Sum over processes of a CPU tensor; the same bits on every process."""
        return values

    def start_sum(self, values: Sequence[float]) -> PendingSum:
        """The same for a few numbers, without waiting."""
        return PendingSum(values)

    def on_main(self, function: Callable[[], T]) -> T:
        """Calls the function on the main process alone; its result, or its BadInput, reaches every process."""
        return function()

    def sync_buffers(self, objective: nn.Module) -> None:
        """Gives every process the buffers (running statistics) of the main one, before evaluating and saving."""

    def together(self, function: Callable[[], T]) -> T:
        """Calls the function on every process. If any of them raises BadInput, all raise what was said."""
        return function()

    def seed_dropout(self, *key: int) -> None:
        """Makes what follows on the devices' generators a function of the key and of this process."""
        packed = struct.pack(f"<{len(key) + 1}q", *key, self.shard[0])
        seed = int.from_bytes(hashlib.blake2b(packed, digest_size=7).digest(), "little")
        self._seed_generators(seed)

    def _seed_generators(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(seed)

    def full_state(self, objective: Objective, optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, Any]:
        """Weights and moments, whole and without any wrapper's prefix."""
        return {
            "model": objective.model.state_dict(),
            "optimizers": {phase: optimizer.state_dict() for phase, optimizer in optimizers.items()},
        }

    def load_full_state(
        self, state: Mapping[str, Any], objective: Objective, optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> None:
        objective.model.load_state_dict(state["model"])
        for phase, optimizer in optimizers.items():
            # Moments come from the checkpoint, but weight decay and the like from this command line.
            options = [
                {k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups
            ]
            optimizer.load_state_dict(state["optimizers"][phase])
            for group, own in zip(optimizer.param_groups, options, strict=True):
                group.update(own)

    def close(self) -> None:
        """Leaves the group of processes."""


class SingleDevice(Parallel):
    """The identity."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def describe(self) -> str:
        return _device_label(self.device)


class ForReplicas(nn.Module):
    """Gives every sum a leading dimension, along which DataParallel gathers its replicas."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Batch, phase: str = "train") -> Sums:
        return {name: value.unsqueeze(0) for name, value in self.net(batch, phase).items()}


class SumOverReplicas(nn.Module):
    """Adds up what DataParallel gathered."""

    def __init__(self, replicas: nn.Module) -> None:
        super().__init__()
        self.replicas = replicas

    def forward(self, batch: Batch, phase: str = "train") -> Sums:
        return {name: values.sum(0) for name, values in self.replicas(batch, phase).items()}


class DataParallel(Parallel):
    """One process that splits every micro-batch over several GPUs."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self.device = self.devices[0]
        self.num_replicas = len(self.devices)

    def describe(self) -> str:
        return f"DataParallel on {', '.join(_device_label(device) for device in self.devices)}"

    def wrap(self, net: nn.Module, example: Batch, phase: str) -> nn.Module:
        replicas = nn.DataParallel(ForReplicas(net), device_ids=[device.index for device in self.devices])
        return SumOverReplicas(replicas)

    def to_device(self, batch: Batch) -> Batch:
        return batch  # the wrapper's scatter moves each part to its own device

    def _seed_generators(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        for replica, device in enumerate(self.devices):
            torch.cuda.default_generators[device.index].manual_seed(seed + replica)


class Distributed(Parallel):
    """One process per device; gradients are averaged by DistributedDataParallel."""

    def __init__(self, environment: RankEnvironment, flags: MultiDeviceFlags, devices: DeviceFlags) -> None:
        self.shard = (environment.rank, environment.world_size)
        self.gradient_divisor = environment.world_size
        self._find_unused_parameters = flags.find_unused_parameters
        self._sync_bn = flags.sync_bn
        timeout = timedelta(seconds=flags.dist_timeout_s)
        on_gpu = torch.cuda.is_available() and devices.device != "cpu"
        backend = flags.backend or ("nccl" if on_gpu else "gloo")
        try:
            dist.init_process_group(
                f"cpu:gloo,cuda:{backend}" if on_gpu else "gloo",
                init_method=environment.init_method,
                rank=environment.rank,
                world_size=environment.world_size,
                timeout=timeout,
            )
        except dist.DistError as error:
            raise BadInput(
                f"rank {environment.rank} of {environment.world_size} could not meet the others at "
                f"{environment.meeting_place} within --dist-timeout-s "
                f"{flags.dist_timeout_s:g}: {str(error).splitlines()[0]}"
            ) from None
        # Its own group, so that the few numbers of a step never queue behind gradients.
        self._host_group = dist.new_group(backend="gloo", timeout=timeout)
        local_rank, self.local_world_size = self._place_on_host(environment)
        self.device = _rank_device(local_rank, on_gpu, flags.gpu_ids)
        if on_gpu:
            torch.cuda.set_device(self.device)
        self._labels = self._gather(f"{socket.gethostname()} {_device_label(self.device)}")
        self.backend = backend

    def _place_on_host(self, environment: RankEnvironment) -> tuple[int, int]:
        """(local rank, local world size); a launcher that did not say is replaced by comparing host names."""
        if environment.local_rank is not None and environment.local_world_size is not None:
            return environment.local_rank, environment.local_world_size
        hosts = self._gather(socket.gethostname())
        same_host = [rank for rank, host in enumerate(hosts) if host == hosts[environment.rank]]
        local_rank = environment.local_rank
        return same_host.index(environment.rank) if local_rank is None else local_rank, len(same_host)

    def _gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.shard[1]
        dist.all_gather_object(values, value, group=self._host_group)
        return values

    def describe(self) -> str:
        hosts = {label.split(" ", 1)[0] for label in self._labels}
        devices = [label.split(" ", 1)[1] for label in self._labels]
        places = f" on {len(hosts)} hosts" if len(hosts) > 1 else ""
        kinds = ", ".join(devices) if len(set(devices)) > 1 else f"{len(devices)} x {devices[0]}"
        return f"DistributedDataParallel over {self.backend}{places}: {kinds}"

    def wrap(self, net: nn.Module, example: Batch, phase: str) -> nn.Module:
        if self._sync_bn:
            net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
        wrapped = nn.parallel.DistributedDataParallel(
            net,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=self._find_unused_parameters,
            **_NO_BUFFER_BROADCAST,
        )
        self._settle_buckets(wrapped, example, phase)
        return wrapped

    def _settle_buckets(self, net: nn.Module, example: Batch, phase: str) -> None:
        """One backward that changes nothing.

        DistributedDataParallel regroups its buckets after the first backward, which changes the order of
        summation; without this pass the first step of a resumed run would differ from the same step unbroken.
        """
        buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
        sums = net(self.to_device(example), phase)
        (sums["loss"] * 0).backward()
        net.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    def evaluation_module(self, net: nn.Module) -> nn.Module:
        return net.module  # type: ignore[return-value]

    def gradient_sync(self, net: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext() if enabled else net.no_sync()  # type: ignore[operator]

    def sum(self, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, group=self._host_group)
        return values

    def start_sum(self, values: Sequence[float]) -> PendingSum:
        return _PendingAllReduce(values, self._host_group)

    def on_main(self, function: Callable[[], T]) -> T:
        answer: list[Any] = [None, None]
        if self.is_main:
            try:
                answer[0] = function()
            except BadInput as error:
                answer[1] = str(error)
        dist.broadcast_object_list(answer, src=0, group=self._host_group)
        if answer[1] is not None:
            raise BadInput(answer[1])
        return answer[0]

    def sync_buffers(self, objective: nn.Module) -> None:
        for buffer in objective.buffers():
            dist.broadcast(buffer, src=0)

    def together(self, function: Callable[[], T]) -> T:
        result, said = None, None
        try:
            result = function()
        except BadInput as error:
            said = str(error)
        messages = dict.fromkeys(message for message in self._gather(said) if message is not None)
        if messages:
            raise BadInput("\n".join(messages))
        return result  # type: ignore[return-value]

    def close(self) -> None:
        dist.destroy_process_group()


def _rank_device(local_rank: int, on_gpu: bool, gpu_ids: Sequence[int] | None) -> torch.device:
    """The local_rank-th GPU of those chosen; the only one where the launcher shows each process just one."""
    if not on_gpu:
        return torch.device("cpu")
    usable = list(gpu_ids) if gpu_ids is not None else list(range(torch.cuda.device_count()))
    if len(usable) == 1:
        return torch.device("cuda", usable[0])
    if local_rank >= len(usable):
        raise BadInput(
            f"local rank {local_rank} has no GPU: this machine offers {len(usable)} ({usable}); start fewer "
            "processes per machine, or choose others with --gpu-ids or CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", usable[local_rank])


def _device_label(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


def data_parallel(devices: DeviceFlags, flags: MultiDeviceFlags, say: Callable[[str], None]) -> Parallel:
    """`--multi-gpu dp` on whatever there is."""
    if devices.device == "cpu" or not torch.cuda.is_available():
        say("DataParallel needs at least two GPUs and none is in use: training on the CPU.")
        return SingleDevice(torch.device("cpu"))
    ids = list(flags.gpu_ids) if flags.gpu_ids is not None else list(range(torch.cuda.device_count()))
    if len(ids) < 2:
        say(f"DataParallel needs at least two GPUs and there is one: training on cuda:{ids[0]}.")
        return SingleDevice(torch.device("cuda", ids[0]))
    return DataParallel([torch.device("cuda", i) for i in ids])
