"""A task that breaks its contract is refused with one sentence, which names the method."""

import numpy as np
import pytest
import torch
from torch import nn

from tasks import TASKS
from tests.conftest import REFUSAL, TINY, contents, load
from tests.helpers.weighted_task import Sequences, Weighted, WeightedObjective


def broken(**attributes):
    """Returns a subclass of `Weighted` with the given attributes."""
    return type("Broken", (Weighted,), attributes)


def with_splits(change):
    return broken(splits=lambda self: change(Weighted.splits(self)))


def with_batch(**changes):
    """Returns a task whose batches have the given entries, and lack those given as None."""

    def collate(self, samples, keys):
        batch = Weighted.collate(self, samples, keys) | changes
        return {name: value for name, value in batch.items() if value is not None}

    return broken(collate=collate)


def with_sums(sums):
    """Returns a task whose objective returns `sums(loss)`."""

    class Objective(WeightedObjective):
        def forward(self, batch, phase="train"):
            return sums(super().forward(batch, phase)["loss"])

    return broken(build_objective=lambda self: Objective(Weighted.build_objective(self).model, 0.0))


class NoPhase(WeightedObjective):
    def forward(self, batch):
        raise AssertionError


class Beside(WeightedObjective):
    def __init__(self, model, blur):
        super().__init__(model, blur)
        self.teacher = nn.Linear(1, 1)


def with_objective(kind):
    return broken(build_objective=lambda self: kind(Weighted.build_objective(self).model, 0.0))


def asks_for_lr(self, config, *more):
    Weighted.__init__(self, config, *more)
    self.rate = config.lr


def with_blocks(blocks):
    return broken(blocks=lambda self, model: blocks(model.layers))


class Unsized:
    def __getitems__(self, keys):
        raise AssertionError


BEFORE_TRAINING = {
    "no phases": (broken(phases=()), "Broken.phases (): must be distinct names"),
    "two phases of a name": (broken(phases=("a", "a")), "Broken.phases ('a', 'a'): must be distinct names"),
    "phases without a comma": (
        broken(phases=("train")),
        "Broken.phases 'train': must be distinct names, such as (\"train\",)",
    ),
    "phases that are numbers": (broken(phases=(1, 2)), "Broken.phases (1, 2): must be distinct names"),
    "a headline of a split": (
        broken(headline=("train/loss", "val/accuracy")),
        "Broken.headline ('train/loss', 'val/accuracy'): must be metrics without a split",
    ),
    "a headline that is text": (broken(headline="loss"), "Broken.headline 'loss': must be metrics"),
    "a model and no objective": (
        broken(build_objective=lambda self: torch.nn.Linear(2, 2)),
        "Broken.build_objective must return an Objective with a model, not a Linear",
    ),
    "a forward without phase": (
        with_objective(NoPhase),
        "NoPhase.forward(batch): the trainer calls it as forward(batch, phase), which these parameters do not allow; "
        "write `def forward(self, batch, phase='train')`",
    ),
    "a method with fewer arguments": (
        broken(order=lambda self, phase, epoch: None),
        "Broken.order(phase, epoch): the trainer calls it as order(phase, epoch, global_batch_size), which",
    ),
    "a part beside the model": (
        with_objective(Beside),
        "Beside holds teacher.bias, teacher.weight outside the model, but only the model",
    ),
    "a flag of the trainer in the config": (
        broken(__init__=asks_for_lr),
        "--task broken: Broken reads config.lr, but the task has no such flag (it has ",
    ),
    "turns": (broken(turns=(1, 2)), "Broken.turns (1, 2): must be empty, or a number"),
    "monitor": (broken(monitor="val/loss"), "Broken.monitor val/loss: must be a metric and 'max' or 'min'"),
    "mode": (broken(monitor=("val/loss", "least")), "Broken.monitor ('val/loss', 'least'): must be"),
    "no train": (with_splits(lambda splits: {"test": splits["test"]}), "returns test, but must include 'train'"),
    "no mapping": (with_splits(lambda splits: [*splits.values()]), "Broken.splits: must return a mapping"),
    "an unknown set": (
        with_splits(lambda splits: {**splits, "validation": splits["val"]}),
        "Broken.splits: the name 'validation' must be 'train', 'test', 'val' or 'val/NAME'",
    ),
    "a set without a name": (
        with_splits(lambda splits: {**splits, "val/": splits["val"]}),
        "Broken.splits: the name 'val/' must be",
    ),
    "a set of two names": (
        with_splits(lambda splits: {**splits, "val/a/b": splits["val"]}),
        "Broken.splits: the name 'val/a/b' must be",
    ),
    "a set that is no text": (
        with_splits(lambda splits: {**splits, 7: splits["val"]}),
        "Broken.splits: the name 7 must be",
    ),
    "an empty set": (
        with_splits(lambda splits: {**splits, "val/far": Sequences(0, 0, False)}),
        "--task broken: its data set 'val/far' is empty; give data",
    ),
    "a metric of another set": (
        with_splits(lambda splits: {**{k: splits[k] for k in ("train", "test")}, "val/far": splits["val"]}),
        "Broken.monitor 'val/accuracy': must be a metric of a validation set (val/far",
    ),
    "no length": (
        with_splits(lambda splits: {**splits, "val": Unsized()}),
        "--task broken: its data set 'val': Unsized has no `__len__`",
    ),
    "no length of a phase": (
        broken(training_data=lambda self, phase: Unsized()),
        "--task broken: its data set of the phase 'train': Unsized has no `__len__`",
    ),
    "a length of 2.0": (
        with_splits(lambda splits: {**splits, "val": type("Half", (Unsized,), {"__len__": lambda self: 2.0})()}),
        "--task broken: its data set 'val': `__len__` of Half returns 2.0; return a whole number",
    ),
    "a constructor without parameters": (
        broken(__init__=lambda self: None),
        "Broken.__init__: too many positional arguments; write `def __init__(self, config, seed, cache_dir)`",
    ),
    "no list of batches": (
        broken(order=lambda *_: iter([np.arange(2)])),
        "Broken.order('train') must return a list of arrays of indices, not list_iterator",
    ),
    "a flat permutation": (
        broken(order=lambda *_: np.arange(8)),
        "Broken.order('train') must return one array of indices per step: ",
    ),
    "no batch": (broken(collate=lambda *_: [1]), "Broken.collate must return a dict of tensors, not a list"),
    "no index": (with_batch(index=None), "Broken.collate must put 'index' into the batch"),
    "no weight": (with_batch(weight=None), "Broken.collate must put 'weight' into the batch"),
    "array": (with_batch(more=np.zeros(2)), "Broken.collate must return a tensor for batch['more'], not a ndarray"),
    "a number": (with_batch(more=torch.tensor(1.0)), "Broken.collate must put the 4 samples on dim 0 of batch['more']"),
    "samples not on dim 0": (
        with_batch(more=torch.zeros(3, 2)),
        "Broken.collate must put the 4 samples on dim 0 of batch['more'], whose shape is (3, 2)",
    ),
    "a sample lost": (
        broken(collate=lambda self, samples, keys: {"index": torch.zeros(1), "weight": torch.zeros(1)}),
        "Broken.collate must put the 4 samples on dim 0 of batch['index'], whose shape is (1,)",
    ),
    "whole weights": (
        with_batch(weight=torch.ones(4, dtype=torch.int64)),
        "Broken.collate must give batch['weight'] one floating-point number per sample, not torch.int64 of",
    ),
    "weights in a column": (with_batch(weight=torch.ones(4, 1)), "not torch.float32 of shape (4, 1)"),
    "no sums": (with_sums(lambda loss: loss), "forward(batch, 'train') in train mode must return a dict of tensors"),
    "a number among the sums": (
        with_sums(lambda loss: {"loss": loss, "n": 2}),
        "in train mode must return a tensor for 'n', a sum over the samples, not a int; return the tensor itself",
    ),
    "no loss": (with_sums(lambda loss: {"cost": loss}), "in train mode returns cost, but must return 'loss'"),
    "losses": (with_sums(lambda loss: {"loss": loss.repeat(2)}), "in train mode returns a loss of shape (2,)"),
    "no gradient": (with_sums(lambda loss: {"loss": loss.detach()}), "depends on no parameter"),
    "weight of its own": (with_sums(lambda loss: {"loss": loss, "weight": loss}), "in train mode returns 'weight'"),
    "foreign block": (
        with_blocks(lambda layers: [nn.Linear(1, 1)]),
        "Broken.blocks: returns a Linear that is not a submodule of the model",
    ),
    "block within another": (with_blocks(lambda layers: [layers, layers[0]]), "Broken.blocks: returns a Linear that s"),
    "block twice": (with_blocks(lambda layers: [layers[0], layers[0]]), "Broken.blocks: returns a Linear that shares"),
}


@pytest.mark.parametrize(("task", "message"), BEFORE_TRAINING.values(), ids=BEFORE_TRAINING)
def test_errors_visible_at_the_start_are_refused_before_training(task, message, refused, tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "broken", task)
    refused([message], *TINY, "--task", "broken", "--save-dir", tmp_path / "run")
    assert not contents(tmp_path, REFUSAL)


LATER = {
    "no loss": (lambda loss: {"cost": loss}, "in train mode returns cost, but must return 'loss'"),
    "losses": (lambda loss: {"loss": loss.repeat(2)}, "in train mode returns a loss of shape (2,)"),
    "no gradient": (lambda loss: {"loss": loss.detach()}, "depends on no parameter; for a batch without targets"),
    "nothing": (lambda loss: None, "must return a dict of tensors"),
}


@pytest.mark.parametrize(("sums", "message"), LATER.values(), ids=LATER)
def test_a_bad_result_of_a_later_batch_is_refused_after_saving_earlier_steps(
    sums, message, refused, tmp_path, monkeypatch
):
    calls = iter(range(100))
    task = with_sums(lambda loss: {"loss": loss, "correct": loss} if next(calls) < 3 else sums(loss))
    monkeypatch.setitem(TASKS, "broken", task)
    refused([message], *TINY, "--task", "broken", "--save-dir", tmp_path / "run")
    assert load(tmp_path / "run" / "last.pth")["step"] == 2


def test_blocks_that_share_a_parameter_are_refused(refused, tmp_path, monkeypatch):
    class Tied(Weighted):
        def build_objective(self):
            objective = super().build_objective()
            norm = objective.model.layers[1]
            objective.model.twin = nn.LayerNorm(norm.normalized_shape)
            objective.model.twin.weight = norm.weight
            return objective

        def blocks(self, model):
            return [model.layers[1], model.twin]

    monkeypatch.setitem(TASKS, "tied", Tied)
    message = "Tied.blocks: returns a LayerNorm that shares modules or parameters with another block"
    refused([message], *TINY, "--task", "tied", "--save-dir", tmp_path / "run")


AFTER_AN_EPOCH = {
    "no such metric": (
        broken(monitor=("val/acuracy", "max")),
        "Broken.monitor: 'val/acuracy' must be one of the metrics train/loss, train/accuracy",
    ),
    "tensors": (broken(summarise=lambda self, sums: sums), "Broken.summarise: must return a number for 'loss'"),
    "a number of numpy": (
        broken(summarise=lambda self, sums: {"loss": np.float32(1)}),
        "Broken.summarise: must return a number for 'loss', not a float32",
    ),
    "a metric of the trainer": (
        broken(summarise=lambda self, sums: {"loss": 1.0, "grad_norm": 1.0}),
        "Broken.summarise: returns 'grad_norm', the name of a metric of the trainer; rename it",
    ),
    "no dict": (broken(summarise=lambda self, sums: 1.0), "Broken.summarise: must return a dict of numbers, not a flo"),
    "tensors of training": (
        broken(summarise_training=lambda self, sums, phase: sums),
        "Broken.summarise_training: must return a number for 'loss', not a Tensor",
    ),
    "tensors of evaluation": (
        broken(summarise=lambda self, sums: sums, summarise_training=lambda self, sums, phase: {"loss": 1.0}),
        "Broken.summarise: must return a number for 'loss', not a Tensor",
    ),
}


@pytest.mark.parametrize(("task", "message"), AFTER_AN_EPOCH.values(), ids=AFTER_AN_EPOCH)
def test_errors_that_only_scores_show_are_refused_in_one_sentence(task, message, refused, tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "broken", task)
    refused([message], *TINY, "--task", "broken", "--save-dir", tmp_path / "run")
