"""The scores of the mean of several finished runs' predictions."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from trainer.checkpoint.weights import load_best_weights, load_weights
from trainer.commands.build import assemble_run, set_up_torch
from trainer.commands.flags import Flags
from trainer.loop.ema import ExponentialMovingAverage
from trainer.loop.evaluate import evaluate
from trainer.loop.precision import in_precision
from trainer.parallel.base import SingleDevice
from trainer.parallel.devices import pick_device
from trainer.parallel.signals import StopRequest
from trainer.task import Objective, Task


def ensemble_metrics(
    flags: Flags, task: Task, directories: Sequence[Path], stop: StopRequest
) -> dict[str, float] | None:
    """Test metrics of the task's ensemble of these runs, each with the weights that it is used with.

    None where the task has no ensemble. Raises BadInput for a run without weights, StopRequested if asked to stop
    meanwhile.
    """
    device = pick_device(flags.devices.device)
    if flags.multi is not None and flags.multi.gpu_ids is not None and device.type == "cuda":
        device = torch.device("cuda", flags.multi.gpu_ids[0])
    parallel = SingleDevice(device)
    set_up_torch(flags, parallel)
    ensemble = task.ensemble([_trained_objective(flags, task, directory) for directory in directories])
    if ensemble is None:
        return None
    run = assemble_run(flags, task, parallel)
    run.stop = stop
    ensemble = ensemble.to(parallel.device)
    run.learner = replace(
        run.learner,
        objective=ensemble,
        net=in_precision(ensemble, run.learner.precision),
        ema=ExponentialMovingAverage(ensemble.model, decay=0),
    )
    return run.metrics("test", evaluate(run, "test"))


def _trained_objective(flags: Flags, task: Task, directory: Path) -> Objective:
    """On the CPU, since there may be many."""
    state = load_best_weights(directory, print)
    objective = task.build_objective().to(getattr(torch, flags.precision.dtype))
    load_weights(objective.model, state, str(directory), "give the flags that it was trained with")
    return objective
