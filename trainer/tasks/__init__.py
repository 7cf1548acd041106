"""The workloads that come with the trainer, by the name that `--task` takes, and loading of a user's own."""

import importlib.util
import sys
from pathlib import Path

from data.errors import BadInput
from trainer.task import Task
from trainer.tasks.har import HarTask

TASKS: dict[str, type[Task]] = {"har": HarTask}


def find_task(name: str) -> type[Task]:
    """`--task` -> the task's class: a name of TASKS, or path/to/file.py:ClassName. Raises BadInput."""
    if name in TASKS:
        return TASKS[name]
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


def _import_file(path: Path, flag_value: str) -> object:
    """Imports a file under a name of its own, known to pickle and to data-loading workers."""
    module_name = f"lockstep_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"--task {flag_value}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module
