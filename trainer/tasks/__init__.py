"""The workloads that come with the trainer, by the name that `--task` takes."""

from collections.abc import Callable
from pathlib import Path

from trainer.loading.errors import BadInput
from trainer.loading.own_class import find_class
from trainer.task import Task


def _har() -> type[Task]:
    from trainer.tasks.har import HarTask

    return HarTask


def _seqrec() -> type[Task]:
    from trainer.tasks.seqrec import SeqrecTask

    return SeqrecTask


TASKS: dict[str, Callable[[], type[Task]]] = {"har": _har, "seqrec": _seqrec}
"""Each imports its task when called: a task of a user's own may have packages `data` and `models` beside it."""


def find_task(name: str) -> type[Task]:
    """`--task` -> the task's class: a name of TASKS, or path/to/file.py:ClassName. Raises BadInput."""
    if name in TASKS:
        return TASKS[name]()
    if ":" not in name:
        raise BadInput(f"--task {name}: must be one of {', '.join(TASKS)}, or path/to/file.py:ClassName")
    return find_class(name, "--task", Task, comes_first=True)


def is_same_task(one: str, other: str) -> bool:
    """Whether two values of `--task` name the same task: its class and its file's name count, not the folder."""
    return _identity(one) == _identity(other)


def _identity(name: str) -> tuple[str, str]:
    file, _, class_name = name.rpartition(":")
    return Path(file).name, class_name
