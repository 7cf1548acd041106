"""The workloads that a program offers: a task is found by the value of `--task`, and that value by its class."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer.common.errors import UserError
from trainer.common.validation import find_class
from trainer.task import Task

Registry = Mapping[str, "str | type[Task]"]
"""By the name that `--task` takes: "module:Class", imported when it is chosen, or a class; first the default."""

PACKAGE = __name__.rpartition("trainer.")[0] + "tasks"
"""Lies beside the trainer; its TASKS are the workloads where no program has handed in others."""
SCRIPT = "ScriptOfFit"
"""The class that `trainer.fit` makes of a model, data and a loss; only the script that calls it has them."""
IN_NO_FILE = "__main__"
"""What stands for the file of a class that has none."""

_handed_in: Registry | None = None


def hand_in(tasks: Registry) -> None:
    """Makes these the workloads of this process; a program does so first.

    The packages that hold them are forgotten until one is chosen: a user's own task may have such a package beside it.
    """
    global _handed_in
    _handed_in = tasks
    for entry in tasks.values():
        if isinstance(entry, str):
            module = entry.partition(":")[0]
            sys.modules.pop(module.rpartition(".")[0] or module, None)


def workloads() -> Registry:
    """Those that the program has handed in; a user's script or notebook hands in none, and has those of PACKAGE.

    That package is imported on the first need, and only from beside the trainer: a user's own may have its name.
    """
    if _handed_in is not None:
        return _handed_in
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None or Path(spec.origin).parents[1] != Path(__file__).parents[1]:
        return {}
    registry: Registry = importlib.import_module(PACKAGE).TASKS
    return registry


def default_task() -> str:
    """The first of the workloads; "" where there are none."""
    return next(iter(workloads()), "")


def find_task(name: str) -> type[Task]:
    """`--task` -> the task's class: the name of a workload, or path/to/file.py:ClassName. Raises UserError."""
    _refuse_script(name)
    if ":" in name:
        return find_class(name, "--task", Task, comes_first=True)
    entry = workloads().get(name)
    if entry is None:
        choices = f"one of {', '.join(workloads())}, or " if workloads() else ""
        raise UserError(f"--task {name}".rstrip() + f": must be {choices}path/to/file.py:ClassName")
    if isinstance(entry, type):
        return entry
    module, _, class_name = entry.partition(":")
    found: type[Task] = getattr(importlib.import_module(module), class_name)
    return found


def name_of(task_type: type[Task]) -> str:
    """The value of `--task` that finds a class, with the whole path of its file.

    Where no file holds it, as in a notebook, "__main__:ClassName", which only this process can find.
    """
    place = f"{task_type.__module__}:{task_type.__qualname__}"
    for name, entry in workloads().items():
        if entry in (task_type, place):
            return name
    return f"{source_file(task_type) or IN_NO_FILE}:{task_type.__qualname__}"


def source_file(task_type: type[Task]) -> Path | None:
    """Where a class is defined; None for a notebook's cell, or a prompt."""
    file = getattr(sys.modules.get(task_type.__module__), "__file__", None)
    return Path(file).resolve() if file is not None and Path(file).is_file() else None


def known_task(name: str) -> type[Task] | None:
    """The class that a run names, where it is a workload or this process has defined it.

    A file that a run names is not executed: who made the run may have chosen it. Raises UserError for a script's.
    """
    _refuse_script(name)
    return find_task(name) if name in workloads() else _defined_task(name)


def _refuse_script(name: str) -> None:
    file, _, class_name = name.rpartition(":")
    if class_name == SCRIPT:
        raise UserError(
            f"--task {name}: trained by trainer.fit(model, ...) in {Path(file).name}, which alone has the model; there "
            "`run.load()` returns it, and `run.predict(dataset)` what it predicts"
        )


def _defined_task(name: str) -> type[Task] | None:
    """A class that this process has defined already, by a value of `--task`; the last one of that name.

    Importing its file once more would run it again: it may be the script that asks.
    """
    file, _, class_name = name.rpartition(":")
    whole = name if file == IN_NO_FILE else f"{Path(file).resolve()}:{class_name}"
    found, to_visit = None, list(Task.__subclasses__())
    while to_visit:
        task_type = to_visit.pop(0)
        to_visit += task_type.__subclasses__()
        if name_of(task_type) == whole:
            found = task_type
    return found


def is_same_task(one: str, other: str) -> bool:
    """Whether two values of `--task` name the same task: its class and its file's name count, not the folder.

    A class of a notebook may have moved into a file since, or out of one.
    """
    file, _, class_name = without_folder(one).rpartition(":")
    other_file, _, other_class = without_folder(other).rpartition(":")
    return class_name == other_class and (file == other_file or IN_NO_FILE in (file, other_file))


def without_folder(name: str) -> str:
    """A value of `--task` as it is on every machine: without the folder of a file."""
    file, colon, class_name = name.rpartition(":")
    return f"{Path(file).name}{colon}{class_name}"
