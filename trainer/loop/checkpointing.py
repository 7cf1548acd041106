"""Saves the state of a run as a checkpoint, and restores it."""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from trainer.checkpoint.background import BackgroundSaver
from trainer.checkpoint.file import error_of_saving, meta_state_of
from trainer.checkpoint.format import not_finite, read_progress
from trainer.common.errors import UnfitState
from trainer.common.tensors import local_shards
from trainer.common.torch_private import num_writes
from trainer.loading.streams import Place
from trainer.logs.run_log import RunLog, SilentLog
from trainer.loop.evaluate import digest_of
from trainer.loop.learner import Learner
from trainer.loop.module_state import persistent_buffers
from trainer.loop.parts import PartTotals, restored_totals, totals_maker
from trainer.loop.plan import Plan
from trainer.loop.progress import Progress
from trainer.loop.run import Run
from trainer.loop.totals import share_of
from trainer.parallel.group import Group
from trainer.parallel.optimizer_states import state_of as state_of_optimizer
from trainer.task import Task, training_streams

Outline = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Maps the name of each weight and buffer to its dtype and shape."""

_versions_of_unchanged: "WeakKeyDictionary[nn.Module, list[int]]" = WeakKeyDictionary()
"""Version counters of helpers with the right digest, so that later saves need not read all their bytes."""


def save(run: Run, value: float | None = None, is_best: bool = False) -> None:
    """Copies the run's state and writes the copy in the background; `BackgroundSaver.finish` waits for the write.

    value: the monitored metric; None without validation. All processes must call this function. Raises UserError if the
    model differs between processes, or if the previous checkpoint could not be written; if the disk was full, logs a
    message instead.
    """
    strategy, learner, progress = run.strategy, run.learner, run.progress
    for watch in run.watches:
        watch.before_save(progress.step, run.log)
    progress.read_clock()
    progress.last_save = progress.step
    strategy.sync_tensors(persistent_buffers(learner.objective))
    totals = {phase: own.reduced(strategy.group) for phase, own in progress.totals.items()}
    rows = {phase: own.rows(strategy.group) for phase, own in progress.totals.items() if isinstance(own, PartTotals)}
    if not rows:
        # This run continues from the saved totals, as a resumed run does, so that both add sums in the same order.
        _share(strategy.group, progress, totals)
    run.await_saver(run.saver.wait)
    strategy.group.activity.enter("saving")
    state = strategy.full_state(learner.objective, learner.optimizers)
    weights = state["model"]
    learner.ema.put_into(state, strategy.full_weights)
    verdict = {"value": value, "is_best": is_best} | ({"totals_of_parts": rows} if rows else {})
    verdict |= places_of_streams(run.task, run.plan, progress)

    def save_on_main() -> None:
        refuse_non_finite(learner, weights, progress, run.learning_rate.peak)
        refuse_another_model(weights, run.model_outline, progress.step)
        refuse_changed_helpers(learner, run.facts, progress.step)
        report_saving(run.saver, run.log)
        live, copied = (state, {}) if strategy.has_full_state else ({}, state)
        run.saver.start(state_of(learner, live, progress, totals) | run.facts | verdict, copied)

    strategy.group.on_main(save_on_main)


def try_saving(
    learner: Learner, outline: Outline, facts: Mapping[str, Any], progress: Progress, learning_rate: float
) -> None:
    """Raises UnfitState if the state after a phase's first step cannot be saved; writes nothing.

    outline: the built model's dtypes and shapes. facts: entries of checkpoints. learning_rate: the peak. All processes
    must call this function.
    """
    group = learner.strategy.group
    group.activity.enter("saving")

    def refuse_on_main() -> None:
        model, optimizers = learner.objective.model.state_dict(), learner.optimizers
        refuse_another_model(model, outline, progress.step)
        refuse_changed_helpers(learner, facts, progress.step)
        shards = dict(zip(model, local_shards([*model.values()]), strict=True))
        refuse_non_finite(learner, shards, progress, learning_rate)
        state = {
            "model": model,
            "optimizers": {phase: [state_of_optimizer(each) for each in own] for phase, own in optimizers.items()},
        }
        wrong = error_of_saving(meta_state_of(state), resumable=False)
        if wrong is not None:
            kinds = {
                f"optimizers.{phase}[{index}]": type(optimizer).__name__
                for phase, several in optimizers.items()
                for index, optimizer in enumerate(several)
            }
            whose = next((f" (of {kind}.state_dict())" for at, kind in kinds.items() if wrong.startswith(at)), "")
            raise UnfitState(
                f"the state after optimizer step {progress.step} cannot be saved: {wrong}{whose}; "
                "make it a dense tensor, a number, a string, or a list or dict of these"
            )

    group.on_main(refuse_on_main)


def refuse_another_model(weights: Mapping[str, Tensor], outline: Outline, step: int) -> None:
    """Raises UnfitState if the names, shapes or dtypes of the model's tensors have changed since it was built.

    No run could resume from a checkpoint of the changed model. step: completed optimizer steps.
    """
    now = {name: (weight.dtype, tuple(weight.shape)) for name, weight in weights.items()}
    name = next((name for name in {**outline, **now} if outline.get(name) != now.get(name)), None)
    if name is None:
        return
    built, found = (f"{own[name][0]} of shape {own[name][1]}" if name in own else "absent" for own in (outline, now))
    raise UnfitState(
        f"the model has changed since it was built: {name} was {built} and is {found} after optimizer step {step}; "
        "no checkpoint is saved, because no run could resume from it; earlier checkpoints are intact; build the model "
        "in its final shape, or register a growing buffer with persistent=False"
    )


def refuse_changed_helpers(learner: Learner, facts: Mapping[str, Any], step: int) -> None:
    """Raises UnfitState if helpers differ from their digests in `facts`. step: completed optimizer steps."""
    for name, digest in facts.get("helpers", {}).items():
        helper = learner.objective.helpers[name]
        tensors = [*helper.parameters(), *helper.buffers()]
        versions = [num_writes(tensor) for tensor in tensors if not tensor.is_inference()]
        if _versions_of_unchanged.get(helper) == versions:
            continue
        if digest_of(helper.state_dict().values()) != digest:
            raise UnfitState(
                f"the helper {name!r} has changed after optimizer step {step}, but helpers are never saved, so a "
                "resumed run would not learn the same; put a module that changes into the model, and update it in "
                "`after_step` of the objective; see docs/own_task.md"
            )
        _versions_of_unchanged[helper] = versions


def _share(group: Group, progress: Progress, totals: Mapping[str, Mapping[str, Tensor]]) -> None:
    progress.totals = {phase: share_of(own, group) for phase, own in totals.items()}
    progress.own_samples = progress.samples if group.is_main else 0


def report_saving(saver: BackgroundSaver, log: RunLog | SilentLog) -> None:
    """Logs a message if the last save failed because the disk was full."""
    refusal = saver.take_refusal()
    if refusal is not None:
        log.say(refusal)


def state_of(
    learner: Learner, state: dict[str, Any], progress: Progress, totals: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Any]:
    """Returns a checkpoint's training state. state: weights and optimizer states. totals: sums of metrics, by phase."""
    buffers = learner.buffers.forward_state.saved()
    return state | {
        **({"other_buffers": buffers} if buffers else {}),
        "scaler": learner.precision.scaler.state_dict(),
        "totals": totals,
        **progress.entries(),
    }


def places_of_streams(task: Task, plan: Plan, progress: Progress) -> dict[str, Any]:
    """Returns {"streams": positions of stateful training streams by phase}, or {} without such streams."""
    found = {}
    for phase, dataset in training_streams(task).items():
        index = task.phases.index(phase)
        place = dataset.place_before(index, *progress.position.of_phase(index, bool(plan.turns)))
        if place is not None:
            found[phase] = place._asdict()
    return {"streams": found} if found else {}


def restore_streams(task: Task, state: Mapping[str, Any]) -> None:
    """Moves training streams to the positions that a checkpoint contains."""
    places = state.get("streams", {})
    for phase, dataset in training_streams(task).items():
        if phase in places:
            dataset.begin_at(task.phases.index(phase), Place(**places[phase]))


def diverged(model: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    """Returns names of non-finite parameters and of buffers with NaN; buffers such as masks may contain infinities."""
    return not_finite(weights, may_be_infinite=dict(model.named_buffers()))


def refuse_non_finite(learner: Learner, weights: Mapping[str, Tensor], progress: Progress, peak: float) -> None:
    """Raises UnfitState if a weight is not finite or a buffer contains NaN. peak: peak learning rate."""
    model = learner.objective.model
    bad = diverged(model, weights)
    if not bad:
        return
    if set(bad) <= dict(model.named_buffers()).keys():
        raise UnfitState(
            f"NaN in buffer(s) {', '.join(bad[:3])} after optimizer step {progress.step}, so this state is not saved; "
            "earlier checkpoints are intact; if a buffer contains NaN from the start, initialise it with other values"
        )
    epoch = progress.position.epoch + (0 if progress.position.at_epoch_start else 1)
    raise UnfitState(
        f"training diverged: non-finite values in {', '.join(bad[:3])} after optimizer step {progress.step} (epoch "
        f"{epoch}), so this state is not saved; earlier checkpoints are intact; {learner.advice_if_diverged(peak)}"
    )


def restore_progress(learner: Learner, state: Mapping[str, Any]) -> Progress:
    """Restores progress, optimizer states and buffers from a checkpoint whose weights are already loaded.

    All processes must call this function. Raises UserError if the optimizer states do not fit the optimizers.
    """
    strategy = learner.strategy
    learner.buffers.forward_state.restore(state.get("other_buffers", {}))
    dtype = getattr(torch, state["config"]["--dtype"])
    strategy.load_optimizer_states(state["optimizers"], learner.optimizers, dtype)
    if state["scaler"] and learner.precision.scaler.is_enabled():
        learner.precision.scaler.load_state_dict(state["scaler"])
    progress = Progress(**read_progress(state), last_save=state["step"], new_totals=totals_maker(strategy))
    _share(strategy.group, progress, state["totals"])
    if strategy.num_parts:
        rows = state.get("totals_of_parts", {})
        own = {phase: restored_totals(strategy, its, rows.get(phase, {})) for phase, its in state["totals"].items()}
        progress.totals = own
    return progress
