"""Buffers and attributes that forward passes change match a bare loop, on two processes and after a resume."""

import json

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import ROOT, assert_same_bits, cut_back, load
from tests.helpers import forks
from tests.helpers.shaped_task import Points
from tests.helpers.stateful_task import KINDS, build
from trainer.loading.order import EpochOrder

FILE = ROOT / "tests" / "helpers" / "stateful_task.py"
LR, NUM, WHOLE, EPOCHS = 0.05, 21, 8, 2
RUN = ["--dtype", "float64", "--num-threads", 1, "--device", "cpu", "--epochs", EPOCHS, "--weight-decay", 0,
       "--optimizer", "sgd", "--no-test", "--global-batch-size", WHOLE]  # fmt: skip
SOUND = sorted(KINDS.keys() - {"PersistentTable", "LatePersistentTable", "EvaluatedTable", "LateScaled"})


def of(kind):
    return ["--task", f"{FILE}:{kind}Task", *RUN]


@pytest.fixture
def train_two(environment, tmp_path):
    """Trains on two processes; returns what they printed."""

    def run(form, folder, *argv, statuses=(0, 0)):
        output = tmp_path / f"{folder.name}.out"
        found = forks.run_group(["--multi-gpu", form, *argv, "--save-dir", folder], 2, environment, output)
        assert found == list(statuses), output.read_text()
        return output.read_text()

    return run


class BareLoop:
    """Plain loop with one copy of the model per process, which sums gradients and copies the buffers of the first copy.

    Each copy keeps its own attributes, and its own non-persistent buffers that a forward pass replaces.
    """

    def __init__(self, kind, world_size, size):
        self.kind, self.world_size, self.size = kind, world_size, size
        self.models = []
        for _ in range(world_size):
            torch.manual_seed(0)
            self.models.append(build(kind).double().train())
        points = torch.from_numpy(Points(NUM, 1).x)
        self.x, self.y = points.double(), (points.sum(1) > 0).long()

    def weights(self):
        for epoch in range(EPOCHS):
            for chosen in torch.from_numpy(EpochOrder(0, epoch, 0, NUM).take(0, NUM)).split(WHOLE):
                self.step(chosen)
        return self.models[0].state_dict()

    def step(self, chosen):
        for rank, model in enumerate(self.models):
            model.zero_grad()
            parts = chosen[rank :: self.world_size].split(self.size)
            for own in parts:
                (F.cross_entropy(model(self.x[own]), self.y[own], reduction="sum") / len(chosen)).backward()
            if self.kind == "Counting":  # a placeholder counts as a forward pass
                model[0][1].calls += len(chosen[:: self.world_size].split(self.size)) - len(parts)
        for parameters in zip(*(model.parameters() for model in self.models), strict=True):
            gradient = sum(parameter.grad for parameter in parameters)
            for parameter in parameters:
                parameter.data -= LR * gradient
        for model in self.models[1:]:
            self.agree(model)

    def agree(self, model):
        for mine, its in zip(model.modules(), self.models[0].modules(), strict=True):
            for name, value in its.named_buffers(recurse=False):
                if name not in its._non_persistent_buffers_set or name == "scale":
                    getattr(mine, name).data.copy_(value)


def assert_learnt_as(loop, folder):
    found, expected = load(folder / "final.pth")["model"], loop.weights()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # test_buffers.py tests running statistics of several processes.
        if loop.world_size == 1 or not name.endswith(("running_mean", "running_var")):
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
@pytest.mark.parametrize("kind", SOUND)
def test_one_process_matches_a_bare_loop(kind, run_here, tmp_path):
    run_here(*of(kind), "--batch-size", 3, "--save-dir", tmp_path)
    assert_learnt_as(BareLoop(kind, 1, 3), tmp_path)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
@pytest.mark.parametrize(
    ("form", "kind"),
    [
        pytest.param(form, kind, marks=[pytest.mark.slow] * ((form, kind) not in (("ddp", "Scaled"), ("ddp", "Table"))))
        for form in ("ddp", "fsdp")
        for kind in SOUND
    ],
)
def test_two_processes_match_a_bare_loop(form, kind, train_two, tmp_path):
    """The ranks have 3 and 2 samples in the last step of an epoch, so with micro-batches of 2 one has a placeholder."""
    size = 4 if "BatchNorm" in kind else 2  # batch norm refuses a single sample
    train_two(form, tmp_path / "run", *of(kind), "--batch-size", size)
    assert_learnt_as(BareLoop(kind, 2, size), tmp_path / "run")


def test_attributes_of_the_objective_count_only_forward_passes_of_steps(run_here, tmp_path):
    out = run_here("--task", f"{FILE}:Counted", *RUN, "--batch-size", 3, "--save-dir", tmp_path).out
    assert "Forward passes change plain attributes: calls. Checkpoints lack these attributes" in out
    assert float(load(tmp_path / "final.pth")["model"]["calls_of_objective"]) == 2 * 8  # 3 + 3 + 2 micro-batches


# --- recomputed forward passes -----------------------------------------------------------------------------------


CHANGING = [
    kind for kind in SOUND if kind not in ("WeightNorm", "OldWeightNorm", "BatchNorm", "MeanBatchNorm", "Masked")
]


IN_BRIEF = ("SpectralNorm", "Scaled", "Quantised", "Counting")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in IN_BRIEF)) for kind in CHANGING]
)
def test_recomputing_is_bit_identical(kind, run_here, tmp_path):
    for more in ([], ["--grad-checkpointing"]):
        run_here(*of(kind), "--batch-size", 3, *more, "--save-dir", tmp_path / str(len(more)))
    assert_same_bits(*(load(tmp_path / name / "final.pth") for name in "01"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHANGING)
def test_recomputing_is_bit_identical_on_two_processes(kind, train_two, tmp_path):
    for more in ([], ["--grad-checkpointing"]):
        train_two("ddp", tmp_path / str(len(more)), *of(kind), "--batch-size", 2, *more)
    assert_same_bits(*(load(tmp_path / name / "final.pth") for name in "01"))


def test_recomputing_is_refused_if_a_buffer_first_changes_later(refused, tmp_path):
    part = "--grad-checkpointing: forward passes change model.0.1.scale, which the first forward pass did not change"
    refused([part], *of("LateScaled"), "--grad-checkpointing", "--save-dir", tmp_path)


# --- after a resume ----------------------------------------------------------------------------------------------


EVERY = ["--save-every-steps", 1, "--keep-checkpoints", 0, "--batch-size", 2]


def cut(folder, num_entries):
    entries = json.loads((folder / "whole" / "manifest.json").read_text())["checkpoints"]
    cut_back(folder / "whole", entries[:num_entries], folder / "resumed")


def test_nonpersistent_buffers_resume_bit_identically(run_here, tmp_path):
    run_here(*of("ScaledLocally"), *EVERY, "--save-dir", tmp_path / "whole")
    cut(tmp_path, 2)
    run_here(*of("ScaledLocally"), *EVERY, "--save-dir", tmp_path / "resumed")
    whole, resumed = (load(tmp_path / name / "final.pth") for name in ("whole", "resumed"))
    assert whole["other_buffers"].keys() == {"model.0.1.scale"}
    assert "0.1.scale" not in whole["model"]
    assert_same_bits(whole, resumed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(SOUND) - {"Counting", "Rotary", "Standardised"}))
def test_two_processes_resume_bit_identically(kind, train_two, tmp_path):
    argv = [*of(kind), *EVERY, "--batch-size", 4 if "BatchNorm" in kind else 2]
    train_two("ddp", tmp_path / "whole", *argv)
    cut(tmp_path, 2)
    train_two("ddp", tmp_path / "resumed", *argv)
    assert_same_bits(*(load(tmp_path / name / "final.pth") for name in ("whole", "resumed")))


def test_a_checkpoint_without_other_buffers_still_resumes(run_here, tmp_path):
    run_here(*of("ScaledLocally"), *EVERY, "--epochs", 1, "--save-dir", tmp_path / "run")
    state = load(tmp_path / "run" / "final.pth")
    del state["other_buffers"]
    torch.save(state, tmp_path / "older.pth")
    run_here(*of("ScaledLocally"), *EVERY, "--resume-from", tmp_path / "older.pth", "--save-dir", tmp_path / "resumed")


# --- refusals and messages ---------------------------------------------------------------------------------------


def test_a_persistent_buffer_that_grows_is_refused_before_training(refused, tmp_path):
    part = (
        "ShapedObjective.forward changes the shape of the persistent buffer model.0.1.table from (1, 5) to (2, 5), so "
        "a new model cannot load a checkpoint of this run; register it with persistent=False"
    )
    refused([part], *of("PersistentTable"), "--save-dir", tmp_path / "run")


def test_a_buffer_that_grows_later_is_refused_at_that_step(refused, tmp_path):
    part = "ShapedObjective.forward changes the shape of the persistent buffer model.0.1.table from (1, 5) to (2, 5)"
    refused([part], *of("LatePersistentTable"), "--save-every-steps", 1, "--save-dir", tmp_path)
    assert load(tmp_path / "last.pth")["step"] == 3


@pytest.mark.parametrize("form", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_buffer_that_grows_differently_on_two_ranks_is_refused_on_both(form, train_two, tmp_path):
    """The buffer grows by one row on rank 0, and by two rows on rank 1."""
    argv = [*of("LatePersistentTable"), "--save-every-steps", 1]
    output = train_two(form, tmp_path / "run", *argv, statuses=(2, 2))
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "changes the shape of the persistent buffer model.0.1.table from (" in error
    assert load(tmp_path / "run" / "last.pth")["step"] == 3


@pytest.mark.slow
def test_a_buffer_that_is_larger_on_another_rank_is_refused_before_sending(train_two, tmp_path):
    output = train_two("ddp", tmp_path / "run", *of("EvaluatedTable"), statuses=(2, 2))
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    kinds = "torch.float64 of shape (2, 5) instead of torch.float64 of shape (1, 5)"
    assert f"model.0.1.table is {kinds}; build the same model on all ranks" in error


def test_state_missing_in_checkpoints_is_reported_by_name(run_here, tmp_path):
    out = run_here(*of("Counting"), "--save-dir", tmp_path / "run").out
    names = ", ".join(f"model.0.1.{name}" for name in ("calls", "last", "names", "mean", "history", "by_size", "pair"))
    assert f"Forward passes change plain attributes: {names}. Checkpoints lack these attributes" in out
    scaled = run_here(*of("Scaled"), "--save-dir", tmp_path / "Scaled").out
    assert "Forward passes change the buffers model.0.1.scale. After each step, all ranks copy rank 0's" in scaled
    assert "unless the task computes them in `joint_loss`, which receives all rows of a step" in scaled
    for kind in ("OldWeightNorm", "Masked", "BatchNorm"):
        assert "Forward passes change" not in run_here(*of(kind), "--save-dir", tmp_path / kind).out
