"""Tests how tasks are found by name, in programs that register their own and in scripts that register none."""

import subprocess
import sys

import pytest

from tasks import TASKS
from tasks.har import HarTask
from tests.conftest import ROOT
from tests.helpers.weighted_task import Weighted
from trainer import registry
from trainer.common.errors import UserError

PROGRAM = """
import sys

from trainer.cli import run_process

if __name__ == "__main__":
    tasks = {"line": "workloads_of_a_program:Line", "har": "tasks.har:HarTask"}
    sys.exit(run_process(sys.argv[1:], several_devices="--nproc" in sys.argv, tasks=tasks))
"""
WORKLOADS = """
from tests.helpers.weighted_task import Weighted


class Line(Weighted):
    pass
"""
LOADING = """
import sys

import trainer

try:
    print(type(trainer.load(sys.argv[1])).__name__)
except trainer.UserError as error:
    print(error)
"""


@pytest.fixture
def outside(environment, tmp_path):
    """Runs a script in a user's folder; returns its output."""

    def run(text, *args):
        (tmp_path / "script.py").write_text(text)
        done = subprocess.run(
            [sys.executable, "script.py", *map(str, args)],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("more", [(), pytest.param(("--multi-gpu", "ddp", "--nproc", 2), marks=pytest.mark.slow)])
def test_a_program_has_the_workloads_that_it_registers(more, outside, tmp_path):
    """The first registered task is the default and names the folder of its runs, also in started processes."""
    (tmp_path / "workloads_of_a_program.py").write_text(WORKLOADS)
    outside(PROGRAM, *more, "--epochs", 1, "--device", "cpu")
    assert (tmp_path / "checkpoints" / "line" / "results.json").exists()
    assert "Built-in tasks: line, har." in outside(PROGRAM, "--help")


def test_a_script_has_the_built_in_workloads_unless_its_own_package_shadows_them(outside, run_here, tmp_path):
    run_here("--max-steps", 1, "--mode", "first", "--hidden-dims", 4, "--save-dir", tmp_path / "run")
    assert outside(LOADING, tmp_path / "run") == "Standardised\n"
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "__init__.py").write_text("raise SystemExit('is never imported')")
    told = outside(LOADING, tmp_path / "run")
    assert told.startswith("--task har: ") and "pass the task class as task=" in told


@pytest.mark.parametrize("form", ["from .points import NUM", "from mine.points import NUM", "from points import NUM"])
def test_a_task_in_a_package_imports_its_neighbours(form, run_here, tmp_path):
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "points.py").write_text("NUM = 3")
    task = (ROOT / "examples" / "own_task.py").read_text().replace("NUM_ARMS = 3", f"{form}\nNUM_ARMS = NUM")
    (package / "arms.py").write_text(task)
    name = f"{package / 'arms.py'}:Spirals"
    run_here("--task", name, "--max-steps", 1, "--num-points", 20, "--save-dir", tmp_path / "run")
    run_here("--task", name, "--save-dir", tmp_path / "run", "--eval-only")


@pytest.mark.parametrize(
    ("package", "content", "told"),
    [
        ("tasks", "", "another package has the name tasks; rename this package to import from it"),
        ("broken", "import no_such_module", "No module named 'no_such_module'"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named(package, content, told, run_here, tmp_path):
    folder = tmp_path / package
    folder.mkdir()
    (folder / "__init__.py").write_text(content)
    (folder / "arms.py").write_text("from .points import NUM")
    assert told in run_here("--task", f"{folder / 'arms.py'}:Arms", status=2).err


def test_names_and_classes_match_the_registry(monkeypatch):
    assert registry.workloads() is TASKS and registry.default_task() == "har"
    assert registry.find_task("har") is HarTask and registry.name_of(HarTask) == "har"
    monkeypatch.setattr(registry, "_handed_in", {"other": Weighted, "another": "tasks.har:HarTask"})
    assert registry.default_task() == "other" and registry.find_task("other") is Weighted
    assert registry.name_of(Weighted) == "other" and registry.name_of(HarTask) == "another"
    assert registry.known_task("har") is None
    with pytest.raises(UserError, match="must be one of other, another, or path"):
        registry.find_task("har")


def test_without_workloads_task_must_be_a_file(monkeypatch, refused):
    monkeypatch.setattr(registry, "_handed_in", {})
    refused(["--task: must be path/to/file.py:ClassName"])
