"""What TensorBoard shows of an evaluation besides metrics: asked of the task."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from trainer.loading.order import SampleKeys
from trainer.loop.precision import of_dtype
from trainer.loop.run import Run
from trainer.task import Picture, Sums, Task

NUM_EXAMPLES = 6


def log_pictures(run: Run, sums: Mapping[str, Sums]) -> None:
    """Logs what the task has to show of evaluations that just ended. All processes call it; the main one draws.

    sums: of `evaluate`, by data set.
    """
    has_examples = type(run.task).example_pictures is not Task.example_pictures
    with _weights_of_evaluation(run) if has_examples else nullcontext():
        run.parallel.on_main(lambda: run.log.pictures(run.progress.step, _pictures(run, sums)))


@contextmanager
def _weights_of_evaluation(run: Run) -> Iterator[None]:
    """Within it the main process alone can use the model, with the weights that are evaluated."""
    with run.learner.ema.applied(), run.parallel.unsharded(run.learner.objective):
        yield


def _pictures(run: Run, sums: Mapping[str, Sums]) -> dict[str, Picture]:
    return {
        f"{split}/{name}": picture
        for split, own in sums.items()
        for name, picture in {**run.task.pictures(own), **_example_pictures(run, split)}.items()
    }


@torch.no_grad()
def _example_pictures(run: Run, split: str) -> Mapping[str, Picture]:
    """Those of a few samples, spread evenly over the data set."""
    last = len(run.task.splits()[split]) - 1
    keys = SampleKeys(np.unique(np.linspace(0, last, NUM_EXAMPLES).astype(np.int64)), epoch=0)
    device = run.parallel.device
    examples = run.loaders[split].one(keys)
    batch = of_dtype({name: tensor.to(device) for name, tensor in examples.items()}, run.learner.precision.dtype)
    with _training_undisturbed(run), run.learner.precision.autocast(device.type):
        return run.task.example_pictures(run.learner.objective, batch)


@contextmanager
def _training_undisturbed(run: Run) -> Iterator[None]:
    """Eval mode within it; mode and random state are what they were after it."""
    objective, device = run.learner.objective, run.parallel.device
    was_training = objective.training
    objective.eval()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        objective.train(was_training)
