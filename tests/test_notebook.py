"""Trains a task defined in a cell, in a real Jupyter kernel. Skipped where none is installed."""

import pytest

from tests.conftest import ROOT

pytest.importorskip("ipykernel")
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

DEFINE = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import trainer
from tests.helpers.weighted_task import Network, Weighted, WeightedObjective

class Interrupted(WeightedObjective):
    num_forwards = 0

    def forward(self, batch, phase="train"):
        Interrupted.num_forwards += self.training
        if Interrupted.num_forwards == 5:
            os.killpg(os.getpgrp(), signal.SIGINT)  # as the server of a notebook does
        return super().forward(batch, phase)

class Cell(Weighted):
    def build_objective(self):
        return Interrupted(Network(self.config.width, self.config.dropout), 0)

settings = dict(save_dir="run", epochs=2, num_train=24, batch_size=8, lr=0.01, num_threads=1)
"""
FIT = "metrics, run = trainer.fit(Cell, **settings)\nprint(run.state, sorted(metrics))"
LOAD = "model = run.load()\nprint(type(model).__name__, model.training, type(trainer.load('run')).__name__)"
SEVERAL = "trainer.fit(Cell, **settings | {'multi_gpu': 'ddp', 'nproc': 2, 'device': 'cpu'})"


@pytest.fixture
def notebook(tmp_path, monkeypatch, no_rank_variables):
    """Runs cells in a kernel of their own; returns the outputs of each."""

    def run(*cells):
        document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        resources = {"metadata": {"path": str(tmp_path)}}
        nbclient.NotebookClient(document, timeout=60, resources=resources, allow_errors=True).execute()
        return [cell.outputs for cell in document.cells]

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return run


def text_of(outputs, stream):
    return "".join(output["text"] for output in outputs if output.get("name") == stream)


def test_a_notebook_trains_and_loads(notebook):
    """SIGINT in the second epoch saves the run, and executing the same cell again resumes it."""
    _, first, second, load, several = notebook(DEFINE, FIT, FIT, LOAD, SEVERAL)
    assert text_of(first, "stdout").endswith("preempted []\n")
    assert "Resuming after optimizer step" in text_of(second, "stdout")
    names = ["test/accuracy", "test/loss", "test/num_samples"]
    assert text_of(second, "stdout").endswith(f"finished {names}\n")
    # tqdm shows a widget where ipywidgets is installed, and text otherwise.
    bars = [str(output.get("data", "")) for output in first] + [text_of(first, "stderr")]
    assert any("epoch 1/2:" in bar for bar in bars)
    assert text_of(load, "stdout") == "Network False Network\n"
    (error,) = several
    assert error["ename"] == "UserError" and "cannot import Cell from a notebook" in error["evalue"]
