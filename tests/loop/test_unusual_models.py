"""Models with unusual parameters, buffers or outputs match a bare loop, or are refused."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tasks import TASKS
from tests.conftest import load
from tests.helpers.shaped_task import NUM_FEATURES, Plus, Points, Shaped
from trainer.common.errors import UserError
from trainer.loading.order import EpochOrder
from trainer.loop.contract import check_tensors

FREQUENCIES = torch.polar(torch.ones(NUM_FEATURES // 2), torch.arange(1.0, 1 + NUM_FEATURES // 2))


def rotated(model, x):
    """Rotates pairs of features like rotary embeddings."""
    turned = torch.view_as_real(torch.view_as_complex(x.unflatten(1, (-1, 2)).contiguous()) * model.frequencies)
    return turned.flatten(1)[:, :2]


def masked(model, x):
    weights = (x[:, :3, None] * x[:, None, :3] + model.mask).softmax(-1)
    return (weights @ x[:, :3, None])[:, :2, 0]


MODELS = {
    "a mask of infinities": lambda: Plus(masked, mask=torch.full((3, 3), -torch.inf).triu(1)),
    "a complex buffer": lambda: Plus(rotated, frequencies=FREQUENCIES.clone()),
    "a complex parameter": lambda: Plus(
        lambda model, x: (x * model.c).real[:, :2] + (x * model.c).imag[:, 2:],
        c=nn.Parameter(torch.full((NUM_FEATURES,), 1 + 0.5j)),
    ),
    "a part of a larger weight": lambda: Plus(
        lambda model, x: F.linear(x, model.w), w=nn.Parameter(torch.ones(2, 2 * NUM_FEATURES)[:, :NUM_FEATURES])
    ),
    "a transposed weight": lambda: Plus(
        lambda model, x: F.linear(x, model.w), w=nn.Parameter(torch.ones(NUM_FEATURES, 2).T)
    ),
    "an expanded buffer": lambda: Plus(lambda model, x: x @ model.e, e=torch.arange(2.0).expand(NUM_FEATURES, 2)),
}
RUN = ["--task", "shaped", "--weight-decay", 0.1, "--num-threads", 1, "--device", "cpu", "--save-dir"]


def bare_loop(build, dtype, num_epochs=2):
    """Returns the state dict after training with plain AdamW, which is not fused on a CPU."""
    torch.manual_seed(0)
    model = build()
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.to(dtype.to_complex() if tensor.is_complex() else dtype)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    data = Points(21, 1)
    x = torch.from_numpy(data.x)
    labels = (x.sum(1) > 0).long()
    for epoch in range(num_epochs):
        order = torch.from_numpy(EpochOrder(0, epoch, 0, len(data)).take(0, len(data)))
        for chosen in order.split(8):
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen].to(dtype)), labels[chosen]).backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_a_resumed_run_matches_a_bare_loop(name, dtype, run_here, tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "shaped", type("Built", (Shaped,), {"build": lambda self: MODELS[name]()}))
    argv = [*RUN, tmp_path / "run", "--dtype", dtype, "--optimizer", "adamw", "--epochs"]
    run_here(*argv, 1)
    run_here(*argv, 2)
    found = load(tmp_path / "run" / "final.pth")["model"]
    expected = bare_loop(MODELS[name], getattr(torch, dtype))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-12 if dtype == "float64" else 1e-5)


def test_frozen_parameters_in_param_groups_stay_frozen(run_here, tmp_path, monkeypatch):
    class Frozen(Shaped):
        def build(self):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
            model[0].requires_grad_(False)
            return model

        def param_groups(self, objective, phase):
            return [{"params": objective.model.parameters()}]

    monkeypatch.setitem(TASKS, "shaped", Frozen)
    run_here(*RUN, tmp_path, "--epochs", 2)
    torch.manual_seed(0)
    before, after = Frozen(None, 0, None).build().state_dict(), load(tmp_path / "final.pth")["model"]
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert not torch.equal(before["1.weight"], after["1.weight"])


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"calls": 1}

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.LazyLinear(2), "weight has no shape yet; run a forward pass on zeros"),
        (lambda: WithExtraState(4, 2), "_extra_state is a dict, but checkpoints hold only tensors"),
        (lambda: Plus(None, adjacency=torch.eye(3).to_sparse()), "adjacency is a sparse tensor.* persistent=False"),
    ],
)
def test_state_that_a_checkpoint_cannot_hold_is_refused(build, message):
    with pytest.raises(UserError, match=f"^Mine.build_objective: {message}"):
        check_tensors(build(), "Mine.build_objective")


def test_sums_may_have_their_names_in_any_order(command, tmp_path):
    """Two processes iterate over a set of strings in different orders."""
    (tmp_path / "headed.py").write_text(
        "from tests.helpers.shaped_task import *\n"
        "HEADS = {'age', 'sex', 'height', 'weight_kg', 'income'}\n"
        "class HeadedObjective(ShapedObjective):\n"
        "    def forward(self, batch, phase='train'):\n"
        "        sums = {head: len(head) * batch['weight'].sum() for head in HEADS}\n"
        "        return super().forward(batch, phase) | sums\n"
        "class Headed(Shaped):\n"
        "    def build_objective(self):\n"
        "        return HeadedObjective(self.build())\n"
    )
    argv = ["main_multi_gpu.py", "--multi-gpu", "ddp", "--nproc", 2, "--task", f"{tmp_path / 'headed.py'}:Headed"]
    command(*argv, *RUN[2:], tmp_path / "run", "--epochs", 1, PYTHONPATH=".", PYTHONHASHSEED="random")
    metrics = json.loads((tmp_path / "run" / "results.json").read_text())["metrics"]
    for head in ("age", "sex", "height", "weight_kg", "income"):
        assert metrics[f"test/{head}"] == len(head)


SEMI = """
import numpy as np
from tests.helpers.shaped_task import *

class LabelledPoints(Points):
    def __getitems__(self, keys):
        labelled = (keys.index % 4 == 0).astype(np.float32)  # most micro-batches of one have none
        return super().__getitems__(keys) | {"labelled": labelled, "weight": WEIGHT(labelled)}

class SemiObjective(ShapedObjective):
    def forward(self, batch, phase="train"):
        logits = self.model(batch["x"])
        losses = F.cross_entropy(logits, batch["y"], reduction="none") * batch["labelled"] + logits.square().sum(1)
        return {"loss": losses.sum(), "seen": losses.new_tensor(len(losses))}

class Semi(Shaped):
    def splits(self):
        return {"train": LabelledPoints(21, 1), "val": LabelledPoints(8, 2), "test": LabelledPoints(8, 3)}

    def build_objective(self):
        return SemiObjective(self.build())

    def summarise(self, sums):
        return {"loss": float(sums["loss"] / sums["weight"]), "seen": float(sums["seen"])}
"""


def test_unweighted_samples_have_equal_losses_in_any_split(run_here, command, tmp_path):
    (tmp_path / "semi.py").write_text(SEMI.replace("WEIGHT(labelled)", "labelled"))
    argv = ["--task", f"{tmp_path / 'semi.py'}:Semi", "--dtype", "float64", *RUN[2:-1], "--epochs", 2]
    argv += ["--global-batch-size", 8, "--save-dir"]
    for batch_size in (8, 1):
        run_here(*argv, tmp_path / str(batch_size), "--batch-size", batch_size, "--eval-batch-size", batch_size)
    two = ["main_multi_gpu.py", "--multi-gpu", "ddp", "--nproc", 2, "--batch-size", 1, "--eval-batch-size", 1]
    command(*two, *argv, tmp_path / "two", PYTHONPATH=".")
    whole, *others = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("8", "1", "two"))
    assert whole["metrics"]["test/seen"] == 8
    for other in others:
        assert other["metrics"] == pytest.approx(whole["metrics"], rel=1e-12)


@pytest.mark.parametrize("weight", ["labelled * np.nan", "-labelled", "labelled * 9 - 1"])
def test_invalid_weights_of_samples_are_refused(weight, refused, tmp_path):
    file = tmp_path / f"semi_{len(weight)}.py"
    file.write_text(SEMI.replace("WEIGHT(labelled)", weight))
    refused(
        ["batch['weight'] must be finite and non-negative, but a sample has "],
        "--task",
        f"{file}:Semi",
        *RUN[2:],
        tmp_path / "run",
    )


def test_an_epoch_without_loss_terms_is_reported(run_here, tmp_path):
    (tmp_path / "none.py").write_text(SEMI.replace("WEIGHT(labelled)", "labelled * (len(self) < 20)"))
    out, _ = run_here(
        "--task", f"{tmp_path / 'none.py'}:Semi", *RUN[2:-1], "--epochs", 1, "--save-dir", tmp_path / "run"
    )
    assert "Epoch 1 trained nothing: the weights of all samples are 0." in out


EVALUATED = """
from tests.helpers.shaped_task import *

class EvaluatedObjective(ShapedObjective):
    def forward(self, batch, phase="train"):
        sums = super().forward(batch, phase)
        return sums if self.training else OUTPUTS

class Evaluated(Shaped):
    def build_objective(self):
        return EvaluatedObjective(self.build())
"""


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ("None", "must return a dict of tensors (sums), not a NoneType"),
        ('sums | {"n": len(batch["x"])}', "must return a tensor for 'n', a sum over the samples, not a int"),
    ],
)
def test_evaluation_outputs_that_are_not_tensors_are_refused(outputs, message, refused, tmp_path):
    file = tmp_path / f"evaluated_{len(outputs)}.py"
    file.write_text(EVALUATED.replace("OUTPUTS", outputs))
    part = f"EvaluatedObjective.forward(batch) in eval mode {message}"
    refused([part], "--task", f"{file}:Evaluated", *RUN[2:], tmp_path / "run")


def test_nondeterministic_operators_cause_a_warning_or_an_error(run_here, tmp_path, monkeypatch):
    class Unpooling(Shaped):
        def build(self):
            def added(model, x):
                largest, places = F.max_pool1d(x[:, None], 2, return_indices=True)
                return F.max_unpool1d(largest, places, 2)[:, 0, :2]

            return Plus(added)

    monkeypatch.setitem(TASKS, "shaped", Unpooling)
    with pytest.warns(UserWarning, match="max_unpooling2d_forward_out does not have a deterministic implementation"):
        run_here(*RUN, tmp_path / "run", "--epochs", 1)
    _, err = run_here(*RUN, tmp_path / "refused", "--epochs", 1, "--deterministic", status=1)
    assert "does not have a deterministic implementation" in err


def test_a_loss_without_a_gradient_is_refused_with_advice(refused, tmp_path):
    (tmp_path / "gap.py").write_text(
        "from tests.helpers.shaped_task import *\n"
        "class GapObjective(ShapedObjective):\n"
        "    def forward(self, batch, phase='train'):\n"
        "        sums = super().forward(batch, phase)\n"
        "        return {'loss': torch.zeros(())} if self.training and 7 in batch['index'] else sums\n"
        "class Gap(Shaped):\n"
        "    def build_objective(self):\n"
        "        return GapObjective(self.build())\n"
    )
    part = "the loss of this batch depends on no parameter; for a batch without targets"
    refused([part], "--task", f"{tmp_path / 'gap.py'}:Gap", *RUN[2:], tmp_path / "run")


ORDERED = """
import os
from tests.helpers.shaped_task import *

class Heads(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(NUM_FEATURES, NUM_CLASSES) for name in names})

    def forward(self, x):
        return sum(head(x) for head in self.heads.values())

class Ordered(Shaped):
    def build(self):
        return Heads(os.environ.get("HEADS", "ab" if os.environ.get("RANK", "0") == "0" else "ba"))
"""


def test_parameters_in_another_order_are_refused_on_other_ranks_and_at_a_resume(
    command, run_here, refused, tmp_path, monkeypatch
):
    task = ["--task", f"{tmp_path / 'ordered.py'}:Ordered"]
    (tmp_path / "ordered.py").write_text(ORDERED)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "main_multi_gpu.py"]
    done = command(*torchrun, "--multi-gpu", "ddp", *task, *RUN[2:], tmp_path / "two", PYTHONPATH=".", status=1)
    part = "makes different parameters on rank 1 and rank 0, or orders them differently"
    assert part in done.stderr and "('model.heads.b.weight', (2, 4)), but rank 0 has ('model.heads.a" in done.stderr
    monkeypatch.setenv("HEADS", "ab")
    run_here(*task, *RUN[2:], tmp_path / "run", "--epochs", 1)
    monkeypatch.setenv("HEADS", "ba")
    parts = ["the model's parameters are not in the checkpoint's order, so the optimizer state would"]
    refused(parts, *task, *RUN[2:], tmp_path / "run", "--epochs", 2)
