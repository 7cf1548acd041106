"""The task and the model of a run, from what its checkpoint recorded."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.file import read_checkpoint
from trainer.checkpoint.weights import TrainedRun, find_weights, holds_run
from trainer.commands.flags import Flags, RunFlags
from trainer.commands.weights import restore_weights
from trainer.common.errors import BadInput
from trainer.common.streams import to_stderr
from trainer.config import flag_name, flag_values, group_from_values, refuse, shown
from trainer.loop.precision import PrecisionFlags, module_in_dtype
from trainer.parallel.base import SingleDevice
from trainer.task import Objective, Task
from trainer.tasks import TASKS, defined_task, is_same_task

CPU = torch.device("cpu")


def find_run(
    flags: Flags, files: Mapping[str, Path | None], shipped: Path | None, say: Callable[[str], None]
) -> TrainedRun:
    """What `find_weights` finds; where `--save-dir` holds no run, the weights that come with the task, if any.

    Raises BadInput.
    """
    folder = flags.checkpoint.save_dir
    if shipped is None or any(path is not None for path in files.values()) or holds_run(folder, say):
        return find_weights(folder, files, say)
    label = f"the weights that come with {flags.run.task}"
    return TrainedRun(label, read_checkpoint(shipped, label, only_weights=True), shipped.parent, comes_with_task=True)


def shipped_weights(flags: Flags) -> Path | None:
    """Those that come with the task of a command line; see `Task.shipped_weights`."""
    assert flags.task_type is not None
    return flags.task_type(flags.task, flags.run.seed, flags.run.cache_dir.expanduser()).shipped_weights()


def recorded_task(run: TrainedRun, task_type: type[Task], cache_dir: Path, anew: Mapping[str, Any] = {}) -> Task:
    """The task with the seed and the flags that the run was trained with, but for those that are given anew.

    Raises BadInput.
    """
    config = {**run.state["config"], **anew}
    try:
        task = task_type(group_from_values(task_type.Config, config), config["--seed"], cache_dir.expanduser())
    except ValueError as error:
        raise BadInput(f"{run.label}: {error}") from None
    task.data_facts = run.state.get("data_facts", {})
    return task


def rebuild_task(run: TrainedRun, flags: Flags) -> Task:
    """The task that the run was trained with, from what its checkpoint recorded.

    The command line need not repeat the flags of the run, but must not contradict them, except for those that the task
    takes anew (`Task.predict_flags`). It says where a task of a user's own is, which may have moved. Raises BadInput.
    """
    if not ("task" in run.state and "config" in run.state):
        reason = "holds weights, but not of which model; give the checkpoint of a run"
        raise BadInput(f"--resume-from {flags.checkpoint.resume_from}: {reason}")
    name, config = run.state["task"], run.state["config"]
    stated = {flag: value for flag, value in flag_values(flags.task).items() if flag in flags.given}
    task_type = None
    if flags.run.task != RunFlags.task:
        if is_same_task(flags.run.task, name):
            task_type = flags.task_type
        else:
            stated = {"--task": flags.run.task}
    task_type = task_type or recorded_class(run, name, "say by --task where it is")
    anew = {flag: stated.pop(flag) for flag in map(flag_name, task_type.predict_flags) if flag in stated}
    nothing = "no such flag"
    refuse(
        [
            f"{flag} {shown(value)}: {run.label} were trained with {shown(config.get(flag, nothing))}; leave it out"
            for flag, value in stated.items()
            if value != config.get(flag, nothing)
        ]
    )
    return recorded_task(run, task_type, flags.run.cache_dir, anew)


def recorded_class(run: TrainedRun, name: str, advice: str) -> type[Task]:
    """The class that a run names: one that comes with the trainer, or that this process has defined.

    A file that a run names is not executed: who made the run may have chosen it. Raises BadInput, with `advice` on how
    to give the class.
    """
    found = TASKS[name]() if name in TASKS else defined_task(name)
    if found is None:
        raise BadInput(
            f"--task {name}: {run.label} were trained with this task, and no file is executed because a run names it: "
            f"{advice}"
        )
    return found


def trained_objective(
    task: Task, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype, source: str, hint: str
) -> Objective:
    """A task's objective with these weights. source, hint: see `restore_weights`. Raises BadInput."""
    objective = module_in_dtype(task.build_objective(), dtype).to(device)
    restore_weights(objective.model, weights, SingleDevice(device), source, hint)
    return objective


def trained_model(folder: Path, task_type: type[Task] | None) -> nn.Module:
    """The model of a run directory with its best weights, in eval mode on the CPU.

    task_type: its class; None takes the one that the run names. Changes nothing in the folder. Raises BadInput.
    """
    run = find_weights(folder, {}, to_stderr)
    return model_of(run, task_type or recorded_class(run, run.state["task"], "give the class, as task="))


def model_of(run: TrainedRun, task_type: type[Task]) -> nn.Module:
    """The model of a run with its weights, in eval mode on the CPU. task_type: its class. Raises BadInput."""
    config = run.state["config"]
    task = recorded_task(run, task_type, group_from_values(RunFlags, config).cache_dir)
    dtype = getattr(torch, group_from_values(PrecisionFlags, config).dtype)
    hint = "the task's code has changed since, or another class was given"
    return trained_objective(task, run.state["model"], CPU, dtype, str(run.folder), hint).model.eval()
