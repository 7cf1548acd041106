"""Evaluates runs: at the end of training, with `--eval-only`, or as an ensemble."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.format import LARGE
from trainer.checkpoint.manifest import RESULTS
from trainer.checkpoint.weights import load_best_weights
from trainer.commands.baselines import beside_baselines, find_baselines
from trainer.commands.build import assemble_run, describe_run, prepare_training, set_up_torch
from trainer.commands.flags import Flags
from trainer.commands.resume import Changes
from trainer.commands.weights import CPU, find_run, initialise, trained_objective, use_weights
from trainer.common.errors import UserError
from trainer.common.files import without_nan
from trainer.failure.signals import StopRequest
from trainer.logs.console import of_headline, say
from trainer.logs.run_log import scores_text
from trainer.loop.ema import ExponentialMovingAverage
from trainer.loop.evaluate import evaluate, log_pictures, metrics_of, validate
from trainer.loop.law import check_sums
from trainer.loop.precision import in_precision
from trainer.loop.run import Run
from trainer.parallel.devices import pick_device
from trainer.parallel.strategy import SingleDevice, Strategy
from trainer.task import Baseline, Sums, Task

SCORES = "scores.jsonl"
"""File in `--save-dir` to which each evaluation without training appends a JSON line."""


def score(run: Run, no_test: bool, baselines: Mapping[str, Baseline] | None = None) -> None:
    """Scores a trained run and writes results.json. Raises StopRequested if the run is asked to stop.

    Evaluates the test set with the best weights. Without a test set, reports the best validation scores again, or the
    training scores if there is no validation set.

    no_test: whether to evaluate the validation sets, with the last weights, instead of the test set.
    """
    progress, has_validation = run.progress, run.plan.has_validation
    progress.read_clock()
    run.task.at = progress.where(run.plan, run.group)
    weights = {"epoch": progress.position.epoch, "step": progress.step, "is_best": False}
    on_test, sums = "test" in run.task.splits() and not no_test, dict[str, Sums]()
    if has_validation and not no_test:
        best = run.strategy.load_on_main(lambda: _best_weights(run.directory), LARGE)
        if best:
            use_weights(run.learner, best.pop("model"), "the best checkpoint", "choose another --save-dir")
            weights = best
        else:
            monitor = run.task.monitor[0]
            lack = "intact best checkpoint was found" if progress.best else f"finite {monitor} of a checkpoint is known"
            run.log.say(f"No {lack}; scoring the last weights.")
    metrics = {} if on_test or (has_validation and not weights["is_best"]) else progress.scores
    if not metrics:
        sums = {"test": evaluate(run, "test")} if on_test else validate(run)
        metrics = metrics_of(run.task, run.group, sums)
    run.log.result(progress.step, f"with the {'best' if weights['is_best'] else 'last'} weights", metrics)
    best_value, own = progress.best.value if progress.best else None, of_headline(metrics, run.task.headline)
    folder = run.directory.path
    for line in beside_baselines(baselines or {}, run.facts["task"], run.task.monitor, own, best_value, folder):
        run.log.say(line)
    if on_test:
        log_pictures(run, sums)

    def write_results() -> None:
        details = {split: run.task.details(own) for split, own in sums.items()}
        best = progress.best
        run.directory.mark_final()
        run.directory.write_json(
            RESULTS,
            {
                "task": run.facts["task"],
                "scored": "test" if on_test else "val" if has_validation else None,
                "weights": weights,
                "metrics": metrics,
                "best": asdict(best) | {"monitor": run.task.monitor[0]} if best else None,
                "baselines": {name: dict(baseline.metrics) for name, baseline in (baselines or {}).items()},
                "num_parameters": run.learner.num_parameters,
                "train_seconds": round(progress.train_seconds, 3),
                "world_size": run.group.world_size,
                "num_devices": run.strategy.num_devices,
                "global_batch_size": run.memory.splits[0].global_batch_size,
                "seed": run.settings.seed,
                "epochs": progress.position.epoch,
                "step": progress.step,
                **(details if len(details) > 1 else next(iter(details.values()), {})),
            },
        )

    run.group.on_main(write_results)  # the last action, since results.json marks the run as complete


def _best_weights(directory: RunDirectory) -> dict[str, Any]:
    state = directory.load_best()
    if state is None:
        return {}
    return {"model": state["model"], "epoch": state["position"]["epoch"], "step": state["step"], "is_best": True}


def better_can_be_scored(directory: RunDirectory, results: Mapping[str, Any]) -> bool:
    """Returns whether results.json contains test scores of the last weights although the best weights can be loaded."""
    weights = results.get("weights")
    missed = isinstance(weights, dict) and weights.get("is_best") is False and results.get("scored") == "test"
    return missed and directory.load_best() is not None


def evaluate_only(flags: Flags, task: Task, strategy: Strategy) -> None:
    """Runs `--eval-only`: prints validation and test scores, and appends them to scores.jsonl. Raises UserError."""
    given = flags.checkpoint
    files = {"--resume-from": given.resume_from, "--init-from": given.init_from}
    trained = strategy.load_on_main(lambda: find_run(flags, files, task.shipped_weights(), say), LARGE)
    label, state = trained.label, trained.state
    source = f"the checkpoint ({label})"
    with closing(assemble_run(flags, task, strategy)) as run:
        changes = Changes(state, run.facts, task)
        if not trained.comes_with_task:
            changes.refuse_other_data(source)
        hint = "leave out the flags that change the model" if trained.comes_with_task else changes.undo_hint()
        use_weights(run.learner, state["model"], source, hint)
        with strategy.unsharded(run.learner.objective):
            task.check_weights(run.learner.objective)
        lines = [*trained.remarks, *describe_run(run, flags), f"Evaluating {label}.", *changes.notes_on_data]
        lines += [] if trained.comes_with_task else changes.notes_on_scoring
        on_test = "test" in task.splits() and not flags.run.no_test
        sums = validate(run) | ({"test": evaluate(run, "test")} if on_test else {})
        metrics = [metrics_of(task, strategy.group, {split: own}) for split, own in sums.items()]
        wanted = not (task.trains or given.eval_only)
        baselines = find_baselines(task, strategy.group, flags.run, run.log, 0) if wanted else {}
    if strategy.group.is_main:
        found = {name: value for of_split in metrics for name, value in of_split.items()}
        scored = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "weights": label,
            "metrics": without_nan(found),
            "baselines": {name: dict(own.metrics) for name, own in baselines.items()},
            "config": run.facts["config"],
        }
        own = of_headline(found, task.headline)
        beside = beside_baselines(baselines, flags.run.task, task.monitor, own, None, given.save_dir)
        following = ["Next: add --predict FILE to this command to predict new data."]
        following = following if wanted and type(task).new_data is not Task.new_data else []
        say("\n".join([*lines, _kept(given.save_dir, scored), *map(scores_text, metrics), *beside, *following]))


def _kept(folder: Path, scored: Mapping[str, Any]) -> str:
    """Appends a line to scores.jsonl; returns a sentence that names the file or describes the disk error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / SCORES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(scored) + "\n")
    except OSError as error:
        return f"Could not save the scores to {folder / SCORES}: {error.strerror or error}."
    return f"Scores saved to {folder / SCORES}:"


def check_only(flags: Flags, task: Task, strategy: Strategy) -> None:
    """Runs `--check-task`: checks in float64 that splitting a batch does not change a new model's loss and metrics.

    Raises UserError if it does.
    """
    if task.fitted:
        raise UserError("--check-task: the model is fitted, not trained, and has no loss to check; leave the flag out")
    exact = replace(flags, precision=replace(flags.precision, dtype="float64", amp="off"))
    with closing(assemble_run(exact, task, strategy, is_new=True)) as run:
        initialise(run.learner, exact.checkpoint, task.shipped_weights())
        prepare_training(exact, task, run.learner, run.plan.orders, run.memory)
        if found := check_sums(task, run.learner, no_limit=True):
            raise UserError("--check-task: " + "\n".join(found))
        lines = run.learner.buffers.forward_state.remarks(strategy.group.world_size)
        couples = run.learner.objective.coupled or run.learner.objective.is_joint
    if strategy.group.is_main:
        passed = (
            "The loss couples samples by design, so its dependence on batch splits is not checked."
            if couples
            else "The objective's loss and metrics do not depend on how a batch is split."
        )
        say("\n".join(lines or [passed]))


def ensemble_metrics(
    flags: Flags, task: Task, directories: Sequence[Path], stop: StopRequest
) -> dict[str, float] | None:
    """Returns the test metrics of an ensemble of runs with their best weights; None if the task has no ensemble.

    Raises UserError for a run without weights, or StopRequested if asked to stop.
    """
    device = pick_device(flags.devices.device)
    if flags.multi is not None and flags.multi.gpu_ids is not None and device.type == "cuda":
        device = torch.device("cuda", flags.multi.gpu_ids[0])
    strategy = SingleDevice(device)
    set_up_torch(flags, strategy.group)
    dtype, hint = getattr(torch, flags.precision.dtype), "give the flags of its training run"
    found = ((load_best_weights(directory, say)["model"], str(directory)) for directory in directories)
    # on the CPU, since the models may not all fit on a GPU
    ensemble = task.ensemble([trained_objective(task, weights, CPU, dtype, name, hint) for weights, name in found])
    if ensemble is None:
        return None
    with closing(assemble_run(flags, task, strategy)) as run:
        run.stop = stop
        ensemble = ensemble.to(strategy.device)
        run.learner = replace(
            run.learner,
            objective=ensemble,
            net=in_precision(ensemble, run.learner.precision),
            ema=ExponentialMovingAverage(ensemble.model, decay=0),
        )
        return metrics_of(task, run.group, {"test": evaluate(run, "test")})
