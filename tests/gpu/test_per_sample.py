"""Outputs per sample come from a GPU without a wait for each batch, and do not stay in locked pages of the host."""

import torch

from tests.helpers.imagined_gpu import GPUS, on_imagined_gpus
from trainer.loop.totals import MOST_IN_FLIGHT, PerSampleOutputs
from trainer.parallel.strategy import SingleDevice
from trainer.task import PerSample

DEVICE = torch.device("cuda", 1)


@on_imagined_gpus(2, may_wait=True)
def test_many_batches_arrive_in_order():
    outputs, num_batches = PerSampleOutputs(), 2 * MOST_IN_FLIGHT + 5
    for batch in range(num_batches):
        index = torch.arange(3 * batch, 3 * batch + 3)
        values = 2 * torch.arange(3 * batch, 3 * batch + 3, device=DEVICE)
        outputs.add(index, {"double": PerSample(values), "sum": values.sum()})
    waits = len(GPUS.waits)
    found = outputs.gathered(SingleDevice(DEVICE).group, 3 * num_batches)
    assert torch.equal(found["double"], 2 * torch.arange(3 * num_batches))
    assert waits == 2
