"""nn.DataParallel: one process for several GPUs."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from trainer.loading.batches import Batch
from trainer.parallel.base import Parallel, SingleDevice
from trainer.parallel.devices import DeviceFlags, MultiDeviceFlags, device_label
from trainer.task import Sums


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
        super().__init__()
        self.devices = devices

    def describe(self) -> str:
        return f"DataParallel on {', '.join(device_label(device) for device in self.devices)}"

    def wrap(self, net: nn.Module, example: Batch, phase: str) -> nn.Module:
        replicas = nn.DataParallel(ForReplicas(net), device_ids=[device.index for device in self.devices])
        return SumOverReplicas(replicas)

    def to_device(self, batch: Batch) -> Batch:
        return batch  # the wrapper's scatter moves each part to its own device


def start_data_parallel(devices: DeviceFlags, flags: MultiDeviceFlags, say: Callable[[str], None]) -> Parallel:
    """`--multi-gpu dp` on whatever there is."""
    if devices.device == "cpu" or not torch.cuda.is_available():
        say("DataParallel needs at least two GPUs and none is in use: training on the CPU.")
        return SingleDevice(torch.device("cpu"))
    ids = list(flags.gpu_ids) if flags.gpu_ids is not None else list(range(torch.cuda.device_count()))
    if len(ids) < 2:
        say(f"DataParallel needs at least two GPUs and there is one: training on cuda:{ids[0]}.")
        return SingleDevice(torch.device("cuda", ids[0]))
    return DataParallel([torch.device("cuda", i) for i in ids])
