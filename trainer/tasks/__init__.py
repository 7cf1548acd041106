"""The workloads that come with the trainer, by the name that `--task` takes, and loading of a user's own."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from trainer.loading.errors import BadInput
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
    file, colon, class_name = name.rpartition(":")
    if not colon:
        raise BadInput(f"--task {name}: must be one of {', '.join(TASKS)}, or path/to/file.py:ClassName")
    path = Path(file)
    if not path.is_file():
        raise BadInput(f"--task {name}: there is no file {path}")
    found = getattr(_import_file(path, name), class_name, None)
    if found is None:
        raise BadInput(f"--task {name}: {path} defines no {class_name}")
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise BadInput(f"--task {name}: {class_name} is not a subclass of trainer.task.Task")
    return found


def is_same_task(one: str, other: str) -> bool:
    """Whether two values of `--task` name the same task: its class and its file's name count, not the folder."""
    return _identity(one) == _identity(other)


def _identity(name: str) -> tuple[str, str]:
    file, _, class_name = name.rpartition(":")
    return Path(file).name, class_name


def _import_file(path: Path, flag_value: str) -> object:
    """Imports a file as a module of its own name, so that data-loading processes find it again by that name.

    Its folder comes first on the import path: what stands beside it goes before packages of the trainer.
    """
    folder = str(path.parent.resolve())
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(path.stem)
    except (ImportError, SyntaxError) as error:
        raise BadInput(f"--task {flag_value}: cannot import {path}: {type(error).__name__}: {error}") from None
    if Path(getattr(module, "__file__", None) or "").resolve() != path.resolve():
        raise BadInput(f"--task {flag_value}: there is another module named {path.stem}; rename the file")
    return module
