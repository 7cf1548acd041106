"""Tests tasks that are named like a module of the trainer, or lie beside packages named like the trainer's."""

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT, WEIGHTED
from tests.helpers.own_project import POINTS, SIDES

FILES = {
    "models/__init__.py": "",
    "models/network.py": """
from torch import nn


class Net(nn.Linear):
    pass
""",
    "data/__init__.py": "",
    "data/points.py": """
import numpy as np

"""
    + POINTS,
    "tasks/__init__.py": "",
    "tasks/numbers.py": "NUM_SIDES = 2\n",
    "sides.py": """
from dataclasses import dataclass

import torch.nn.functional as F

from data.points import Points
from models.network import Net
from tasks.numbers import NUM_SIDES
from trainer.config import FlagGroup
from trainer.task import Objective, Task
"""
    + SIDES,
}


@pytest.fixture
def own_task(tmp_path) -> str:
    """Returns the value of `--task`."""
    for name, text in FILES.items():
        path = tmp_path / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return f"{tmp_path / 'own' / 'sides.py'}:Sides"


@pytest.mark.parametrize("makes_package", [True, False])
def test_a_task_in_a_package_named_like_the_trainers_imports_from_it(makes_package, own_task, command, tmp_path):
    folder = tmp_path / "own" / "tasks"
    (folder / "sides.py").write_text("from .numbers import NUM_SIDES\n" + FILES["sides.py"])
    if not makes_package:
        (folder / "__init__.py").unlink()
    flags = ("--task", f"{folder / 'sides.py'}:Sides", "--epochs", 1, "--device", "cpu", "--save-dir", tmp_path / "run")
    done = command(ROOT / "main.py", *flags, status=0 if makes_package else 2)
    hint = f"parent package; create an empty {folder / '__init__.py'}, so that {folder} is a package\n"
    assert done.stderr.endswith("" if makes_package else hint), done.stderr


SEVERAL = "two processes with a worker each"
SLOW_NAMES = ("tasks", "models", "json", "numpy", "my.task")
LAUNCHERS = {
    "alone": [ROOT / "main.py"],
    SEVERAL: [
        ROOT / "main_multi_gpu.py", "--multi-gpu", "ddp", "--nproc", 2, "--num-workers", 1
    ],
}  # fmt: skip


@pytest.mark.parametrize("launcher", ["alone", pytest.param(SEVERAL, marks=pytest.mark.slow)])
def test_packages_beside_a_task_precede_the_trainers(launcher, own_task, command, tmp_path):
    flags = ("--task", own_task, "--epochs", 1, "--device", "cpu", "--save-dir", tmp_path / "run")
    # The folder is on the path already, but behind the trainer's own folder.
    command(*LAUNCHERS[launcher], *flags, launched=True, PYTHONPATH=str(Path(own_task).parent))
    assert "test/loss" in json.loads((tmp_path / "run" / "results.json").read_text())["metrics"]


@pytest.mark.parametrize("name", ["trainer", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW_NAMES)])
def test_a_file_may_have_any_name(name, own_task, command, tmp_path):
    """The file runs alone and resumes in two processes with one worker each, which unpickle what it defines."""
    file = Path(own_task.partition(":")[0]).rename(tmp_path / "own" / f"{name}.py")
    for package in {"models", "tasks"} & {name}:  # a package precedes a file of its name
        (tmp_path / "own" / package).rename(tmp_path / "own" / f"own_{package}")
        file.write_text(file.read_text().replace(f"from {package}.", f"from own_{package}."))
    flags = ("--task", f"{file}:Sides", "--device", "cpu", "--no-test", "--save-dir", tmp_path / "run")
    for launcher, num_epochs in zip(LAUNCHERS.values(), (1, 2), strict=True):
        command(*launcher, *flags, "--epochs", num_epochs, launched=True)
    assert json.loads((tmp_path / "run" / "results.json").read_text())["weights"]["epoch"] == 2


@pytest.mark.parametrize(("imported", "status"), [("*", 0), ("TabularClassifier", 2)])
def test_a_module_beside_a_task_hides_only_what_the_task_names(imported, status, command, tmp_path):
    """`import *` imports no package that the file hides; if a named class needs one, the message names the file."""
    (tmp_path / "data.py").touch()
    example = (ROOT / "examples" / "own_task.py").read_text()
    (tmp_path / "spirals.py").write_text(f"from lockstep import {imported}\n{example}")
    argv = ("--task", f"{tmp_path / 'spirals.py'}:Spirals", "--print-config")
    done = command(ROOT / "main.py", *argv, status=status)
    hint = f"; rename {tmp_path / 'data.py'}, which hides the package data\n"
    assert done.stderr.endswith(hint if status else ""), done.stderr


@pytest.mark.parametrize("text", ["", "import lockstep\n\nlockstep.fit()\n"])
def test_a_file_that_hides_the_trainer_is_to_be_renamed(text, command, tmp_path):
    (tmp_path / "trainer.py").write_text(text)
    (tmp_path / "script.py").write_text("import lockstep\n")
    done = command(tmp_path / "script.py", status=1, PYTHONPATH=str(ROOT))
    assert "if a file of yours is named trainer.py, rename it" in done.stderr.splitlines()[-1]


PARSE = """
import sys

import trainer.cli
from trainer.commands.parse import parse

assert parse(["--task", sys.argv[1]], several_devices=False)[1] == []
print(*(name for name in sys.modules if name.partition(".")[0] in ("data", "models")))
"""


FROM_PYTHON = """
import sys

import trainer
from sides import Sides

metrics, run = trainer.fit(Sides, epochs=1, device="cpu", save_dir=sys.argv[1])
assert "test/loss" in metrics
trainer.load(sys.argv[1])
assert sys.modules["tasks"].__file__ == sys.argv[2], "their own package"
"""


def test_a_script_may_have_its_own_modules_beside_it(own_task, command, tmp_path):
    script = Path(own_task).parent / "script.py"
    script.write_text(FROM_PYTHON)
    command(script, tmp_path / "run", script.parent / "tasks" / "__init__.py", PYTHONPATH=str(ROOT))


@pytest.mark.parametrize(("task", "expected"), [(WEIGHTED, set()), ("har", {"data", "models"})])
def test_workloads_are_imported_when_they_are_chosen(task, expected, command):
    imported = command("-c", PARSE, task).stdout.split()
    assert {name.partition(".")[0] for name in imported} == expected
