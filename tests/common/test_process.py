"""A command that messages print starts main.py wherever it is pasted."""

import shlex
from pathlib import Path

import pytest

from setup import installed_form
from tests.conftest import ROOT
from trainer.common import process
from trainer.common.process import command_of_main


@pytest.mark.parametrize("has_another", [False, True])
def test_a_printed_command_works_in_another_folder(has_another, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if has_another:
        Path("main.py").touch()
    assert shlex.split(command_of_main()) == ["python", str(ROOT / "main.py")]
    monkeypatch.chdir(ROOT)
    assert command_of_main() == "python main.py"


def test_a_printed_command_of_the_installed_package_is_lockstep(tmp_path, monkeypatch):
    path = tmp_path / "lockstep" / "trainer" / "common" / "process.py"
    installed = {"__file__": str(path)}
    exec(installed_form(Path(process.__file__).read_text()), installed)
    monkeypatch.chdir(tmp_path)
    assert installed["command_of_main"]() == "lockstep"
