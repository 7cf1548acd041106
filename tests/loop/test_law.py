"""A mean in place of a sum is refused, and any other dependence on how a batch is split is reported."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import trainer
from trainer import Objective, PerSample, Task, UserError, from_dataset
from trainer.commands.build import assemble_run, build_task, prepare_training, start_strategy
from trainer.commands.parse import parse
from trainer.loop.law import check_sums

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
DEPENDS = "so results depend on --batch-size and the number of devices"


class Job(Task):
    """Task whose `objective` a test sets."""

    objective: type[Objective]
    model = staticmethod(lambda: nn.Linear(4, 2))

    def splits(self):
        data = TensorDataset(X, Y)
        return {name: from_dataset(data, seed=0, names=("x", "y")) for name in ("train", "val")}

    def build_objective(self):
        return self.objective(self.model())


def job(forward, model=Job.model):
    objective = type("Own", (Objective,), {"forward": forward})
    return type("Own", (Job,), {"objective": objective, "model": staticmethod(model)})


def losses(self, batch):
    return F.cross_entropy(self.model(batch["x"]), batch["y"], reduction="none")


def total(self, batch, phase="train"):
    return {"loss": losses(self, batch).sum()}


def mean(self, batch, phase="train"):
    return {"loss": losses(self, batch).mean()}


def mean_metric(self, batch, phase="train"):
    return {**total(self, batch), "accuracy": (self.model(batch["x"]).argmax(1) == batch["y"]).float().mean()}


def mean_in_evaluation(self, batch, phase="train"):
    return total(self, batch) if self.training else mean(self, batch)


def logits(self, batch, phase="train"):
    return {**total(self, batch), "logits": self.model(batch["x"])}


def at_times(self, batch, phase="train"):
    return {**total(self, batch), **({"many": torch.ones(())} if len(batch["y"]) > 2 else {})}


def coupled(self, batch, phase="train"):
    rows = F.normalize(self.model(batch["x"]), dim=1)
    return {"loss": F.cross_entropy(rows @ rows.T, torch.arange(len(rows)), reduction="sum")}


def penalty(self, batch, phase="train"):
    decay = self.model.weight.square().sum()
    return {"loss": total(self, batch)["loss"] + 0.3 * decay}


def exact_penalty(self, batch, phase="train"):
    decay = self.model.weight.square().sum()
    return {"loss": total(self, batch)["loss"] + 0.3 * decay * batch["weight"].sum()}


def noisy(self, batch, phase="train"):
    noise = 0.3 * torch.randn_like(batch["x"]) if self.training else 0
    return total(self, {**batch, "x": batch["x"] + noise})


def noisy_mean(self, batch, phase="train"):
    found = noisy(self, batch)
    return {"loss": found["loss"] / len(batch["y"])} if self.training else found


def very_noisy(self, batch, phase="train"):
    factor = torch.rand(len(batch["y"])).log() if self.training else 1.0
    return {"loss": (losses(self, batch) * factor).sum()}


def by_gradient(self, batch, phase="train"):
    """Computes a gradient within the forward pass, like adversarial training."""
    x = batch["x"].requires_grad_()
    if self.training:
        (moved,) = torch.autograd.grad(losses(self, {**batch, "x": x}).sum(), x)
        x = x + 0.1 * moved.sign()
    return total(self, {**batch, "x": x})


def by_chance(self, batch, phase="train"):
    """Adds a count that is 1 for two samples and for four, as batch statistics may cause."""
    return total(self, batch) | {"count": torch.tensor({2: 1, 4: 1}.get(len(batch["y"]), 2))}


def per_sample(self, batch, phase="train"):
    return total(self, batch) | ({} if self.training else {"rows": PerSample(losses(self, batch))})


def normed():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def dropping():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))


FINE = {
    "a sum": job(total),
    "batch norm": job(total, normed),
    "dropout": job(total, dropping),
    "noise": job(noisy),
    "much noise": job(very_noisy),
    "a penalty for each sample": job(exact_penalty),
    "gradients in the forward": job(by_gradient),
    "rows": job(per_sample),
    "a count that is a mean's by chance": job(by_chance),
}
REFUSED = {
    "a mean": (job(mean), "in train mode: 'loss' is", "as if it were a mean; return sums over the samples"),
    "a mean with dropout": (job(mean, dropping), "'loss' is", "as if it were a mean"),
    "a mean with batch norm": (job(mean, normed), "in train mode: 'loss' is", "as if it were a mean"),
    "a mean with noise": (job(noisy_mean), "in train mode: 'loss' is", "as if it were a mean"),
    "a metric": (job(mean_metric), "'accuracy' is", "as if it were a mean"),
    "in evaluation": (job(mean_in_evaluation), "in eval mode: 'loss' is", "as if it were a mean"),
    "logits": (job(logits), "returns 'logits' of shape (4, 2) for 4 samples", "and (2, 2) for half of them"),
    "a name at times": (job(at_times), "returns 'many' only for some batches", ""),
}
NAMED = {
    "coupled samples": (job(coupled), "in train mode: 'loss' is", DEPENDS),
    "a penalty for each batch": (job(penalty), "in train mode: 'loss' is", "penalty, by batch['weight'].sum()"),
}


def remarks_of(task_type, *more):
    """Returns the remarks about a task's new model, and asserts that the check leaves no trace."""
    argv = ["--task", "own", "--device", "cpu", *more]
    flags, problems = parse(argv, several_devices=False, task_type=task_type)
    assert problems == []
    task, strategy = build_task(flags), start_strategy(flags, None)
    run = assemble_run(flags, task, strategy, is_new=True)
    prepare_training(flags, task, run.learner, run.plan.orders, run.memory)
    before = {name: value.clone() for name, value in run.learner.objective.state_dict().items()}
    generator = torch.get_rng_state()
    found = check_sums(task, run.learner)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in run.learner.objective.state_dict().items())
    assert all(parameter.grad is None for parameter in run.learner.objective.parameters())
    return found


@pytest.mark.parametrize("precision", [[], ["--dtype", "float64"], ["--amp", "bf16"]], ids=["float32", "64", "bf16"])
@pytest.mark.parametrize("task_type", FINE.values(), ids=FINE)
def test_correct_sums_cause_no_warning(task_type, precision):
    assert remarks_of(task_type, *precision) == []


@pytest.mark.parametrize(("task_type", "place", "reason"), REFUSED.values(), ids=REFUSED)
def test_means_and_per_sample_values_among_sums_are_refused(task_type, place, reason):
    with pytest.raises(UserError) as error:
        remarks_of(task_type)
    assert place in str(error.value) and reason in str(error.value)


@pytest.mark.parametrize(("task_type", "place", "reason"), NAMED.values(), ids=NAMED)
def test_batch_dependence_is_reported_once_per_mode(task_type, place, reason):
    found = remarks_of(task_type)
    assert len(found) == 2
    assert place in found[0] and reason in found[0] and "in eval mode" in found[1]


def test_a_declared_coupled_loss_is_not_refused(monkeypatch):
    task_type = job(coupled)
    monkeypatch.setattr(task_type.objective, "coupled", True)
    assert remarks_of(task_type) == []


class NoiseOfABatch:
    """Data set with noise, too small to change a sum, that depends on which samples form a batch."""

    def __len__(self):
        return len(X)

    def __getitems__(self, keys):
        noise = np.random.default_rng(keys.index).normal(0, 1e-6, (len(keys.index), 4))
        return {"x": (X.numpy()[keys.index] + noise).astype(np.float32), "y": Y.numpy()[keys.index]}


@pytest.mark.parametrize("forward", [total, coupled])
def test_samples_that_depend_on_their_batch_are_reported(forward, monkeypatch, tmp_path):
    task_type = job(forward)
    monkeypatch.setattr(task_type.objective, "coupled", forward is coupled)
    monkeypatch.setattr(task_type, "splits", lambda task: {"train": NoiseOfABatch(), "val": NoiseOfABatch()})
    found = remarks_of(task_type)
    assert [line.split(":")[0] for line in found] == ["Training data", "Evaluation data"]
    assert "'x' of the same samples differs when they are read again in another batch" in found[0]
    with pytest.raises(UserError, match="--check-task: Training data: 'x' of the same samples differs"):
        trainer.fit(task_type, check_task=True, device="cpu", save_dir=tmp_path)


def test_rank_0_decides_whether_samples_differ(monkeypatch):
    """A process whose own samples differ continues the check if rank 0 found no difference."""
    task_type = job(total)
    monkeypatch.setattr(task_type, "splits", lambda task: {"train": NoiseOfABatch(), "val": NoiseOfABatch()})

    def on_main(group, function):
        return True if function() is True else []

    monkeypatch.setattr("trainer.parallel.group.Group.on_main", on_main)
    assert remarks_of(task_type) == []


def test_slow_checks_are_skipped(monkeypatch):
    for name in ("SHARE_OF_START", "LEAST_S"):
        monkeypatch.setattr(f"trainer.loop.law.{name}", 0.0)
    assert remarks_of(job(mean)) == []


def test_a_mean_is_refused_at_the_start_but_not_at_a_resume(tmp_path):
    settings = {"save_dir": tmp_path, "max_steps": 2, "device": "cpu", "num_threads": 1}
    with pytest.raises(UserError, match="as if it were a mean"):
        trainer.fit(job(mean), **settings)
    assert not (tmp_path / "last.pth").exists()


def test_check_task_needs_no_training(run_here, tmp_path):
    out = run_here("--task", "har", "--check-task", "--device", "cpu", "--save-dir", tmp_path / "run").out
    assert "The objective's loss and metrics do not depend on how a batch is split." in out
    assert not (tmp_path / "run").exists()
