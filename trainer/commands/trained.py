"""The task and the model of a run, from what its checkpoint recorded."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.file import read_checkpoint, read_settings
from trainer.checkpoint.weights import TrainedRun, find_settings, find_weights, holds_run, runs_within
from trainer.commands.config_files import ConfigFile
from trainer.commands.flags import Flags, recorded_values
from trainer.commands.resume import changed_flags
from trainer.commands.weights import restore_weights
from trainer.common.errors import UserError
from trainer.common.process import to_stderr
from trainer.config import flag_name, group_from_values, refuse, shown
from trainer.flags import PrecisionFlags, RunFlags
from trainer.loop.precision import module_in_dtype
from trainer.parallel.base import SingleDevice
from trainer.registry import is_same_task, known_task
from trainer.task import Objective, Task

CPU = torch.device("cpu")


def find_run(
    flags: Flags, files: Mapping[str, Path | None], shipped: Path | None, say: Callable[[str], None]
) -> TrainedRun:
    """The weights of `find_weights`, or the shipped ones of a task unless `--save-dir` is given and holds a run.

    So what happens to lie in a default folder does not decide. say: gets a line for whatever is damaged. Raises
    UserError.
    """
    folder, other = flags.checkpoint.save_dir, ""
    if shipped is None or any(path is not None for path in files.values()):
        run = find_weights(folder, files, say)
    elif not (has_run := holds_run(folder, say)) or "--save-dir" not in flags.given:
        label = f"the weights that come with {flags.run.task}"
        state = read_checkpoint(shipped, label, only_weights=True)
        run = TrainedRun(label, state, shipped.parent, comes_with_task=True)
        other = f"; to use the run in {folder} add --save-dir {shlex.quote(str(folder))}" if has_run else ""
    else:
        run = find_weights(folder, files, say)
    assert flags.task_type is not None
    return replace(run, remarks=(f"Using {run.label}{other}.",)) if ships_weights(flags.task_type) else run


def find_record(asked: Mapping[str, Any]) -> ConfigFile | None:
    """Flags in the checkpoint of the run that a command line resumes or uses; None without one.

    asked: flags of the trainer, by field, that are stated; without "save_dir" no folder is looked into.
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
    """Whether a task may come with weights, which its flags decide."""
    return task_type.shipped_weights is not Task.shipped_weights


def shipped_weights(flags: Flags) -> Path | None:
    """Those that come with the task of a command line; see `Task.shipped_weights`."""
    assert flags.task_type is not None
    return flags.task_type(flags.task, flags.run.seed, flags.run.cache_dir).shipped_weights()


def recorded_task(run: TrainedRun, task_type: type[Task], cache_dir: Path, anew: Mapping[str, Any] = {}) -> Task:
    """The task with the seed and the flags that the run was trained with, but for those that are given anew.

    Raises UserError.
    """
    config = {**run.state["config"], **anew}
    try:
        task = task_type(group_from_values(task_type.Config, config), config["--seed"], cache_dir)
    except ValueError as error:
        raise UserError(f"{run.label}: {error}") from None
    task.data_facts = run.state.get("data_facts", {})
    return task


def rebuild_task(run: TrainedRun, flags: Flags) -> Task:
    """The task that the run was trained with, from what its checkpoint recorded.

    The command line need not repeat the flags of the run, but must not contradict them, except for those that the task
    takes anew (`Task.predict_flags`). Raises UserError.
    """
    if not ("task" in run.state and "config" in run.state):
        reason = "holds weights, but not of which model; give the checkpoint of a run"
        raise UserError(f"--resume-from {flags.checkpoint.resume_from}: {reason}")
    name, config, nothing = run.state["task"], run.state["config"], "no such flag"
    assert flags.task_type is not None
    if not is_same_task(flags.run.task, name):
        advice = "leave it out" if "--task" in flags.given else f"add --task {name}"
        raise UserError(f"--task {flags.run.task}: {run.label} were trained with {name}; {advice}")
    stated = {flag: value for flag, value in recorded_values(flags.task).items() if flag in flags.given}
    anew = {flag: stated.pop(flag) for flag in map(flag_name, flags.task_type.predict_flags) if flag in stated}
    refuse(
        [
            f"{flag} {shown(value)}: {run.label} were trained with {shown(config.get(flag, nothing))}; leave it out"
            for flag, value in stated.items()
            if flag not in config or flag in changed_flags(config, {flag: value})
        ]
    )
    return recorded_task(run, flags.task_type, flags.run.cache_dir, anew)


def trained_objective(
    task: Task, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype, source: str, hint: str
) -> Objective:
    """A task's objective with these weights. source, hint: see `restore_weights`. Raises UserError."""
    objective = module_in_dtype(task.build_objective(), dtype).to(device)
    restore_weights(objective.model, weights, SingleDevice(device), source, hint)
    return objective


def trained_model(folder: Path, task_type: type[Task] | None) -> nn.Module:
    """The model of a run directory with its best weights, in eval mode on the CPU.

    task_type: its class; None takes the one that the run names. Changes nothing in the folder. Raises UserError.
    """
    run = find_weights(folder, {}, to_stderr)
    task_type = task_type or known_task(run.state["task"])
    if task_type is None:
        raise UserError(
            f"--task {run.state['task']}: {run.label} were trained with this task, and no file is executed because a "
            "run names it: give the class, as task="
        )
    return model_of(run, task_type)


def model_of(run: TrainedRun, task_type: type[Task]) -> nn.Module:
    """The model of a run with its weights, in eval mode on the CPU. task_type: its class. Raises UserError."""
    config = run.state["config"]
    task = recorded_task(run, task_type, group_from_values(RunFlags, config).cache_dir)
    dtype = getattr(torch, group_from_values(PrecisionFlags, config).dtype)
    hint = "the task's code has changed since, or another class was given"
    return trained_objective(task, run.state["model"], CPU, dtype, str(run.folder), hint).model.eval()
