"""The scores of the mean of several finished runs' predictions."""

from collections.abc import Sequence
from pathlib import Path

import torch

from trainer.checkpoint.weights import check_weights_fit, load_best_weights
from trainer.commands.build import assemble_run
from trainer.commands.flags import Flags
from trainer.loop.ema import WeightAverage
from trainer.loop.precision import PrecisionForward
from trainer.loop.train import evaluate
from trainer.parallel.base import Parallel
from trainer.parallel.signals import StopRequest
from trainer.task import Objective, Task


def ensemble_metrics(
    flags: Flags, task: Task, directories: Sequence[Path], parallel: Parallel, stop: StopRequest
) -> dict[str, float] | None:
    """Test metrics of the task's ensemble of these runs, each with the weights that it is used with.

    None where the task has no ensemble, or if asked to stop meanwhile. Raises BadInput for a run without weights.
    """
    members = [_trained_objective(flags, task, directory) for directory in directories]
    ensemble = task.ensemble(members)
    if ensemble is None:
        return None
    run = assemble_run(flags, task, parallel, None)
    run.stop = stop
    run.objective = ensemble.to(parallel.device)
    run.average = WeightAverage(ensemble.model, decay=0)
    run.net = PrecisionForward(ensemble, run.precision)
    sums = evaluate(run, "test")
    return run.metrics("test", sums) if sums is not None else None


def _trained_objective(flags: Flags, task: Task, path: Path) -> Objective:
    """On the CPU, since there may be many."""
    state = load_best_weights(path, print)
    objective = task.build_objective().to(getattr(torch, flags.precision.dtype))
    check_weights_fit(objective.model, state, str(path), "give the flags that it was trained with")
    objective.model.load_state_dict(state["model"])
    return objective
