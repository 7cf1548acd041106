"""nn.DataParallel: one process for several GPUs."""

from collections.abc import Sequence

import torch
from torch import nn

from trainer.loading.batches import Batch
from trainer.parallel.base import Parallel, SingleDevice
from trainer.parallel.devices import DeviceFlags, MultiDeviceFlags, usable_gpus
from trainer.task import Sums


class SummedReplicas(nn.DataParallel):
    """Adds up the sums of its replicas, where nn.DataParallel would concatenate them."""

    def gather(self, outputs: Sequence[Sums], output_device: int | torch.device) -> Sums:
        return {name: torch.stack([sums[name].to(output_device) for sums in outputs]).sum(0) for name in outputs[0]}


class DataParallel(Parallel):
    """One process that splits every micro-batch over several GPUs."""

    def describe(self) -> str:
        return f"DataParallel on {super().describe()}"

    def wrap(self, net: nn.Module) -> nn.Module:
        return self.evaluation_module(net)

    def evaluation_module(self, net: nn.Module) -> nn.Module:
        return SummedReplicas(net, device_ids=[device.index for device in self.devices])

    def to_device(self, batch: Batch) -> Batch:
        return batch  # the wrapper's scatter moves each part to its own device


def start_data_parallel(devices: DeviceFlags, flags: MultiDeviceFlags) -> Parallel:
    """`--multi-gpu dp` on whatever there is."""
    ids = usable_gpus(devices.device, flags.gpu_ids)
    if not ids:
        print("DataParallel needs at least two GPUs and none is in use: training on the CPU.")
        return SingleDevice(torch.device("cpu"))
    if len(ids) < 2:
        print(f"DataParallel needs at least two GPUs and there is one: training on cuda:{ids[0]}.")
        return SingleDevice(torch.device("cuda", ids[0]))
    return DataParallel([torch.device("cuda", i) for i in ids])
