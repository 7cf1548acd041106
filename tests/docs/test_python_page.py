"""Runs the code of docs/python.md from top to bottom."""

import re

import pytest
import torch

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "python.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SMALL = "num_points=100, num_threads=1"


@pytest.fixture
def here(tmp_path, monkeypatch, no_rank_variables):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))


def run(block, names):
    assert "epochs=" not in block or "epochs=40" in block or "epochs=0" in block
    exec(block.replace("epochs=40", f"epochs=2, {SMALL}"), names)


def test_the_page_runs(here, cli, capsys):
    names = {"torch": torch, "__name__": "page"}
    first, loop, mistakes, saved, load, guarded = BLOCKS
    run(first, names)
    assert names["run"].state == "finished" and not names["model"].training
    # The command beside the code finds the run finished.
    command = re.search(r"```\npython main\.py (.*)\n```", PAGE)[1].replace("--epochs 40", "--epochs 2").split()
    command[command.index("--task") + 1] = str(ROOT / "examples" / "own_task.py:Spirals")
    status, out, _ = cli(*command, "--num-points", 100, "--num-threads", 1)
    assert status == 0 and "This run is finished" in out
    run(loop, names)
    assert len(names["scores"]) == 3
    capsys.readouterr()
    run(mistakes, names)
    out, err = capsys.readouterr()
    assert (len(out.splitlines()), err) == (3, "") and "did you mean hidden_units?" in out
    run(saved, names)
    assert len(names["losses"]) == 2
    run(load, names)
    assert names["logits"].shape == (1, 3)
    run(guarded, names)  # this code does nothing when it is imported


@pytest.mark.slow
def test_the_script_that_starts_processes_runs(here, command, tmp_path, monkeypatch):
    script = f"import lockstep\nfrom examples.own_task import Spirals\n\n{BLOCKS[-1]}"
    (tmp_path / "train.py").write_text(
        script.replace("epochs=40", f"epochs=1, {SMALL}").replace('"checkpoints', f'"{tmp_path}')
    )
    command(tmp_path / "train.py", PYTHONPATH=str(ROOT))
    assert (tmp_path / "ddp" / "results.json").exists()
