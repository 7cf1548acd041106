"""Tests the installed package: it works beside any project, and its runs equal a clone's.

LOCKSTEP_INSTALLED, which .ci/run sets, names a folder with an installed wheel; without it the package is built.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import trainer
from tests.conftest import ROOT, results_of
from tests.helpers.own_project import POINTS, SIDES
from tests.helpers.processes import free_port

pytest.importorskip("setuptools")
import setup

PROJECT = {
    "data/mine.py": "NUM_SIDES = 2\n",
    "models/net.py": "from torch import nn\n\n\nclass Net(nn.Linear):\n    pass\n",
    "trainer.py": "def fit():\n    return 'mine'\n",
    "sides.py": """
from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F

import trainer
from data.mine import NUM_SIDES
from lockstep import FlagGroup, Objective, Task
from models.net import Net

assert trainer.fit() == "mine"

"""
    + POINTS
    + SIDES,
}
"""A user's project with folders and a file named like the clone's packages, which its task imports."""
TABLE = """
from lockstep import TabularClassifier

if __name__ == "__main__":
    rows = [[1, 2], [3, 4], [5, 6], [2, 2], [1, 1], [9, 9]]
    print(TabularClassifier().fit(rows, [0, 1, 1, 0, 0, 1]).predict([[1, 1], [9, 8]]).tolist())
"""


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    if installed := os.environ.get("LOCKSTEP_INSTALLED"):
        return Path(installed)
    built = tmp_path_factory.mktemp("built")
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", built / "base", "--build-lib", built / "lib"]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=120)
    return built / "lib"


@pytest.fixture
def run(site, environment, tmp_path):
    """Runs Python in a user's project; returns what it printed."""
    for name, text in PROJECT.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(*args, status=0):
        variables = environment | {"PYTHONPATH": str(site), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *map(str, args)],
            cwd=tmp_path / "project",
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_the_package_imports_nothing_outside_itself(site):
    assert {path.name for path in site.iterdir()} - {"bin"} <= {"lockstep", "lockstep-0.2.0.dist-info"}
    paths = [*(site / "lockstep").rglob("*.py")]
    modules = {".".join(path.relative_to(site / "lockstep").with_suffix("").parts) for path in paths} - {"__main__"}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {name.partition(".")[0] for name in names} & {*setup.PACKAGES, "main", "profiler"}, path
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value.partition(":")[0] not in modules, f"{path}: {node.value}: no import finds it here"
        assert not re.search(r"\b(main|profiler|main_multi_gpu)\.py\b", path.read_text()), path
        assert not re.search(rf"(?<!lockstep\.)\btrainer\.({'|'.join(trainer.__all__)})\b", path.read_text()), path
    assert (site / "lockstep" / "configs" / "har" / "4gpu.toml").is_file()


def test_the_package_needs_what_a_clone_needs_without_tests():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {*needed, "pytest"} == {*(ROOT / "requirements.txt").read_text().split()}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from trainer.task import Task", "from lockstep.trainer.task import Task"),
        ("def f():\n    é = 1; from data import files", "def f():\n    é = 1; from lockstep.data import files"),
        ("from database import trainer", "from database import trainer"),
        ("import torch  # python main.py --help", "import torch  # lockstep --help"),
        ('"torchrun --nproc_per_node=2 main_multi_gpu.py"', '"torchrun --nproc_per_node=2 -m lockstep"'),
        ('"see trainer.fit"', '"see lockstep.fit"'),
    ],
)
def test_a_module_is_rewritten(source, found):
    assert setup.installed_form(source) == found


def test_an_import_that_cannot_be_rewritten_is_refused():
    with pytest.raises(ValueError, match=r"^line 1: import trainer[.]task: write from"):
        setup.installed_form("import trainer.task")


def test_a_project_with_folders_of_the_same_names_is_trained(run, tmp_path):
    """The run starts on one process, and resumes on two under torchrun."""
    flags = ("--task", "sides.py:Sides", "--device", "cpu", "--save-dir", "run")
    run("-m", "lockstep", *flags, "--epochs", 1, "--num-workers", 1)
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}", "-m", "lockstep")
    assert "Resuming after optimizer step 2" in run(*torchrun, "--multi-gpu", "ddp", *flags, "--epochs", 2)
    assert results_of(tmp_path / "project" / "run")["weights"]["epoch"] == 2
    assert run("-c", "from data.mine import NUM_SIDES; import trainer, lockstep; print(trainer.fit())") == "mine\n"


@pytest.mark.slow
def test_processes_are_started_and_measured(run):
    flags = ("--task", "sides.py:Sides", "--device", "cpu", "--save-dir", "run", "--multi-gpu", "ddp", "--nproc", 2)
    run("-m", "lockstep", *flags, "--epochs", 1, "--num-workers", 1)
    assert "samples/s" in run("-m", "lockstep", "profile", "step", *flags, "--steps", 2, "--warmup-steps", 1)
    assert run("-m", "lockstep", "profile", "--help").startswith("usage: lockstep profile COMMAND")


@pytest.mark.slow
def test_the_package_contains_weights_and_presets(run, tmp_path):
    (tmp_path / "project" / "table.py").write_text(TABLE)
    assert run("table.py") == "[0, 1]\n"
    printed = run("-m", "lockstep", "--config", "configs/har/4gpu.toml", "--print-config")
    assert 'multi-gpu = "ddp"' in printed
    assert run("-m", "lockstep", "--help").startswith("usage: lockstep [flags]\n\nTrains on several devices")


@pytest.mark.slow
def test_clone_and_package_resume_each_others_runs(run, command, tmp_path):
    flags = ("--mode", "first", "--hidden-dims", 4, "--save-dir", tmp_path / "run", "--max-steps")
    run("-m", "lockstep", *flags, 2)
    for again, steps in (
        (lambda *args: command("main.py", *args).stdout, 3),
        (lambda *a: run("-m", "lockstep", *a), 4),
    ):
        told = again(*flags, steps)
        assert f"Resuming after optimizer step {steps - 1}" in told
        changed = [line for line in told.splitlines() if line.startswith("Changed since")]
        assert changed == [f"Changed since the checkpoint: --max-steps {steps - 1} -> {steps}"]
    repeated = run("-m", "lockstep", "--config", tmp_path / "run" / "config.json", "--save-dir", tmp_path / "b")
    assert "Finished" in repeated and json.loads((tmp_path / "b" / "config.json").read_text())


CHOSEN = (
    "tests/loop/test_max_steps.py",
    "tests/checkpoint/test_earlier_versions.py",
    "tests/commands/test_predict.py::test_the_written_table_equals_the_models_predictions",
)
"""Tests that the installed package must pass too."""
IN_OTHER_FORM = "saved_by_the_clock or pauses_at_its_time_limit or does_not_use_up or a_kill_does_not"
"""Parts of the names of tests to skip: their helpers name a module of the trainer in a string."""


@pytest.mark.slow
def test_tests_of_the_clone_pass(site, environment, tmp_path):
    """Imports in these tests are rewritten like the package's."""
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path in (tmp_path / "tests").rglob("*.py"):
        try:
            path.write_text(setup.installed_form(path.read_text()))
        except ValueError:
            path.unlink()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CHOSEN, "-k", f"not ({IN_OTHER_FORM})"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 20
