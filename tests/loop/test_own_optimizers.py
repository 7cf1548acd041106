"""Optimizers of a task's own: whatever they keep, and wherever, a resumed run goes on as an unbroken one."""

import pytest
import torch

from tests.conftest import assert_same_bits, load
from tests.helpers.shaped_task import Shaped
from trainer.tasks import TASKS

RUN = ["--task", "shaped", "--num-threads", 1, "--device", "cpu", "--save-dir"]


class Keeping(torch.optim.Optimizer):
    """Counts its steps in each group, as schedule-free optimizers do, in a state of no parameter, and in neither."""

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


@pytest.fixture
def keeping(run_here, monkeypatch):
    """Trains so many steps with an optimizer of these settings."""

    def train(directory, max_steps, **settings):
        def optimizers(self, phase, groups, lr):
            return [Keeping(groups, lr, **settings)]

        monkeypatch.setitem(TASKS, "shaped", lambda: type("Kept", (Shaped,), {"build_optimizers": optimizers}))
        run_here(*RUN, directory, "--max-steps", max_steps)
        return load(directory / "final.pth")

    return train


def test_goes_on_to_the_bit_from_any_step(keeping, tmp_path):
    whole = keeping(tmp_path / "whole", 6)
    for steps in ([2], [1, 3, 5]):
        for max_steps in (*steps, 6):
            found = keeping(tmp_path / str(len(steps)), max_steps)
        assert_same_bits(whole, found)
        assert found["optimizers"]["train"][0]["num_steps"] == 6


def test_settings_are_those_of_the_task_nonetheless(keeping, tmp_path):
    keeping(tmp_path, 3, power=1.0)
    (group, _) = keeping(tmp_path, 4, power=0.5)["optimizers"]["train"][0]["param_groups"]
    assert (group["power"], group["k"]) == (0.5, 4)
    assert set(group["changed"]) == {"k", "weight_sum"}
