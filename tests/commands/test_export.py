"""`--export` writes a program that computes what the trained model computes, without this project."""

import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT, load
from tests.docs.test_docs import code_blocks, commands_in
from trainer import Exported
from trainer.commands.export import largest_difference

SPIRALS = ["--hidden-units", 7, "--num-points", 64, "--epochs", 1, "--num-threads", 1]
OWN_TASKS = """
import torch
from examples.own_task import SpiralObjective, Spirals
from trainer import Exported

class Wrong(Spirals):
    def exported(self, objective, batch):
        return Exported(objective.model, {"input": batch["point"]}, objective.model(batch["point"]) + 1e-3)

class Hidden(SpiralObjective):
    def forward(self, batch, phase="train"):
        x = batch["point"]
        for layer in self.model:
            x = layer(x)
        loss = torch.nn.functional.cross_entropy(x, batch["arm"], reduction="sum")
        return {"loss": loss, "correct": loss.detach()}

class Parts(Spirals):
    def build_objective(self):
        return Hidden(super().build_objective().model)

class Looped(Spirals):
    def build_objective(self):
        objective = super().build_objective()
        objective.model = Loop(objective.model)
        return objective

class Loop(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return torch.stack([self.layers(row) for row in x])
"""
WITHOUT_THE_PROJECT = """
import sys
assert {root!r} not in sys.path and "" not in sys.path
{page}
found = [(x, program(x)) for x in (torch.randn(size, 2) for size in (1, 2, 50))]
torch.save(found, "found.pt")
assert not {{name.partition(".")[0] for name in sys.modules}} & {{"trainer", "models", "data", "examples"}}
"""


@pytest.fixture
def own_run(on_cpu, tmp_path):
    """Trains a task; returns the folder of its run."""

    def run(task):
        (tmp_path / "own_tasks.py").write_text(OWN_TASKS)
        on_cpu("--task", task.format(tmp_path), *SPIRALS, "--save-dir", tmp_path / "run")
        return tmp_path / "run"

    yield run
    sys.modules.pop("own_tasks", None)


def test_the_exported_program_of_the_page_equals_the_model(on_cpu, tmp_path, monkeypatch):
    """Runs the commands of docs/exporting.md, and its code in a process without this project."""
    monkeypatch.chdir(ROOT)
    commands, load_it, about, shown, _ = code_blocks((ROOT / "docs" / "exporting.md").read_text())
    for _, arguments in commands_in(commands):
        moved = [str(tmp_path / a) if a.startswith("checkpoints/") or a.endswith(".pt2") else a for a in arguments]
        small = SPIRALS if "--task" in moved else SPIRALS[-2:]
        out, err = on_cpu(*moved, *small)
        assert err == []
    assert "Inputs: input (?, 2)" in out and "4 batches of 1 to 4 samples" in out
    code = WITHOUT_THE_PROJECT.format(root=str(ROOT), page=load_it + about)
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (shown, 0), done.stderr

    weights = load(tmp_path / "checkpoints" / "spirals" / "best.pth")["model"]
    for x, found in torch.load(tmp_path / "found.pt"):
        for name in ("0", "2", "4"):
            x = torch.nn.functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
            x = x if name == "4" else torch.nn.functional.gelu(x)
        torch.testing.assert_close(found, x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Wrong", "not written, because outputs of the exported program and the model differ by"),
        ("Parts", "Hidden.forward does not call its `model` as a whole; define Parts.exported"),
        ("Looped", "torch cannot export Loop: "),
    ],
)
def test_a_failed_export_writes_nothing(own_run, on_cpu, tmp_path, name, reason):
    run = own_run(f"{{}}/own_tasks.py:{name}")
    _, err = on_cpu("--save-dir", run, "--export", tmp_path / "own.pt2", "--num-threads", 1, status=2)
    assert len(err) == 1 and reason in err[0]
    assert not list(tmp_path.glob("own.pt2*"))


def test_invalid_values_and_combinations_of_export_are_refused(refused, tmp_path):
    refused(["must end in .pt2 (torch.onnx.export converts a .pt2 file to .onnx)"], "--export", tmp_path / "model.onnx")
    refused([f"there is no folder {tmp_path / 'none'}"], "--export", tmp_path / "none" / "model.pt2")
    (tmp_path / "model.pt2").mkdir()
    refused(["is not a file"], "--export", tmp_path / "model.pt2")
    refused(
        ["--export and --eval-only", "--predict and --eval-only", "--predict and --export: cannot be combined"],
        "--export", tmp_path / "a.pt2", "--eval-only", "--predict", "x.csv",
    )  # fmt: skip
    refused(
        ["--export: runs on one device; use main.py"],
        "--export", tmp_path / "a.pt2", "--multi-gpu", "ddp", several_devices=True,
    )  # fmt: skip
    refused([f"--save-dir {tmp_path / 'run'}"], "--export", tmp_path / "a.pt2", "--save-dir", tmp_path / "run")


def test_nan_in_one_output_counts_as_a_difference():
    ones = torch.ones(2)
    call = Exported(torch.nn.Identity(), {}, (ones, {"b": ones}))
    assert largest_difference(call, [ones, ones]) == 0
    assert largest_difference(call, [ones, ones * torch.nan]) == largest_difference(call, [ones]) == torch.inf
    holed = call._replace(expected=[torch.tensor([-torch.inf, 2.0])])
    assert largest_difference(holed, [torch.tensor([-torch.inf, 1.0])]) == 0.5
