"""Scores at the end of training, or on request; of one run, or of the ensemble of several."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.records import RESULTS
from trainer.checkpoint.weights import load_best_weights
from trainer.commands.build import assemble_run, set_up_torch
from trainer.commands.describe import describe_run
from trainer.commands.flags import Flags
from trainer.commands.resume import notes_on_data, notes_on_flags, refuse_other_data, undo_hint
from trainer.commands.trained import CPU, find_run, trained_objective
from trainer.commands.weights import use_weights
from trainer.logs.console import say
from trainer.logs.run_log import scores_text
from trainer.loop.ema import ExponentialMovingAverage
from trainer.loop.evaluate import evaluate, log_pictures, validate
from trainer.loop.precision import in_precision
from trainer.loop.run import Run
from trainer.parallel.base import Parallel, SingleDevice
from trainer.parallel.devices import pick_device
from trainer.parallel.signals import StopRequest
from trainer.task import Objective, Sums, Task


def score(run: Run, on_test: bool) -> None:
    """Ends a run: scores it and writes results.json. Raises StopRequested if asked to stop meanwhile.

    on_test: score the test set, with the best weights. Otherwise the validation sets, with the last weights: those
    that the same settings would give without any.
    """
    run.progress.read_clock()
    has_validation = run.plan.has_validation
    weights = {"epoch": run.progress.position.epoch, "step": run.progress.step, "is_best": False}
    if on_test and has_validation and (best := _take_best_weights(run)):
        weights = best
    sums = {"test": evaluate(run, "test")} if on_test else validate(run)
    metrics = run.metrics(sums)
    run.log.result(run.progress.step, f"with the {'best' if weights['is_best'] else 'last'} weights", metrics)
    if on_test:
        log_pictures(run, sums)
    # Last, since it says that nothing is left to do.
    scored = "test" if on_test else "val" if has_validation else None
    run.parallel.on_main(lambda: _write_results(run, scored, weights, metrics, sums))


def _take_best_weights(run: Run) -> dict[str, Any] | None:
    """Loads the best weights and returns their epoch and step; None where there are none, or their file is damaged."""

    def load() -> dict[str, Any]:
        state = run.directory.load_best()
        return {name: state[name] for name in ("model", "position", "step")} if state is not None else {}

    best = run.parallel.load_on_main(load)
    if not best:
        run.log.say("There is no intact best checkpoint: the test set is scored with the last weights.")
        return None
    use_weights(run, best["model"], "the best checkpoint", "choose another --save-dir")
    return {"epoch": best["position"]["epoch"], "step": best["step"], "is_best": True}


def better_can_be_scored(run: Run, results: Mapping[str, Any]) -> bool:
    """Whether the test set was scored with other weights than the best, whose file is whole again."""
    weights = results.get("weights")
    missed = isinstance(weights, dict) and weights.get("is_best") is False and results.get("scored") == "test"
    return missed and run.plan.has_validation and run.directory.load_best() is not None


def _write_results(
    run: Run, scored: str | None, weights: Mapping[str, Any], metrics: dict[str, float], sums: Mapping[str, Sums]
) -> None:
    details = {split: run.task.details(own) for split, own in sums.items()}
    progress, best = run.progress, run.progress.best
    run.directory.mark_final()
    run.directory.write_json(
        RESULTS,
        {
            "task": run.facts["task"],
            "scored": scored,
            "weights": dict(weights),
            "metrics": metrics,
            "best": asdict(best) | {"monitor": run.task.monitor[0]} if best else None,
            "num_parameters": run.learner.num_parameters,
            "train_seconds": round(progress.train_seconds, 3),
            "world_size": run.parallel.world_size,
            "num_devices": run.parallel.num_devices,
            "global_batch_size": run.memory.splits[0].global_batch_size,
            "seed": run.settings.seed,
            "epochs": progress.position.epoch,
            "step": progress.step,
            **(details if len(details) > 1 else next(iter(details.values()), {})),
        },
    )


def evaluate_only(flags: Flags, task: Task, parallel: Parallel) -> None:
    """`--eval-only`: prints validation and test scores; writes nothing. Raises UserError."""
    given = flags.checkpoint
    files = {"--resume-from": given.resume_from, "--init-from": given.init_from}
    trained = parallel.load_on_main(lambda: find_run(flags, files, task.shipped_weights(), say))
    label, state = trained.label, trained.state
    with closing(assemble_run(flags, task, parallel)) as run:
        if not trained.comes_with_task:
            refuse_other_data(run, state, f"the checkpoint ({label})")
        hint = "leave out the flags that change the model" if trained.comes_with_task else undo_hint(run, state)
        use_weights(run, state["model"], f"the checkpoint ({label})", hint)
        with parallel.unsharded(run.learner.objective):
            task.check_weights(run.learner.objective)
        lines = [*trained.remarks, *describe_run(run, flags), f"Evaluating {label}.", *notes_on_data(run, state)]
        lines += [] if trained.comes_with_task else notes_on_flags(run, state)
        sums = validate(run) | ({"test": evaluate(run, "test")} if not flags.run.no_test else {})
        lines += [scores_text(run.metrics({split: own})) for split, own in sums.items()]
    if parallel.is_main:
        say("\n".join(lines))


def ensemble_metrics(
    flags: Flags, task: Task, directories: Sequence[Path], stop: StopRequest
) -> dict[str, float] | None:
    """Test metrics of the task's ensemble of these runs, each with the weights that it is used with.

    None where the task has no ensemble. Raises UserError for a run without weights, StopRequested if asked to stop
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
    with closing(assemble_run(flags, task, parallel)) as run:
        run.stop = stop
        ensemble = ensemble.to(parallel.device)
        run.learner = replace(
            run.learner,
            objective=ensemble,
            net=in_precision(ensemble, run.learner.precision),
            ema=ExponentialMovingAverage(ensemble.model, decay=0),
        )
        return run.metrics({"test": evaluate(run, "test")})


def _trained_objective(flags: Flags, task: Task, directory: Path) -> Objective:
    """On the CPU, since there may be many."""
    weights, dtype = load_best_weights(directory, say)["model"], getattr(torch, flags.precision.dtype)
    return trained_objective(task, weights, CPU, dtype, str(directory), "give the flags that it was trained with")
