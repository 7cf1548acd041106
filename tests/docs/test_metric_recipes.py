"""Tests the code for metrics and coupled losses in docs/own_task.md, and examples/mixup.py."""

import json
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from examples.mixup import Mixed
from examples.own_task import SpiralData, SpiralFlags, Spirals
from tasks import TASKS
from tests.conftest import ROOT, load
from tests.docs.recipes import recipe
from tests.helpers.weights import difference
from tests.loop.test_per_sample import slow_auc
from trainer import FlagGroup, Objective, SampleKeys, Task


@dataclass
class NoFlags(FlagGroup):
    """Task: of a recipe"""


class Points:
    def __init__(self, num: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.points = rng.normal(size=(num, 2)).round(1).astype(np.float32)
        self.labels = (self.points.sum(1) + rng.normal(size=num) > 0).astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys):
        return {"point": self.points[keys.index], "label": self.labels[keys.index]}


def test_metrics_that_are_not_sums_are_exact(monkeypatch, run_here, tmp_path):
    names = recipe("Metrics that do not add up", area_under_curve=area_under_curve, F=F)
    objective = type("RecipeObjective", (Objective,), {"forward": names["forward"]})
    splits = {"train": Points(50, 0), "val": Points(21, 1), "test": Points(30, 2)}
    members = {
        "Config": NoFlags, "monitor": ("val/auc", "max"), "splits": lambda self: splits,
        "build_objective": lambda self: objective(nn.Linear(2, 1)), "summarise": names["summarise"],
    }  # fmt: skip
    monkeypatch.setitem(TASKS, "recipe", type("Recipe", (Task,), members))
    run_here("--task", "recipe", "--epochs", 2, "--batch-size", 4, "--dtype", "float64", "--save-dir", tmp_path)
    model = load(tmp_path / "best.pth")["model"]
    scores = [float(model["weight"][0] @ torch.from_numpy(p).double() + model["bias"]) for p in splits["test"].points]
    metrics = json.loads((tmp_path / "results.json").read_text())["metrics"]
    assert metrics["test/auc"] == slow_auc(scores, splits["test"].labels)


class Shifted(Spirals):
    monitor = ("val/noisy/accuracy", "max")

    def splits(self):
        splits = super().splits()
        noisy = SpiralData(200, 2 * self.config.noise, self.seed + 3)
        return {"train": splits["train"], "val/as-trained": splits["val"], "val/noisy": noisy, "test": splits["test"]}


def test_several_validation_sets_are_scored(monkeypatch, run_here, tmp_path):
    monkeypatch.setitem(TASKS, "shifted", Shifted)
    argv = ["--num-points", 200, "--epochs", 5, "--keep-checkpoints", 1, "--keep-best", 3, "--lr", 0.02]
    run_here("--task", "shifted", *argv, "--save-dir", tmp_path)
    epochs = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    scores = [record["val/noisy/accuracy"] for record in epochs if record["event"] == "epoch"]
    assert any("val/as-trained/accuracy" in record for record in epochs)
    best = sorted(range(5), key=lambda epoch: -scores[epoch])[:3]
    paths = [tmp_path / f"checkpoint_{epoch + 1}.pth" for epoch in best]
    assert {*tmp_path.glob("checkpoint_*")} == {*paths, tmp_path / "checkpoint_5.pth"}

    models = [load(path)["model"] for path in paths]
    averaged = {name: sum(model[name] for model in models) / len(models) for name in models[0]}
    model = Spirals(SpiralFlags(), 0, tmp_path).build_objective().model
    model.load_state_dict(averaged)
    torch.save(averaged, tmp_path / "averaged.pth")
    run_here("--task", "shifted", *argv, "--init-from", tmp_path / "averaged.pth", "--save-dir", tmp_path / "next")
    for name, weights in model.state_dict().items():
        mean = np.mean([load(path)["model"][name].numpy() for path in paths], axis=0)
        assert np.allclose(weights, mean, rtol=1e-5, atol=1e-7)


def area_under_curve(scores, labels):
    return slow_auc(scores.tolist(), labels.tolist())


def test_mixup_depends_only_on_the_sample():
    plain = SpiralData(100, 0.1, 0)
    mixed = Mixed(plain, seed=3)
    together = mixed.__getitems__(SampleKeys(np.arange(100), 2))
    for i in (0, 41, 99):
        alone = mixed.__getitems__(SampleKeys(np.array([i]), 2))
        assert all(np.array_equal(alone[name][0], together[name][i]) for name in together)
        (other,) = [j for j in range(100) if np.allclose(mix(plain, i, j, together["share"][i]), together["point"][i])]
        assert together["arm"][i] == plain.arms[i]
        assert together["other_arm"][i] == plain.arms[other]
    assert not np.array_equal(mixed.__getitems__(SampleKeys(np.arange(100), 3))["share"], together["share"])
    assert 0 <= together["share"].min() < 0.1 < 0.9 < together["share"].max() < 1


def mix(data, i, j, share):
    return share * data.points[i] + (1 - share) * data.points[j]


def test_mixup_training_works(run_here, tmp_path):
    task = f"{ROOT}/examples/mixup.py:MixedSpirals"
    run_here("--task", task, "--num-points", 100, "--epochs", 1, "--save-dir", tmp_path)
    assert (tmp_path / "results.json").exists()


class Captions:
    def __init__(self, num: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.image = rng.normal(size=(num, 5)).astype(np.float32)
        self.text = (self.image[:, :3] + 0.1 * rng.normal(size=(num, 3))).astype(np.float32)

    def __len__(self) -> int:
        return len(self.image)

    def __getitems__(self, keys):
        return {"image": self.image[keys.index], "text": self.text[keys.index]}


class Gathering(Objective):
    coupled = True

    def forward(self, batch, phase="train"):
        image, text = self.model.image(batch["image"]), self.model.text(batch["text"])
        texts, own = lockstep.gather(F.normalize(text, dim=1))
        return {"loss": F.cross_entropy(F.normalize(image, dim=1) @ texts.T / 0.07, own, reduction="sum")}


def test_losses_that_couple_samples_learn_equally_in_micro_batches(monkeypatch, run_here, tmp_path):
    """Micro-batches do not change a joint loss, and its half for images equals a loss that gathers all rows."""
    joint = recipe("Losses that couple the samples of a step", Objective=Objective, F=F)["ImagesAndTexts"]
    one_sided = type("OneSided", (joint,), {"joint_loss": one_side})
    splits = {"train": Captions(24, 0), "val": Captions(8, 1), "test": Captions(8, 2)}
    learnt = {}
    for name, objective, size in (
        ("whole", joint, 8), ("parts", joint, 3), ("gathered", Gathering, 8), ("one-sided", one_sided, 3),
    ):  # fmt: skip
        members = {
            "splits": lambda self: splits,
            "build_objective": lambda self, own=objective: own(
                nn.ModuleDict({"image": nn.Linear(5, 4), "text": nn.Linear(3, 4)})
            ),
        }
        monkeypatch.setitem(TASKS, "recipe", type("Recipe", (Task,), members))
        size = ["--batch-size", size, "--global-batch-size", 8]
        argv = ["--task", "recipe", "--epochs", 2, *size, "--dtype", "float64", "--optimizer", "sgd"]
        run_here(*argv, "--save-dir", tmp_path / name)
        learnt[name] = load(tmp_path / name / "last.pth")["model"]
    assert difference(learnt["parts"], learnt["whole"]) < 1e-12
    assert difference(learnt["one-sided"], learnt["gathered"]) < 1e-12
    assert difference(learnt["one-sided"], learnt["whole"]) > 1e-6


def one_side(self, rows, phase="train"):
    logits = rows["image"] @ rows["text"].T / 0.07
    return {"loss": F.cross_entropy(logits, torch.arange(len(logits)), reduction="sum")}
