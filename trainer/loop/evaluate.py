"""Evaluation: every sample of a data set counted once, over all processes."""

import torch
from torch import Tensor

from trainer.loading.batches import Batch
from trainer.loop.contract import check_outputs
from trainer.loop.per_sample import PerSampleOutputs
from trainer.loop.run import Run
from trainer.loop.totals import Totals, counted
from trainer.loop.windows import agree_ahead, evaluation_batches
from trainer.task import Objective, Outputs, Sums, validation_sets


def validate(run: Run) -> dict[str, Sums]:
    """The statistics of every validation set, by its name; see `evaluate`."""
    return {name: evaluate(run, name) for name in validation_sets(run.task.splits())}


def start_evaluation(run: Run) -> None:
    """Lets the objective, in eval mode, compute what all batches of an evaluation share."""
    objective = run.learner.objective
    if type(objective).start_evaluation is Objective.start_evaluation:
        return
    run.parallel.activity.enter("the start of the evaluation")
    with run.parallel.unsharded(objective), run.learner.precision.autocast(run.parallel.device.type):
        objective.start_evaluation()


@torch.no_grad()
def evaluate(run: Run, split: str) -> Sums:
    """The statistics of a data set over all processes: sums in float64 on the CPU.

    On the main process outputs per sample are among them, (n, ...) in order of index.

    Raises StopRequested if the run was asked to stop meanwhile; UserError for outputs that cannot be put together.
    """
    learner, totals, per_sample = run.learner, Totals(), PerSampleOutputs()
    run.parallel.sync_buffers(learner.objective)
    net = run.parallel.evaluation_module(learner.net)

    def forward(batch: Batch) -> Outputs:
        return net(run.parallel.to_device(batch))

    net.eval()
    with learner.ema.applied():
        start_evaluation(run)
        for batch, _ in agree_ahead(run, evaluation_batches(run, split)):
            run.parallel.activity.enter("evaluation")
            for (part, weight, num_samples), outputs in run.memory.evaluate(batch, forward, run.log.say):
                check_outputs(learner.objective, outputs)
                sums = {name: value for name, value in outputs.items() if isinstance(value, Tensor)}
                totals.add(counted(sums, num_samples > 0), weight)
                per_sample.add(part["index"], outputs)
    net.train()
    sums = totals.reduced(run.parallel)
    return sums | per_sample.gathered(run.parallel, len(run.task.splits()[split]))
