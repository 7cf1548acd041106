"""On a GPU the host never waits for the device in a training step. tests/gpu checks this without a GPU."""

import pytest
import torch

from tests.conftest import WEIGHTED
from trainer.commands.build import assemble_run, prepare_training
from trainer.commands.parse import parse
from trainer.logs.run_log import SilentLog
from trainer.loop.run import Run
from trainer.loop.train import train_epoch
from trainer.parallel.strategy import SingleDevice

GPU_STEPS = 100  # enough steps to fold totals and to read a group of step outcomes
SETTLING_STEPS = 3
CASES = {
    "har": [],
    "accumulation": ["--grad-accum-steps", "3"],
    "no clipping": ["--max-grad-norm", "0"],
    "ema": ["--ema-decay", "0.99"],
    "seqrec": ["--task", "seqrec", "--mhc"],
    "seqrec bce": ["--task", "seqrec", "--loss", "bce", "--no-time"],
    "batch norm": ["--model", "tinyhar"],
    "adam": ["--optimizer", "adam"],
    "sgd": ["--optimizer", "sgd", "--momentum", "0.9", "--nesterov"],
    "graphs": ["--cuda-graphs", "on"],
    "weighted": ["--task", WEIGHTED, "--num-train", "2000", "--batch-size", "8"],
}


def run_of(argv: list[str], strategy: SingleDevice, cache_dir) -> Run:
    """Returns a run whose steps neither log nor save."""
    flags, problems = parse(
        ["--save-dir", "unused", "--cache-dir", str(cache_dir), "--log-interval", "1000000", *argv],
        several_devices=False,
    )
    assert not problems
    task = flags.task_type(flags.task, seed=0, cache_dir=cache_dir)
    run = assemble_run(flags, task, strategy)
    prepare_training(flags, run.task, run.learner, run.plan.orders, run.memory)
    run.tried_saving.update(task.phases)  # checking the first saved state may wait for the device
    return run


class EndsAfter(SilentLog):
    """Log that ends training after `num_steps` steps, before the host reads anything from the device."""

    class Reached(Exception):
        pass

    def __init__(self, num_steps: int, settled: int = 0, after_settling=lambda: None) -> None:
        super().__init__()
        self.left = num_steps
        self.settled = num_steps - settled
        self.after_settling = after_settling

    def advance(self, num_samples: int) -> None:
        self.left -= 1
        if self.left == self.settled:
            self.after_settling()
        if self.left == 0:
            raise self.Reached


def train_steps(run: Run, log: EndsAfter) -> None:
    run.log = log
    with pytest.raises(EndsAfter.Reached), run.learner.launching():
        train_epoch(run)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and -m cuda")
@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
@pytest.mark.parametrize("argv", CASES.values(), ids=CASES)
def test_a_training_step_never_makes_the_host_wait_for_the_gpu(argv, amp, cache_dir):
    enough_steps_of_an_epoch = ["--batch-size", "8"]
    run = run_of([*argv, *enough_steps_of_an_epoch, "--amp", amp], SingleDevice(torch.device("cuda", 0)), cache_dir)
    try:
        train_steps(run, EndsAfter(GPU_STEPS, SETTLING_STEPS, lambda: torch.cuda.set_sync_debug_mode("error")))
    finally:
        torch.cuda.set_sync_debug_mode("default")
