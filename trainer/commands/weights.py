"""Loads weights into models, and rebuilds the task and model of a trained run."""

import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.file import read_checkpoint, read_settings
from trainer.checkpoint.format import LARGE
from trainer.checkpoint.weights import (
    TrainedRun,
    WeightComparison,
    compare,
    find_settings,
    find_weights,
    holds_run,
    runs_within,
)
from trainer.commands.config_files import ConfigFile
from trainer.commands.flags import Flags, recorded_values
from trainer.commands.resume import changed_flags
from trainer.common.errors import UserError
from trainer.common.process import to_stderr
from trainer.config import flag_name, group_from_values, refuse, shown
from trainer.flags import CheckpointFlags, PrecisionFlags, RunFlags
from trainer.loop.learner import Learner
from trainer.loop.precision import module_in_dtype
from trainer.parallel.strategy import SingleDevice, Strategy
from trainer.registry import is_same_task, known_task
from trainer.task import Objective, Task

CPU = torch.device("cpu")


def restore_weights(
    model: nn.Module, weights: Mapping[str, Tensor], strategy: Strategy, source: str, hint: str
) -> None:
    """Loads all weights of a model. All processes must call this function.

    source: noun for the weights in messages. hint: advice in the UserError if weights do not fit.
    """
    comparison = compare(model, weights)
    differences = comparison.differences
    if differences:
        shown = "; ".join(differences[:3])
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise UserError(f"{source} does not fit the model: {shown}{more}; {hint}")
    strategy.load_weights(comparison.fitting, model)


def restore_what_fits(
    model: nn.Module, weights: Mapping[str, Tensor], strategy: Strategy, source: str
) -> WeightComparison:
    """Loads the weights that fit the model, and returns the comparison. Raises UserError if none fit."""
    comparison = compare(model, weights)
    if not comparison.fitting:
        if comparison.unlike:
            what = "; ".join([*comparison.unlike.values()][:2])
            raise UserError(f"{source}: no weight fits the model: {what}; give the flags and data of the training run")
        raise UserError(
            f"{source}: no weight fits the model: the file has {_first(weights)}, and the model has "
            f"{_first(model.state_dict())}; rename the weights in the file"
        )
    strategy.load_weights(comparison.fitting, model)
    return comparison


def use_weights(learner: Learner, weights: Mapping[str, Tensor], source: str, hint: str) -> None:
    """Loads a checkpoint's weights for evaluation: the moving average of the weights, if training computed one."""
    restore_weights(learner.objective.model, weights, learner.strategy, source, hint)
    learner.ema.restart()


def resume_weights(learner: Learner, state: Mapping[str, Any], hint: str) -> None:
    """Loads a checkpoint's weights, and their moving average, to resume training."""
    model, strategy, source = learner.objective.model, learner.strategy, "the checkpoint"
    restore_weights(model, state["model"], strategy, source, hint)
    learner.ema.restore(state)
    if "training_model" in state:
        restore_weights(model, state["training_model"], strategy, source, hint)


def initialise(learner: Learner, given: CheckpointFlags, shipped: Path | None) -> list[str]:
    """Loads the initial weights of a new run, if flags or the task name a file; returns notes for the user.

    shipped: result of `Task.shipped_weights`. Raises UserError if weights do not fit.
    """
    model, strategy, notes = learner.objective.model, learner.strategy, list[str]()
    if given.init_from is not None:
        label = f"--init-from {given.init_from}"
        hint = "use weights of a model with the same flags, or load only the fitting weights with --init-from-partial"
        restore_weights(model, _read(strategy, given.init_from, label), strategy, label, hint)
        notes = [f"Starting with the weights of {given.init_from}."]
    elif given.init_from_partial is not None:
        label = f"--init-from-partial {given.init_from_partial}"
        comparison = restore_what_fits(model, _read(strategy, given.init_from_partial, label), strategy, label)
        notes = _described(comparison, given.init_from_partial)
    elif shipped is not None:
        notes = _start_with_shipped(model, shipped, strategy)
    learner.ema.restart()
    return notes


def _start_with_shipped(model: nn.Module, shipped: Path, strategy: Strategy) -> list[str]:
    label = "the weights that come with this task"
    comparison = compare(model, _read(strategy, shipped, label))
    if comparison.unlike or comparison.unknown:
        first = [*comparison.unlike.values(), *(f"{name} is only in the file" for name in comparison.unknown)][0]
        raise UserError(
            f"{label} do not fit the model: {first}; leave out the flags that change the model, or name other "
            "weights with --init-from"
        )
    strategy.load_weights(comparison.fitting, model)
    others = f"; newly initialised: {_first(comparison.missing)}" if comparison.missing else "."
    return [f"Starting with {label}: {len(comparison.fitting)} of the model's {len(model.state_dict())}{others}"]


def _read(strategy: Strategy, path: Path, label: str) -> dict[str, Tensor]:
    state = strategy.load_on_main(lambda: {"model": read_checkpoint(path, label, only_weights=True)["model"]}, LARGE)
    weights: dict[str, Tensor] = state["model"]
    return weights


def _described(comparison: WeightComparison, source: Path) -> list[str]:
    taken = comparison.fitting
    num_weights = len(taken) + len(comparison.missing) + len(comparison.unlike)
    lines = [f"Starting with {len(taken)} of the model's {num_weights} weights from {source}: {', '.join(taken)}."]
    if comparison.unlike:
        lines.append(f"Left out: {', '.join(comparison.unlike.values())}.")
    if comparison.unknown:
        lines.append(f"Left out, because the model does not have them: {', '.join(comparison.unknown)}.")
    if comparison.missing:
        lines.append(f"Newly initialised, because the file does not have them: {', '.join(comparison.missing)}.")
    return lines


def _first(names: Collection[str]) -> str:
    return ", ".join([*names][:3]) + (", ..." if len(names) > 3 else "")


# --- the task and model of a run, from its checkpoint's record ----------------------------------------------


def find_run(
    flags: Flags, files: Mapping[str, Path | None], shipped: Path | None, say: Callable[[str], None]
) -> TrainedRun:
    """Returns the weights of the file or run that the flags name.

    If none is named, returns the task's pretrained weights; if there are none, the weights of the default folder's run.
    say: prints messages about damage. Raises UserError.
    """
    folder, has_run = flags.checkpoint.save_dir, True
    uses_shipped = shipped is not None and all(path is None for path in files.values())
    if uses_shipped:
        has_run = holds_run(folder, say)
        uses_shipped = not has_run or "--save-dir" not in flags.given
    if shipped is None or not uses_shipped:
        run, other = find_weights(folder, files, say), ""
    else:
        label = f"the weights that come with {flags.run.task}"
        state = read_checkpoint(shipped, label, only_weights=True)
        run = TrainedRun(label, state, shipped.parent, comes_with_task=True)
        other = f"; to use the run in {folder} add --save-dir {shlex.quote(str(folder))}" if has_run else ""
    assert flags.task_type is not None
    return replace(run, remarks=(f"Using {run.label}{other}.",)) if ships_weights(flags.task_type) else run


def find_record(asked: Mapping[str, Any]) -> ConfigFile | None:
    """Returns the flags in the checkpoint of the run to resume or use; None without such a checkpoint.

    asked: given values of the trainer's flags, by field; without "save_dir" no run directory is read.
    """
    file, folder = asked.get("resume_from"), asked.get("save_dir")
    is_used = any(asked.get(field) for field in ("eval_only", "predict", "export"))
    if asked.get("fresh") or (is_used and asked.get("init_from")):
        return None
    if file is not None:
        place, flag, settings = file, "--resume-from", read_settings(file)
    elif folder is not None:
        several = asked.get("seeds", 1) > 1 or asked.get("folds", 0) > 0
        place, flag = next(iter(runs_within(folder)), folder) if several else folder, "--save-dir"
        settings = find_settings(place, of_best=is_used)
    else:
        return None
    return settings and ConfigFile(place, {**settings[1], "--task": settings[0]}, is_record=True, flag=flag)


def ships_weights(task_type: type[Task]) -> bool:
    """Returns whether a task class overrides `shipped_weights`."""
    return task_type.shipped_weights is not Task.shipped_weights


def recorded_task(run: TrainedRun, task_type: type[Task], cache_dir: Path, overrides: Mapping[str, Any] = {}) -> Task:
    """Creates a task with a run's seed and flags. overrides: values by flag that replace the run's values.

    Raises UserError for invalid values.
    """
    config = {**run.state["config"], **overrides}
    try:
        task = task_type(group_from_values(task_type.Config, config), config["--seed"], cache_dir)
    except ValueError as error:
        raise UserError(f"{run.label}: {error}") from None
    task.data_facts = run.state.get("data_facts", {})
    return task


def find_trained(flags: Flags, say: Callable[[str], None]) -> tuple[TrainedRun, Task]:
    """Returns the weights for `--predict` or `--export`, and their task."""
    assert flags.task_type is not None
    shipped = flags.task_type(flags.task, flags.run.seed, flags.run.cache_dir).shipped_weights()
    run = find_run(flags, {"--resume-from": flags.checkpoint.resume_from}, shipped, say)
    return run, rebuild_task(run, flags)


def rebuild_task(run: TrainedRun, flags: Flags) -> Task:
    """Creates a run's task from the seed and flags in the run's checkpoint.

    Raises UserError if the command line changes flags of the run other than `Task.predict_flags`.
    """
    if not ("task" in run.state and "config" in run.state):
        reason = "contains weights but does not name their task; give a run's checkpoint"
        raise UserError(f"--resume-from {flags.checkpoint.resume_from}: {reason}")
    name, config, nothing = run.state["task"], run.state["config"], "no such flag"
    assert flags.task_type is not None
    if not is_same_task(flags.run.task, name):
        advice = "leave it out" if "--task" in flags.given else f"add --task {name}"
        raise UserError(f"--task {flags.run.task}: {run.label} were trained with {name}; {advice}")
    stated = {flag: value for flag, value in recorded_values(flags.task).items() if flag in flags.given}
    overrides = {flag: stated.pop(flag) for flag in map(flag_name, flags.task_type.predict_flags) if flag in stated}
    refuse(
        [
            f"{flag} {shown(value)}: {run.label} were trained with {shown(config.get(flag, nothing))}; leave it out"
            for flag, value in stated.items()
            if flag not in config or flag in changed_flags(config, {flag: value})
        ]
    )
    return recorded_task(run, flags.task_type, flags.run.cache_dir, overrides)


def trained_objective(
    task: Task,
    weights: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    source: str = "the checkpoint",
    hint: str = "the task's code, or the data that it reads, has changed since training",
) -> Objective:
    """Builds a task's objective and loads weights. Raises UserError with `source` and `hint` if weights do not fit."""
    objective = module_in_dtype(task.build_objective(), dtype).to(device)
    restore_weights(objective.model, weights, SingleDevice(device), source, hint)
    return objective


def trained_model(folder: Path, task_type: type[Task] | None) -> nn.Module:
    """Loads the model of a run directory with the best weights, in eval mode on the CPU.

    task_type: the task's class; None: the class recorded in the run. Changes no file of the run. Raises UserError if
    the run has no intact weights or they do not fit.
    """
    run = find_weights(folder, {}, to_stderr)
    task_type = task_type or known_task(run.state["task"])
    if task_type is None:
        raise UserError(
            f"--task {run.state['task']}: {run.label} were trained with this task, but loading a run "
            "does not execute the file of its task; pass the task class as task="
        )
    return model_of(run, task_type)


def model_of(run: TrainedRun, task_type: type[Task]) -> nn.Module:
    """Builds a run's model with its weights, in eval mode on the CPU. Raises UserError."""
    config = run.state["config"]
    task = recorded_task(run, task_type, group_from_values(RunFlags, config).cache_dir)
    dtype = getattr(torch, group_from_values(PrecisionFlags, config).dtype)
    hint = "the task's code has changed since training, or another class was given"
    return trained_objective(task, run.state["model"], CPU, dtype, str(run.folder), hint).model.eval()
