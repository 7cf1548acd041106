"""Strategy for `--multi-gpu dp`: `nn.DataParallel`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.common.process import to_stdout
from trainer.flags import DeviceFlags, MultiDeviceFlags
from trainer.loading.batches import Batch
from trainer.parallel.devices import usable_gpus
from trainer.parallel.group import Group, require_shape
from trainer.parallel.strategy import SingleDevice, Strategy
from trainer.task import Outputs, PerSample


class SummedReplicas(nn.DataParallel):
    """`nn.DataParallel` that sums its replicas' tensor outputs and concatenates their per-sample outputs (`PerSample`).

    Raises a replica's exception unchanged; `nn.DataParallel` would add a traceback to the message.
    """

    def parallel_apply(
        self, replicas: Sequence[Callable[..., Outputs]], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        results = super().parallel_apply([partial(_result_or_error, each) for each in replicas], inputs, kwargs)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def gather(self, outputs: Sequence[Outputs], output_device: int | torch.device) -> Outputs:
        names = dict.fromkeys(name for part in outputs for name in part)
        return {
            name: _together(name, [part[name] for part in outputs if name in part], output_device) for name in names
        }


def _result_or_error(replica: Callable[..., Outputs], *args: Any, **kwargs: Any) -> Outputs | BaseException:
    try:
        return replica(*args, **kwargs)
    except BaseException as error:  # the threads of `nn.DataParallel` catch only Exception
        return error


def _together(name: str, parts: Sequence[Tensor | PerSample], device: int | torch.device) -> Tensor | PerSample:
    if isinstance(parts[0], PerSample):
        return PerSample(torch.cat([part.values.to(device) for part in parts]))  # type: ignore[union-attr]
    for part in parts:
        require_shape(name, part.shape, parts[0].shape)  # type: ignore[union-attr]
    return torch.stack([part.to(device) for part in parts]).sum(0)  # type: ignore[union-attr]


class DataParallel(Strategy):
    """Strategy that splits every micro-batch over several GPUs in one process."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__(Group(devices))

    def describe(self) -> str:
        return f"DataParallel on {super().describe()}"

    def wrap(self, net: nn.Module) -> nn.Module:
        return self.evaluation_module(net)

    def evaluation_module(self, net: nn.Module) -> nn.Module:
        return SummedReplicas(net, device_ids=[device.index for device in self.group.devices])

    def to_device(self, batch: Batch) -> Batch:
        return batch  # `nn.DataParallel` scatters the batch to the devices

    upload = to_device


def start_data_parallel(devices: DeviceFlags, flags: MultiDeviceFlags) -> Strategy:
    """Returns the strategy for `--multi-gpu dp`, or for a single device if fewer than two GPUs are usable."""
    ids = usable_gpus(devices.device, flags.gpu_ids)
    if not ids:
        to_stdout("DataParallel needs at least two GPUs and found none: training on the CPU.")
        return SingleDevice(torch.device("cpu"))
    if len(ids) < 2:
        to_stdout(f"DataParallel needs at least two GPUs and found one: training on cuda:{ids[0]}.")
        return SingleDevice(torch.device("cuda", ids[0]))
    return DataParallel([torch.device("cuda", i) for i in ids])
