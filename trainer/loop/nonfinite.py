"""What happens after an optimizer step whose loss or gradient was not finite: `--on-nonfinite`.

The step itself was not applied, on any process (see `precision.py`). Everything here is called by all processes at the
same step, with the same records.
"""

import torch

from trainer.common.errors import UnfitState
from trainer.loop.run import Run
from trainer.loop.step_results import StepRecord

MOST_SKIPPED_IN_A_ROW = 100
NUM_SAMPLES_SHOWN = 8


def check_steps(run: Run, wait: bool) -> None:
    """Deals with steps that were not finite: ends the run by UnfitState, or counts them as skipped.

    wait: learn about all steps so far; otherwise only about those whose outcome is known without waiting.
    """
    if wait:
        run.parallel.barrier()
    for record in run.step_results.take_alarms(wait):
        account = describe(run, record)
        if run.settings.on_nonfinite == "stop":
            raise divergence(run, account, is_first=record.number == 1)
        _count_skipped(run, record, account)


def describe(run: Run, record: StepRecord) -> str:
    """Which step, whose loss, and which samples. All processes call it."""
    step = record.planned
    rank, world_size = run.parallel.rank, run.parallel.world_size
    own_loss_is_bad = torch.zeros(world_size, dtype=torch.float64)
    own_loss_is_bad[rank] = not bool(torch.isfinite(record.result.sums["loss"]).all())
    ranks = run.parallel.sum(own_loss_is_bad).nonzero().flatten().tolist()
    if ranks:
        cause = "the loss" + (f" of rank {', '.join(map(str, ranks))}" if world_size > 1 else "")
    else:
        cause = "the gradient, rank unknown: every rank's loss was finite" if world_size > 1 else "the gradient"
    samples = run.plan.orders[step.phase].samples(step.epoch, step.start, step.end).tolist()
    shown = ", ".join(map(str, samples[:NUM_SAMPLES_SHOWN]))
    more = f" and {len(samples) - NUM_SAMPLES_SHOWN} more" if len(samples) > NUM_SAMPLES_SHOWN else ""
    phase = f", phase {run.task.phases[step.phase]}" if len(run.task.phases) > 1 else ""
    return (
        f"optimizer step {record.number} (epoch {step.after.epoch + 1}{phase}) is not finite ({cause}); "
        f"its global batch of {len(samples)} samples: {shown}{more}"
    )


def divergence(run: Run, account: str, in_vain: str = "", is_first: bool = False) -> UnfitState:
    """The end of a run. in_vain: what was tried before. is_first: whether no step has changed the weights before."""
    skip = "" if in_vain else ", or leave such steps out with --on-nonfinite skip"
    if is_first:
        return UnfitState(
            f"training diverged: {account}; the weights were those of the start: look at those samples, at the flags "
            f"that scale or vary them, and at the model{skip}"
        )
    return UnfitState(
        f"training diverged: {account}; {in_vain}it was not applied, and earlier checkpoints are intact; lower --lr "
        f"{run.learning_rate.peak:g}, lengthen --warmup-epochs, lower --max-grad-norm {run.learner.max_grad_norm:g}, "
        f"look at those samples{skip}"
    )


def _count_skipped(run: Run, record: StepRecord, account: str) -> None:
    progress = run.progress
    progress.skipped_steps += 1
    last, in_a_row = progress.skipped_in_a_row
    progress.skipped_in_a_row = (record.number, in_a_row + 1 if record.number == last + 1 else 1)
    if progress.skipped_in_a_row[1] > MOST_SKIPPED_IN_A_ROW:
        raise divergence(run, account, f"so were the {MOST_SKIPPED_IN_A_ROW} before it; ")
    run.log.say(f"Skipped: {account}. Steps skipped so far: {progress.skipped_steps}.")
