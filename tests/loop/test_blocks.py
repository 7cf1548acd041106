"""`--grad-checkpointing` and `--compile` change neither weights nor checkpoints, with and without a resume."""

import shutil
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

from tests.conftest import ROOT, assert_same_bits, cut_back, largest_difference, launcher, load
from trainer.checkpoint.manifest import MANIFEST, read_json
from trainer.loop import blocks

FILE = ROOT / "tests" / "helpers" / "ragged_task.py"
RAGGED, AHEAD_OF_TIME = f"{FILE}:Ragged", f"{FILE}:AheadOfTime"
SHORT = ["--epochs", 2, "--batch-size", 4, "--lr", 0.01, "--num-threads", 1, "--device", "cpu", "--log-interval", 1000]
SPEECH = ["--task", "speech", "--width", "16", "--num-blocks", "2", "--batch-size", "4"]


@pytest.fixture
def train_ragged(cli, monkeypatch):
    """Trains in a folder; returns its last checkpoint."""
    monkeypatch.setattr(blocks, "BACKEND", "aot_eager")

    def run(folder, *more):
        status, _, err = cli("--task", RAGGED, *SHORT, "--save-dir", folder, *more)
        assert (status, err) == (0, [])
        return load(folder / "final.pth")

    return run


def without_a_compiler(graph, inputs):
    raise RuntimeError("No working C++ compiler found")


class Counted(nn.Linear):
    """Counts the forward passes of all its instances."""

    calls: ClassVar = [0]

    def forward(self, x):
        self.calls[0] += 1
        return super().forward(x)


def test_activations_are_computed_twice_with_gradients_and_once_without():
    model = nn.Sequential(Counted(3, 3), nn.GELU(), nn.Linear(3, 1))
    names = list(model.state_dict())
    blocks.recompute(model[:2])
    assert list(model.state_dict()) == names and type(model[0]).__name__ == "Counted"
    model(torch.randn(5, 3)).sum().backward()
    assert Counted.calls == [2]
    with torch.no_grad():
        model(torch.randn(5, 3))
    assert Counted.calls == [3]


def test_recomputing_keeps_gradients_of_gradients():
    """Some GANs penalise the gradient with respect to the input."""
    found = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
        model = nn.Sequential(block, nn.Linear(3, 1))
        if recomputed:
            blocks.recompute([block])
        x = torch.randn(5, 3, requires_grad=True)
        out = model(x).sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        (out + (gradient.norm(dim=1) - 1).square().sum()).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append(gradients | dict(model.named_buffers()))
    assert_same_bits(*found)


def test_recomputing_is_bit_identical(train_ragged, tmp_path):
    """The run has dropout, batch norm, accumulation and validation after each epoch."""
    more = ["--grad-accum-steps", 2]
    plain = train_ragged(tmp_path / "plain", *more)
    assert_same_bits(plain, train_ragged(tmp_path / "recomputed", *more, "--grad-checkpointing"))


@pytest.mark.parametrize("flag", ["--grad-checkpointing", "--compile"])
def test_a_resumed_run_is_identical(flag, train_ragged, tmp_path):
    often = [flag, "--save-every-steps", 3, "--keep-checkpoints", 0]
    unbroken = train_ragged(tmp_path / "unbroken", *often)
    entries = read_json(tmp_path / "unbroken" / MANIFEST)["checkpoints"]
    assert len(entries) > 3
    cut_back(tmp_path / "unbroken", entries[:3], tmp_path / "resumed")
    assert_same_bits(unbroken, train_ragged(tmp_path / "resumed", *often))


@pytest.mark.parametrize(
    "more",
    [
        [],
        pytest.param(["--no-has-blocks"], marks=pytest.mark.slow),
        pytest.param(["--grad-checkpointing"], marks=pytest.mark.slow),
    ],
)
def test_compiled_training_matches_eager_for_many_lengths(more, train_ragged, tmp_path):
    from torch._dynamo.utils import counters

    same = ["--dtype", "float64", "--dropout", 0, "--batch-size", 1, "--eval-batch-size", 1, "--no-norm"]
    plain = train_ragged(tmp_path / "plain", *same)
    counters.clear()
    compiled = train_ragged(tmp_path / "compiled", *same, *more, "--compile")
    assert largest_difference(compiled, plain) < 1e-9
    assert 0 < counters["stats"]["unique_graphs"] < 12  # there are 16 lengths, in training and in evaluation


def test_unsupported_uses_of_blocks_are_refused(refused, monkeypatch, tmp_path):
    run = ["--task", RAGGED, *SHORT, "--save-dir", tmp_path / "run"]
    refused(["--grad-checkpointing: `Task.blocks` names no"], *run, "--no-has-blocks", "--grad-checkpointing")
    refused(["use --multi-gpu ddp"], *run, "--compile", "--multi-gpu", "dp", several_devices=True)
    monkeypatch.setattr(blocks, "BACKEND", without_a_compiler)
    refused(["--compile: torch cannot compile the model: backend='without_a_compiler' raised:"], *run, "--compile")


def test_double_backward_through_compiled_code_is_refused(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(blocks, "BACKEND", "aot_eager")
    task = f"{ROOT / 'tests' / 'helpers' / 'dropping_task.py'}:Dropping"
    run = ["--task", task, "--projects", "--device", "cpu", "--num-threads", 1, "--save-dir", tmp_path / "run"]
    expected = "--compile: the objective computes a gradient within its forward"
    refused([expected], *run, "--penalty", "--no-names-blocks", "--compile")


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--compile", "--grad-checkpointing"])
def test_two_processes_match_one_process_without_the_flag(flag, command, tmp_path):
    found = []
    for world_size, more in ((1, []), (2, [flag])):
        where = ["--save-dir", tmp_path / str(world_size), "--dtype", "float64"]
        where += ["--global-batch-size", 4, "--batch-size", 1]  # padding changes the result of this model
        plain = ["--dropout", 0, "--no-norm"]
        command(*launcher(world_size), "--task", AHEAD_OF_TIME, *SHORT, *where, *plain, *more)
        found.append(load(tmp_path / str(world_size) / "final.pth"))
    assert largest_difference(*found) < 1e-9


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for CPUs by g++")
def test_the_real_compiler_resumes_bit_identically_and_matches_eager(train_ragged, monkeypatch, tmp_path):
    """Compiled code draws other dropout masks than eager code, so their comparison has no dropout."""
    monkeypatch.setattr(blocks, "BACKEND", "inductor")
    monkeypatch.setattr(inductor_config, "compile_threads", 1)  # otherwise a pool of threads would remain
    often = ["--compile", "--save-every-steps", 3, "--keep-checkpoints", 0]
    unbroken = train_ragged(tmp_path / "unbroken", *often)
    entries = read_json(tmp_path / "unbroken" / MANIFEST)["checkpoints"]
    cut_back(tmp_path / "unbroken", entries[:3], tmp_path / "resumed")
    torch.compiler.reset()
    assert_same_bits(unbroken, train_ragged(tmp_path / "resumed", *often))
    same = ["--dtype", "float64", "--dropout", 0]
    plain, compiled = (train_ragged(tmp_path / str(len(more)), *same, *more) for more in ([], ["--compile"]))
    assert largest_difference(compiled, plain) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(["--model", "tinyhar"], id="tinyhar"),
        pytest.param(["--task", "seqrec", "--hidden-units", "8", "--mhc"], id="seqrec"),
        pytest.param(["--task", "kgat", "--model", "kgat", "--embed-dim", "8"], id="kgat"),
        pytest.param(SPEECH, id="plmu"),
        pytest.param(["--task", "tabular", "--width", "8", "--num-val-tables", "4"], id="nano"),
    ],
)
def test_recomputing_shipped_models_is_bit_identical(argv, run_here, tmp_path):
    found = []
    for more in ([], ["--grad-checkpointing"]):
        folder = tmp_path / f"run{len(more)}"
        run_here(*argv, *more, "--max-steps", 2, "--no-test", "--num-threads", 1, "--save-dir", folder)
        found.append(load(folder / "final.pth"))
    assert_same_bits(*found)
