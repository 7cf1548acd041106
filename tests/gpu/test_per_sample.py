"""Tests that per-sample outputs arrive from a GPU in order, without a wait for each batch."""

import torch

from tests.conftest import ROOT
from tests.gpu.runs import run
from tests.gpu.test_workloads import settings_of
from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus
from trainer.loop import evaluate
from trainer.loop.totals import MOST_IN_FLIGHT, PerSampleOutputs
from trainer.parallel.strategy import SingleDevice
from trainer.task import PerSample

HELPERS = ROOT / "tests" / "helpers"
DEVICE = torch.device("cuda", 1)


@on_simulated_gpus(2, may_wait=True)
def test_many_batches_arrive_in_order():
    outputs, num_batches = PerSampleOutputs(), 2 * MOST_IN_FLIGHT + 5
    for batch in range(num_batches):
        index = torch.arange(3 * batch, 3 * batch + 3)
        values = 2 * torch.arange(3 * batch, 3 * batch + 3, device=DEVICE)
        outputs.add(index, {"double": PerSample(values), "sum": values.sum()})
    waits = len(GPUS.waits)
    found = outputs.gathered(SingleDevice(DEVICE).group, 3 * num_batches)
    assert torch.equal(found["double"], 2 * torch.arange(3 * num_batches))
    assert waits == 0


@on_simulated_gpus()
def test_no_evaluation_waits_between_its_batches(tmp_path, cache_dir):
    """Only the first evaluation may wait, for objects that the objective creates once."""
    waits, ahead = [], evaluate.agree_ahead

    def watched(*arguments):
        for piece in ahead(*arguments):
            before = len(GPUS.waits)
            yield piece
            waits[-1].extend(GPUS.waits[before:])

    def begun(*arguments):
        waits.append([])
        return watched(*arguments)

    evaluate.agree_ahead = begun
    (tmp_path / "seqrec").mkdir()
    settings = {
        "scored": ["--task", f"{HELPERS / 'scored_task.py'}:Scored", "--eval-batch-size", 1, "--epochs", 3],
        "kgat": [*settings_of("kgat", tmp_path), "--epochs", 3],
        "seqrec": [*settings_of("seqrec", tmp_path / "seqrec"), "--max-steps", 4, "--eval-every-steps", 2],
    }
    for name, argv in settings.items():
        waits.clear()
        run(cache_dir, *argv, "--device", "cuda", "--no-test", "--save-dir", tmp_path / name)
        assert len(waits) >= 3 and not any(waits[1:]), name
