"""Evaluation: every sample of a data set counted once, over all processes."""

import torch

from trainer.loading.batches import Batch
from trainer.loop.memory import evaluate_within_memory
from trainer.loop.run import Run
from trainer.loop.totals import Totals, counted
from trainer.loop.windows import agree_ahead, evaluation_batches
from trainer.task import Sums


@torch.no_grad()
def evaluate(run: Run, split: str) -> Sums:
    """The statistics of a data set over all processes, float64 on the CPU.

    Raises StopRequested if the run was asked to stop meanwhile.
    """
    learner, totals = run.learner, Totals()
    run.parallel.sync_buffers(learner.objective)
    net = run.parallel.evaluation_module(learner.net)

    def forward(batch: Batch, weight: float) -> Sums:
        return counted(net(run.parallel.to_device(batch)), weight)

    net.eval()
    with learner.ema.applied():
        for batch, _ in agree_ahead(run, evaluation_batches(run, split)):
            run.parallel.phase.enter("evaluation")
            for sums, weight in evaluate_within_memory(run, batch, forward):
                totals.add(sums, weight)
    net.train()
    return totals.reduced(run.parallel)
