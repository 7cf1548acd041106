"""Finds a task class by the value of `--task`, and the value of `--task` for a class."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer.common.errors import UserError
from trainer.common.validation import find_class
from trainer.task import Task

Registry = Mapping[str, "str | type[Task]"]
"""Maps names for `--task` to classes, or to "module:Class" strings to import on use; the first is the default."""

PACKAGE = __name__.rpartition("trainer.")[0] + "tasks"
"""Package next to the trainer whose attribute TASKS is the default registry."""
SCRIPT = "ScriptOfFit"
"""Name of the class that `trainer.fit` creates from a model, data and a loss; only the calling script can create it."""
IN_NO_FILE = "__main__"
"""Stands for the file name if a class is not defined in a file."""

_handed_in: Registry | None = None


def hand_in(tasks: Registry) -> None:
    """Sets the workloads of this process.

    Also unloads the workloads' packages, since a task file may import its own package of the same name.
    """
    global _handed_in
    _handed_in = tasks
    for entry in tasks.values():
        if isinstance(entry, str):
            module = entry.partition(":")[0]
            sys.modules.pop(module.rpartition(".")[0] or module, None)


def workloads() -> Registry:
    """Returns the workloads that `hand_in` has set, or PACKAGE's workloads in a script, which does not call `hand_in`.

    Imports PACKAGE only from the folder that contains the trainer, since a user's package may have the same name.
    """
    if _handed_in is not None:
        return _handed_in
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None or Path(spec.origin).parents[1] != Path(__file__).parents[1]:
        return {}
    registry: Registry = importlib.import_module(PACKAGE).TASKS
    return registry


def default_task() -> str:
    """Returns the name of the first workload, or "" if there is none."""
    return next(iter(workloads()), "")


def find_task(name: str) -> type[Task]:
    """Returns the class of a `--task` value: a workload's name or FILE:CLASS. Raises UserError for other values."""
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
    """Returns the value of `--task` for a class: a workload's name, or the class's file (absolute path) and name.

    A class defined in a notebook is named "__main__:ClassName"; only this process can find it.
    """
    place = f"{task_type.__module__}:{task_type.__qualname__}"
    for name, entry in workloads().items():
        if entry in (task_type, place):
            return name
    return f"{source_file(task_type) or IN_NO_FILE}:{task_type.__qualname__}"


def source_file(task_type: type[Task]) -> Path | None:
    """Returns the file that defines a class; None for a class defined in a notebook or at a prompt."""
    file = getattr(sys.modules.get(task_type.__module__), "__file__", None)
    return Path(file).resolve() if file is not None and Path(file).is_file() else None


def known_task(name: str) -> type[Task] | None:
    """Returns the task class recorded in a run, if it is a workload or defined in this process; otherwise None.

    Executes no file, since the run may come from somebody else. Raises UserError for a class that `trainer.fit` made.
    """
    _refuse_script(name)
    return find_task(name) if name in workloads() else _defined_task(name)


def _refuse_script(name: str) -> None:
    file, _, class_name = name.rpartition(":")
    if class_name == SCRIPT:
        raise UserError(
            f"--task {name}: only {Path(file).name}, which calls trainer.fit(model, ...), can build this model; call "
            "`run.load()` or `run.predict(dataset)` in that script"
        )


def _defined_task(name: str) -> type[Task] | None:
    """Returns the class that this process last defined with this value of `--task`; None if there is none.

    Does not import the class's file, which may be the calling script and would run again.
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
    """Returns whether two values of `--task` name the same task; the folders of their files may differ.

    A class from a notebook matches a class of the same name in any file, since a user may have moved it there.
    """
    file, _, class_name = without_folder(one).rpartition(":")
    other_file, _, other_class = without_folder(other).rpartition(":")
    return class_name == other_class and (file == other_file or IN_NO_FILE in (file, other_file))


def without_folder(name: str) -> str:
    """Returns a value of `--task` without the folder of its file."""
    file, colon, class_name = name.rpartition(":")
    return f"{Path(file).name}{colon}{class_name}"


def told(name: str) -> str:
    """Names a task in messages: "--task VALUE", or "fit, with the loss in FILE" for a class that `fit` made."""
    file, _, class_name = name.rpartition(":")
    return f"fit, with the loss in {file}" if class_name == SCRIPT else f"--task {name}"
