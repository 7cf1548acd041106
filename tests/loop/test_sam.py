"""Sharpness-aware steps: batch statistics, loss scaling, skipped steps and unsupported settings."""

from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conftest import ROOT, load
from tests.helpers import jobs
from tests.helpers.weights import difference
from trainer.loading.batches import WeightedBatch
from trainer.logs.run_log import SilentLog
from trainer.loop.ema import ExponentialMovingAverage
from trainer.loop.precision import Precision
from trainer.loop.progress import Progress
from trainer.loop.rescue import LastStep
from trainer.loop.sam import SamLearner
from trainer.loop.train import train_step
from trainer.parallel.devices import DeviceQueue
from trainer.parallel.strategy import SingleDevice
from trainer.task import Objective

FILE = __file__
FLAGS = ["--max-steps", 6, "--device", "cpu", "--num-threads", 1, "--batch-size", jobs.GLOBAL_BATCH]


class Normed(jobs.Sam):
    """Job whose batch norm updates its statistics only in the first forward pass of a step."""

    @staticmethod
    def model():
        return nn.Sequential(nn.Linear(jobs.WIDTH, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    @classmethod
    def learnt(cls, num_steps):
        model, data = cls.new(), cls.data(jobs.NUM_TRAIN, 0)
        optimizer, params, norm = jobs.adamw(model), [*model.parameters()], model[1]
        for _, index in islice(jobs.batches(), num_steps):
            batch = cls.batch(data, index)
            cls.losses(model, batch).mean().backward()
            norm.momentum, counted = 0.0, norm.num_batches_tracked.clone()
            size = torch.stack([p.grad.norm() for p in params]).norm()
            before = [p.detach().clone() for p in params]
            with torch.no_grad():
                for p in params:
                    p.add_(p.grad * (cls.rho / (size + 1e-12)))
            optimizer.zero_grad()
            cls.losses(model, batch).mean().backward()
            norm.momentum = 0.1
            norm.num_batches_tracked.copy_(counted)
            for p, old in zip(params, before, strict=True):
                p.data = old
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()


class Overflowing(jobs.Sam):
    """Job whose loss is infinite for the batch with sample 3."""

    @staticmethod
    def losses(model, batch):
        scale = torch.where((batch["index"] == 3).any(), torch.inf, 1.0)
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * scale


class Sparse(jobs.Sam):
    @staticmethod
    def model():
        return nn.Sequential(nn.EmbeddingBag(2, 4, sparse=True), nn.Linear(4, 2))

    @staticmethod
    def losses(model, batch):
        return F.cross_entropy(model(batch["y"][:, None]), batch["y"], reduction="none")

    def param_groups(self, objective, phase):
        return [{"params": objective.parameters(), "weight_decay": 0.0}]


def test_statistics_come_from_the_first_forward_pass(run_here, tmp_path):
    run_here("--task", f"{FILE}:Normed", *FLAGS, "--save-dir", tmp_path)
    assert difference(load(tmp_path / "last.pth")["model"], Normed.learnt(6)) < 1e-10


def test_a_loss_scale_hardly_changes_the_weights(run_here, tmp_path):
    for name in ("off", "fp16"):
        flags = ["--dtype", "float32", "--amp", name, "--save-dir", tmp_path / name]
        run_here("--task", f"{jobs.__file__}:Sam", *FLAGS, *flags)
    exact, scaled = (load(tmp_path / name / "last.pth")["model"] for name in ("off", "fp16"))
    assert 0 < difference(scaled, exact) < 0.01


def test_a_nonfinite_step_keeps_the_weights_finite(run_here, tmp_path):
    out = run_here("--task", f"{FILE}:Overflowing", *FLAGS, "--on-nonfinite", "skip", "--save-dir", tmp_path).out
    assert "left out" in out or "skipped" in out
    assert all(weight.isfinite().all() for weight in load(tmp_path / "last.pth")["model"].values())


JOINT = f"{ROOT / 'tests' / 'helpers' / 'joint_task.py'}:Joint"


@pytest.mark.parametrize(
    ("task", "more", "message"),
    [
        (f"{jobs.__file__}:Sam", ["--parts", 2], "--sam-rho 0.05: a step needs two gradients, but --parts 2"),
        (JOINT, ["--sam-rho", 0.1], "--sam-rho 0.1: a step needs two gradients, but SimClr.joint_loss"),
        (f"{FILE}:Sparse", ["--optimizer", "sgd"], "--sam-rho 0.05: does not support sparse gradients"),
    ],
)
def test_unsupported_combinations_are_refused(task, more, message, run_here, tmp_path):
    assert message in run_here("--task", task, *FLAGS, *more, "--save-dir", tmp_path, status=2).err


def test_a_rescue_finds_no_finished_step_while_weights_are_moved():
    """Runs two steps with two forward passes each; the last pass fails."""
    last, found, device = LastStep(DeviceQueue()), [], torch.device("cpu")

    class Watched(Objective):
        def forward(self, batch, phase="train"):
            found.append((last.find(), *(p.detach().clone() for p in self.model.parameters())))
            if len(found) == 4:
                raise RuntimeError("lost")
            return {"loss": self.model(batch["x"]).square().sum()}

    objective, strategy = Watched(nn.Linear(3, 1)), SingleDevice(device)
    precision, average = Precision("off", torch.float32, device), ExponentialMovingAverage(objective.model, 0)
    learner = SamLearner(objective, objective, strategy, precision, 0.0, average, watches=[last], rho=0.5)
    learner.set_trained({"train": [*objective.parameters()]})
    learner.optimizers["train"] = [torch.optim.SGD(objective.parameters())]
    progress = Progress()
    last.begin(progress)
    with pytest.raises(RuntimeError, match="lost"):
        for progress.step in (1, 2):
            window = [WeightedBatch({"x": torch.ones(4, 3)}, 4.0, 4)]
            train_step(learner, "train", window, 4.0, (0, 0, 0, 0), 0.1, [last])
            last.after_step(progress, None, SilentLog())
    steps = [step and (step[0].progress.step, step[1]) for step, *_ in found]
    assert steps == [(0, True), None, (1, True), None]
    assert last.find()[0].progress.step == 1 and last.find()[1]
    assert not torch.equal(found[3][1], found[2][1]) and torch.equal(objective.model.weight, found[2][1])
