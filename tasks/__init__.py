"""The workloads that come with the trainer, by the name that `--task` takes."""

import sys
from collections.abc import Callable
from pathlib import Path

from trainer.common.errors import UserError
from trainer.common.validation import find_class
from trainer.task import Task


def _har() -> type[Task]:
    from tasks.har import HarTask

    return HarTask


def _seqrec() -> type[Task]:
    from tasks.seqrec import SeqrecTask

    return SeqrecTask


def _kgat() -> type[Task]:
    from tasks.kgat import KgatTask

    return KgatTask


def _speech() -> type[Task]:
    from tasks.speech import SpeechTask

    return SpeechTask


def _tabular() -> type[Task]:
    from tasks.tabular import TabularTask

    return TabularTask


TASKS: dict[str, Callable[[], type[Task]]] = {
    "har": _har,
    "seqrec": _seqrec,
    "kgat": _kgat,
    "speech": _speech,
    "tabular": _tabular,
}
"""Each imports its task when called: a task of a user's own may have packages `data` and `models` beside it."""

IN_NO_FILE = "__main__"
"""What stands for the file of a class that has none."""


def find_task(name: str) -> type[Task]:
    """`--task` -> the task's class: a name of TASKS, or path/to/file.py:ClassName. Raises UserError."""
    if name in TASKS:
        return TASKS[name]()
    if ":" not in name:
        raise UserError(f"--task {name}: must be one of {', '.join(TASKS)}, or path/to/file.py:ClassName")
    return find_class(name, "--task", Task, comes_first=True)


def name_of(task_type: type[Task]) -> str:
    """The value of `--task` that finds a class, with the whole path of its file.

    Where no file holds it, as in a notebook, "__main__:ClassName", which only this process can find.
    """
    for name, find in TASKS.items():
        if task_type.__module__ == f"tasks.{name}" and find() is task_type:
            return name
    return f"{source_file(task_type) or IN_NO_FILE}:{task_type.__qualname__}"


def source_file(task_type: type[Task]) -> Path | None:
    """Where a class is defined; None for a notebook's cell, or a prompt."""
    file = getattr(sys.modules.get(task_type.__module__), "__file__", None)
    return Path(file).resolve() if file is not None and Path(file).is_file() else None


def defined_task(name: str) -> type[Task] | None:
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


def known_task(name: str) -> type[Task] | None:
    """The class that a run names, where it comes with the trainer or this process has defined it.

    A file that a run names is not executed: who made the run may have chosen it.
    """
    return TASKS[name]() if name in TASKS else defined_task(name)


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
