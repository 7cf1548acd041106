"""What happens after an optimizer step whose loss or gradient was not finite: `--on-nonfinite`.

The step itself was not applied, on any process (see `precision.py`). Everything here is called by all processes
at the same step, with the same attempts.
"""

from typing import Any

import torch

from trainer.loading.errors import BadInput
from trainer.loading.order import epoch_permutation
from trainer.loop.run import Progress, Run
from trainer.loop.step_results import Attempt

MOST_SKIPPED_IN_A_ROW = 100
MOST_ROLLBACKS = 10
"""Global batches left out after the last step that a checkpoint holds; one more, and the batches are not to blame."""
NUM_SAMPLES_SHOWN = 8


def prepare(run: Run) -> None:
    """Sees to it that there is a checkpoint to go back to, that of the initial weights if need be."""
    if run.on_nonfinite == "rollback" and not run.parallel.on_main(lambda: _has_checkpoint(run)):
        run.save()
        run.finish_saving()


def went_back(run: Run, wait: bool) -> bool:
    """Deals with steps that were not finite. True if the run now is at an earlier position.

    wait: learn about all steps so far; otherwise only about those whose outcome is known without waiting. Raises
    BadInput if the run is to stop.
    """
    failures = run.watch.failures(wait)
    if not failures:
        return False
    if run.on_nonfinite == "rollback":
        _roll_back(run, failures[0])
        return True
    for failure in failures:
        account = describe(run, failure)
        if run.on_nonfinite == "stop":
            raise divergence(run, account)
        _count_skipped(run, failure, account)
    return False


def describe(run: Run, attempt: Attempt) -> str:
    """Which step, whose loss, and which samples. All processes call it."""
    epoch, phase, start = attempt.start.epoch, attempt.start.phase, attempt.start.samples
    rank, world_size = run.parallel.shard
    own_loss_is_bad = torch.zeros(world_size, dtype=torch.float64)
    own_loss_is_bad[rank] = not bool(torch.isfinite(attempt.loss).all())
    ranks = run.parallel.sum(own_loss_is_bad).nonzero().flatten().tolist()
    if ranks:
        cause = "the loss" + (f" of rank {', '.join(map(str, ranks))}" if world_size > 1 else "")
    else:
        cause = "the gradient, rank unknown: every rank's loss was finite" if world_size > 1 else "the gradient"
    order = epoch_permutation(run.seed, epoch, phase, run.plan.phase_sizes[phase])
    samples = order[start : attempt.stop].tolist()
    shown = ", ".join(map(str, samples[:NUM_SAMPLES_SHOWN]))
    more = f" and {len(samples) - NUM_SAMPLES_SHOWN} more" if len(samples) > NUM_SAMPLES_SHOWN else ""
    return (
        f"optimizer step {attempt.step} (epoch {epoch + 1}) is not finite ({cause}); "
        f"its global batch of {len(samples)} samples: {shown}{more}"
    )


def divergence(run: Run, account: str, in_vain: str = "") -> BadInput:
    """The end of a run. in_vain: what was tried before."""
    skip = "" if in_vain else ", or leave such steps out with --on-nonfinite skip"
    return BadInput(
        f"training diverged: {account}; {in_vain}it was not applied, and earlier checkpoints are intact; lower --lr "
        f"{run.learning_rate.peak:g}, lengthen --warmup-epochs, lower --max-grad-norm {run.max_grad_norm:g}, look at "
        f"those samples{skip}"
    )


def _count_skipped(run: Run, failure: Attempt, account: str) -> None:
    progress = run.progress
    progress.skipped_steps += 1
    in_a_row = progress.skipped_in_a_row
    progress.skipped_in_a_row = (failure.step, in_a_row[1] + 1 if failure.step == in_a_row[0] + 1 else 1)
    if progress.skipped_in_a_row[1] > MOST_SKIPPED_IN_A_ROW:
        raise divergence(run, account, f"so were the {MOST_SKIPPED_IN_A_ROW} before it; ")
    run.log.say(f"Skipped: {account}. Steps skipped so far: {progress.skipped_steps}.")


def _roll_back(run: Run, failure: Attempt) -> None:
    """Goes back to the newest checkpoint, and leaves the global batch out from there on."""
    account = describe(run, failure)
    start = failure.start
    run.watch.forget()
    run.log.end_training()
    run.finish_saving()
    run.restore(run.parallel.on_main(lambda: _newest_checkpoint(run)))
    progress = run.progress
    if _num_left_out_since_a_saved_step(progress) >= MOST_ROLLBACKS:
        tried = f"since the last checkpoint the run went back {MOST_ROLLBACKS} times already; "
        raise divergence(run, account, tried)
    progress.left_out.append((start.epoch, start.phase, start.samples, failure.stop))
    run.parallel.on_main(lambda: run.log.rewind(progress.step, progress.position))
    run.log.say(f"Went back to optimizer step {progress.step}: {account}. That batch is left out from now on.")
    # Before any further step, or a kill would lead to the same batch again.
    run.save()
    run.finish_saving()


def _num_left_out_since_a_saved_step(progress: Progress) -> int:
    """Global batches left out after the last step that the newest checkpoint holds, itself at this position."""
    position = progress.position
    behind = (position.epoch, position.phase, position.samples)
    left_out = sorted(progress.left_out)
    for epoch, phase, start, stop in reversed(left_out):
        if (epoch, phase, stop) == behind:
            behind = (epoch, phase, start)
    return sum((epoch, phase, start) >= behind for epoch, phase, start, _ in left_out)


def _has_checkpoint(run: Run) -> bool:
    assert run.directory is not None
    return run.directory.has_checkpoint


def _newest_checkpoint(run: Run) -> dict[str, Any]:
    assert run.directory is not None
    return run.directory.load_newest()
