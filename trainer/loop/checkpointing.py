"""A run -> a checkpoint -> a run."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.readable import error_of_saving, meta_state_of
from trainer.checkpoint.schema import not_finite
from trainer.common.errors import UnfitState
from trainer.loading.order import Position
from trainer.loop.progress import Best, Progress
from trainer.loop.run import Run
from trainer.loop.totals import share_of
from trainer.parallel.optimizer_states import state_of as state_of_optimizer
from trainer.parallel.parts import local_shards


def save(run: Run, value: float | None = None, is_best: bool = False) -> None:
    """Copies this moment, and writes it as a checkpoint while training goes on. All processes call it.

    value: the monitored metric, None where there was no validation. Raises UserError if the checkpoint before could not
    be written, unless for lack of room: then it says so, and tries again; and if the processes have drifted apart. What
    is to be on the disk now needs `finish_saving`.
    """
    for note in run.lockstep.compare_now(run.progress.step):
        run.log.say_of_ranks(run.progress.step, note)
    run.progress.read_clock()
    run.progress.last_save = run.progress.step
    run.parallel.sync_buffers(run.learner.objective)
    totals = {phase: own.reduced(run.parallel) for phase, own in run.progress.totals.items()}
    # As after a resume, so that an unbroken run adds up in the same order.
    _share(run, run.progress, totals)
    run.parallel.activity.enter("saving")
    state = run.parallel.full_state(run.learner.objective, run.learner.optimizers)
    weights = state["model"]
    run.learner.ema.put_into(state, run.parallel.full_weights)
    verdict = {"value": value, "is_best": is_best}

    def save_on_main() -> None:
        _refuse_non_finite(run, weights)
        refuse_another_model(run, weights)
        _save_in_background(run, state_of(run, state, run.progress, totals) | verdict)

    run.parallel.on_main(save_on_main)


def try_saving(run: Run) -> None:
    """A save that writes and gathers nothing: raises UnfitState for a state that no checkpoint could hold.

    After the first step of a phase, so that it costs that step alone. All processes call it.
    """
    run.parallel.activity.enter("saving")

    def refuse_on_main() -> None:
        model, optimizers = run.learner.objective.model.state_dict(), run.learner.optimizers
        refuse_another_model(run, model)
        _refuse_non_finite(run, dict(zip(model, local_shards([*model.values()]), strict=True)))
        state = {
            "model": model,
            "optimizers": {phase: [state_of_optimizer(each) for each in own] for phase, own in optimizers.items()},
        }
        wrong = error_of_saving(meta_state_of(state), resumable=False)
        if wrong is not None:
            raise UnfitState(
                f"after optimizer step {run.progress.step} no checkpoint can hold the state of the run: {wrong}"
                f"{_of_whom(run, wrong)}; make it a dense tensor, a number, a text, or a list or mapping of these"
            )

    run.parallel.on_main(refuse_on_main)


def _of_whom(run: Run, wrong: str) -> str:
    """The optimizer that an entry of a checkpoint is of, if any, for a message."""
    named = {
        f"optimizers.{phase}[{index}]": type(optimizer).__name__
        for phase, several in run.learner.optimizers.items()
        for index, optimizer in enumerate(several)
    }
    return next((f" (of {kind}.state_dict())" for place, kind in named.items() if wrong.startswith(place)), "")


def refuse_another_model(run: Run, weights: Mapping[str, Tensor]) -> None:
    """Raises UnfitState where tensors of the model are others than when it was built: a resume could not load them."""
    now = {name: (weight.dtype, tuple(weight.shape)) for name, weight in weights.items()}
    different = [name for name in {**run.model_outline, **now} if run.model_outline.get(name) != now.get(name)]
    if different:
        name = different[0]
        built, found = (
            f"{outline[name][0]} of shape {outline[name][1]}" if name in outline else "absent"
            for outline in (run.model_outline, now)
        )
        raise UnfitState(
            f"the model has changed since it was built: {name} was {built} and is {found} after optimizer step "
            f"{run.progress.step}, so nothing is saved, for no resume could load it; earlier checkpoints are intact; "
            "build it in its final shape, or register a buffer that grows with persistent=False"
        )


def _share(run: Run, progress: Progress, totals: Mapping[str, Mapping[str, Tensor]]) -> None:
    progress.totals = {phase: share_of(own, run.parallel) for phase, own in totals.items()}
    progress.own_samples = progress.samples if run.parallel.is_main else 0


def _save_in_background(run: Run, state: dict[str, Any]) -> None:
    run.saver.wait()
    report_saving(run)
    # The records of this checkpoint are with the operating system before it is; later ones a resume drops.
    run.log.flush()
    run.saver.start(state)


def report_saving(run: Run) -> None:
    """Tells the user of a save for which there was no room."""
    refusal = run.saver.take_refusal()
    if refusal is not None:
        run.log.say(refusal)


def finish_saving(run: Run) -> None:
    """Returns when everything saved is on the disk. All processes call it. Raises UserError if it cannot be."""
    run.parallel.on_main(run.saver.finish)


def state_of(
    run: Run, state: dict[str, Any], progress: Progress, totals: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Any]:
    """What a checkpoint holds of the run. state: weights and moments."""
    buffers = run.learner.buffers.forward_state.saved()
    return state | {
        **({"other_buffers": buffers} if buffers else {}),
        "scaler": run.learner.precision.scaler.state_dict(),
        "position": asdict(progress.position),
        "step": progress.step,
        "best": asdict(progress.best) if progress.best else None,
        "evaluations_since_best": progress.evaluations_since_best,
        "last_report": progress.last_report,
        "train_seconds": progress.train_seconds,
        "totals": totals,
        "reported": progress.reported,
        "covered_samples": progress.samples,
        "misses_samples": progress.misses_samples,
        "skipped_steps": progress.skipped_steps,
        "skipped_in_a_row": progress.skipped_in_a_row,
        **run.facts,
    }


def diverged(run: Run, weights: Mapping[str, Tensor]) -> list[str]:
    """The names of weights of the model that are not finite. A buffer may hold infinities, as a mask does."""
    return not_finite(weights, may_be_infinite=dict(run.learner.objective.model.named_buffers()))


def _refuse_non_finite(run: Run, weights: Mapping[str, Tensor]) -> None:
    if bad := diverged(run, weights):
        buffers = dict(run.learner.objective.model.named_buffers())
        if all(name in buffers for name in bad):
            raise UnfitState(
                f"{', '.join(bad[:3])} holds NaN after optimizer step {run.progress.step}, so nothing is saved; "
                "earlier checkpoints are intact; let a number or an infinity stand for what such a buffer does not "
                "know yet"
            )
        position = run.progress.position
        epoch = position.epoch if position.at_epoch_start else position.epoch + 1
        raise UnfitState(
            f"training diverged: {', '.join(bad[:3])} not finite after optimizer step {run.progress.step} (epoch "
            f"{epoch}), so nothing is saved; earlier checkpoints are intact; lower --lr {run.learning_rate.peak:g}, "
            f"lengthen --warmup-epochs or lower --max-grad-norm {run.learner.max_grad_norm:g}"
        )


def restore_progress(run: Run, state: Mapping[str, Any]) -> None:
    """Goes back to the moment of a checkpoint whose weights are restored."""
    learner, step = run.learner, state["step"]
    learner.buffers.forward_state.restore(state.get("other_buffers", {}))
    dtype = getattr(torch, state["config"]["--dtype"])
    run.parallel.load_moments(state["optimizers"], learner.optimizers, dtype)
    if state["scaler"] and learner.precision.scaler.is_enabled():
        learner.precision.scaler.load_state_dict(state["scaler"])
    run.progress = Progress(
        position=Position(**state["position"]),
        step=step,
        best=Best(**state["best"]) if state["best"] else None,
        evaluations_since_best=state["evaluations_since_best"],
        last_report=state["last_report"],
        last_save=step,
        train_seconds=state["train_seconds"],
        samples=state["covered_samples"],
        misses_samples=state["misses_samples"],
        reported=state["reported"],
        skipped_steps=state["skipped_steps"],
        skipped_in_a_row=tuple(state["skipped_in_a_row"]),
    )
    _share(run, run.progress, state["totals"])
