"""A run with a task's own optimizers resumes bit-identically, whatever state they keep."""

import pytest
import torch

from tasks import TASKS
from tests.conftest import assert_same_bits, load
from tests.helpers.shaped_task import Shaped
from trainer.common.errors import UserError
from trainer.loop.precision import take_step

RUN = ["--task", "shaped", "--num-threads", 1, "--device", "cpu", "--save-dir"]


class Keeping(torch.optim.Optimizer):
    """Optimizer that counts steps in its groups, in state that belongs to no parameter, and in an attribute."""

    def __init__(self, params, lr, power=1.0, beta=0.5):
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": torch.zeros(()), "power": power, "beta": beta})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        totals = self.state["totals"]
        totals["steps"] = totals.get("steps", 0) + 1
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += 1 / group["k"]
            rate = group["lr"] * (1 / (group["k"] + totals["steps"] + self.num_steps)) ** group["power"]
            for p in group["params"]:
                p.sub_(p.grad + group["weight_sum"] * 0.01 * p, alpha=rate)

    def state_dict(self):
        return super().state_dict() | {"num_steps": self.num_steps}

    def load_state_dict(self, state):
        super().load_state_dict({name: state[name] for name in ("state", "param_groups")})
        self.num_steps = state["num_steps"]


class OtherTypes(torch.optim.Optimizer):
    """Optimizer with state of other dtypes than the parameters: a sum, a count and a mask, with one value per row."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state, rows = self.state[p], p.grad if p.dim() == 1 else p.grad.mean(1)
                if not state:
                    state["sum"] = torch.zeros_like(rows, dtype=torch.float32)
                    state["count"] = torch.zeros_like(rows, dtype=torch.int32)
                    state["seen"] = torch.zeros_like(rows, dtype=torch.bool)
                state["sum"].add_(rows.to(torch.float32))
                state["count"].add_((rows > 0).to(torch.int32))
                state["seen"].logical_or_(rows > 0)
                scale = 1 + state["sum"].abs() + state["count"] // 2 + state["seen"]
                p.sub_(p.grad / scale.to(p.dtype).view(-1, *[1] * (p.dim() - 1)), alpha=group["lr"])


@pytest.fixture
def keeping(run_here, monkeypatch):
    """Trains up to `max_steps` with `Keeping`; returns the last checkpoint."""

    def train(directory, max_steps, **settings):
        def optimizers(self, phase, groups, lr):
            return [Keeping(groups, lr, **settings)]

        monkeypatch.setitem(TASKS, "shaped", type("Kept", (Shaped,), {"build_optimizers": optimizers}))
        run_here(*RUN, directory, "--max-steps", max_steps)
        return load(directory / "final.pth")

    return train


def test_a_run_resumes_bit_identically_from_any_step(keeping, tmp_path):
    whole = keeping(tmp_path / "whole", 6)
    for steps in ([2], [1, 3, 5]):
        for max_steps in (*steps, 6):
            found = keeping(tmp_path / str(len(steps)), max_steps)
        assert_same_bits(whole | {"scores": {}}, found | {"scores": {}})  # the runs are evaluated at different steps
        assert found["optimizers"]["train"][0]["num_steps"] == 6


def test_optimizer_state_keeps_its_dtypes_after_a_resume(run_here, monkeypatch, tmp_path):
    own = {
        "build_optimizers": lambda self, phase, groups, lr: [OtherTypes([{"params": g["params"]} for g in groups], lr)]
    }
    monkeypatch.setitem(TASKS, "shaped", type("Typed", (Shaped,), own))
    for name, steps in (("whole", [6]), ("resumed", [3, 6])):
        for max_steps in steps:
            run_here(*RUN, tmp_path / name, "--dtype", "float64", "--max-steps", max_steps)
    whole, resumed = (load(tmp_path / name / "final.pth") for name in ("whole", "resumed"))
    assert_same_bits(whole["model"], resumed["model"])
    assert_same_bits(whole["optimizers"], resumed["optimizers"])
    kept = resumed["optimizers"]["train"][0]["state"][0]
    assert [kept[name].dtype for name in ("sum", "count", "seen")] == [torch.float32, torch.int32, torch.bool]


def test_optimizer_settings_come_from_the_task_at_a_resume(keeping, tmp_path):
    keeping(tmp_path, 3, power=1.0)
    (group, _) = keeping(tmp_path, 4, power=0.5)["optimizers"]["train"][0]["param_groups"]
    assert (group["power"], group["k"]) == (0.5, 4)
    assert set(group["changed"]) == {"k", "weight_sum"}


class NeedsClosure(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None, "requires closure"


class CallsClosure(torch.optim.SGD):
    def step(self, closure=None):
        closure()


class Broken(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("a mistake")


@pytest.mark.parametrize("optimizer_type", [NeedsClosure, CallsClosure])
def test_an_optimizer_that_needs_a_closure_is_refused_at_the_first_step(optimizer_type):
    optimizer = optimizer_type([torch.zeros(1)])
    with pytest.raises(UserError, match=f"^the optimizer {optimizer_type.__name__} needs a closure that evaluates"):
        take_step(optimizer)


def test_other_errors_of_an_optimizer_are_raised_unchanged():
    with pytest.raises(RuntimeError, match=r"^a mistake$"):
        take_step(Broken([torch.zeros(1)]))
