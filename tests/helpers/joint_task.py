"""Tasks whose losses couple all samples of a step: SimCLR, CLIP, batch-hard triplets and VICReg."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import trainer
from trainer import FlagGroup, Objective, PerSample, Task, flag

NUM_FEATURES, WIDTH, NUM_OUTPUTS, NUM_CLASSES = 6, 8, 4, 3


@dataclass
class JointFlags(FlagGroup):
    """Task: pairs of points"""

    num_train: int = flag(29, "training samples", at_least=1)
    dropout: float = flag(0.0, "dropout", at_least=0, below=1)
    norm: bool = flag(False, "with a batch norm")


class Pairs:
    """Data set with two views of each point, and the class of the point."""

    def __init__(self, num: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        points = rng.normal(size=(num, 1, NUM_FEATURES))
        self.views = (points + 0.3 * rng.normal(size=(num, 2, NUM_FEATURES))).astype(np.float32)
        self.label = rng.integers(NUM_CLASSES, size=num)

    def __len__(self) -> int:
        return len(self.label)

    def __getitems__(self, keys):
        views = self.views[keys.index]
        return {"a": views[:, 0], "b": views[:, 1], "label": self.label[keys.index]}


class Encoder(nn.Module):
    def __init__(self, config: JointFlags) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if config.norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.last = nn.Linear(WIDTH, NUM_OUTPUTS)

    def forward(self, x):
        return self.last(self.dropout(torch.tanh(self.norm(self.first(x)))))


class TwoTowers(nn.Module):
    def __init__(self, config: JointFlags) -> None:
        super().__init__()
        self.a, self.b = Encoder(config), Encoder(config)
        self.scale = nn.Parameter(torch.ones(()))


def nt_xent(x, partner_of, own, everything, own_in_all):
    """Returns the sum over rows x of the cross-entropy of each row's partner among all rows except the row itself."""
    logits = (x @ everything.T / 0.5).index_put((own, own_in_all), x.new_full((), -1e9))
    return F.cross_entropy(logits, partner_of, reduction="sum")


def simclr(a, b, all_a, all_b, own):
    """Returns half the loss summed over anchors in a and b. own: indices of a and b in all_a and all_b."""
    everything, n, first = torch.cat([all_a, all_b]), len(all_a), torch.arange(len(a), device=a.device)
    return (nt_xent(a, own + n, first, everything, own) + nt_xent(b, own, first, everything, own + n)) / 2


class SimClr(Objective):
    def outputs(self, batch, phase="train"):
        return {name: F.normalize(self.model(batch[name]), dim=1) for name in ("a", "b")}

    def joint_loss(self, rows, phase="train"):
        a, b = rows["a"], rows["b"]
        own = torch.arange(len(a), device=a.device)
        sums = {"loss": simclr(a, b, a, b, own), "distance": (a - b).square().sum()}
        return sums if self.training else {**sums, "row": PerSample(a)}


class Clip(Objective):
    def outputs(self, batch, phase="train"):
        return {name: F.normalize(getattr(self.model, name)(batch[name]), dim=1) for name in ("a", "b")}

    def joint_loss(self, rows, phase="train"):
        logits = self.model.scale.exp() * rows["a"] @ rows["b"].T
        target = torch.arange(len(logits), device=logits.device)
        both = [F.cross_entropy(each, target, reduction="sum") for each in (logits, logits.T)]
        return {"loss": sum(both) / 2, "correct": (logits.argmax(1) == target).sum()}


class ClipOfABatch(Objective):
    coupled = True

    def forward(self, batch, phase="train"):
        return Clip.joint_loss(self, Clip.outputs(self, batch))


class Triplets(Objective):
    def outputs(self, batch, phase="train"):
        return {"e": self.model(batch["a"]), "label": batch["label"]}

    def joint_loss(self, rows, phase="train"):
        e, label = rows["e"], rows["label"]
        distance = (e[:, None] - e[None]).square().sum(2)
        same = label[:, None] == label[None]
        hardest = distance.masked_fill(~same, 0).amax(1) - distance.masked_fill(same, 1e4).amin(1)
        return {"loss": F.softplus(hardest).sum()}


class VicReg(Objective):
    def outputs(self, batch, phase="train"):
        return {name: self.model(batch[name]) for name in ("a", "b")}

    def joint_loss(self, rows, phase="train"):
        a, b = rows["a"], rows["b"]
        loss = (a - b).square().mean()
        for x in (a, b):
            centred = x - x.mean(0)
            covariance = centred.T @ centred / (len(x) - 1)
            loss = loss + F.relu(1 - (x.var(0) + 1e-4).sqrt()).mean()
            loss = loss + (covariance.square().sum() - covariance.diagonal().square().sum()) / NUM_OUTPUTS
        return {"loss": loss * len(a)}


class Centring(Triplets):
    """Normalises the step's rows and subtracts their running mean, which the joint loss updates, as DINO does."""

    def joint_loss(self, rows, phase="train"):
        e, centre = self.model.of_rows(rows["e"]), self.model.centre
        if self.training:
            centre.lerp_(rows["e"].detach().mean(0), 0.1)
        return {"loss": F.softplus(e - centre).sum()}


class Gathering(Objective):
    """Computes SimCLR in `forward`, with rows gathered from all ranks."""

    coupled = True

    def forward(self, batch, phase="train"):
        a, b = (F.normalize(self.model(batch[name]), dim=1) for name in ("a", "b"))
        (all_a, own), (all_b, _) = trainer.gather(a), trainer.gather(b)
        return {"loss": simclr(a, b, all_a, all_b, own)}


class OwnGathering(Gathering):
    """Also gathers rows by its own collectives, unpadded or padded to equal numbers, and ignores the result."""

    pads = False

    def forward(self, batch, phase="train"):
        sums = Gathering.forward(self, batch, phase)
        if self.training and torch.distributed.is_initialized():
            own = batch["a"][batch["weight"] > 0] if self.pads else batch["a"]
            num_rows = torch.tensor([len(own)])
            if self.pads:
                torch.distributed.all_reduce(num_rows, torch.distributed.ReduceOp.MAX)
            own = F.pad(own, (0, 0, 0, int(num_rows) - len(own)))
            torch.distributed.all_gather([torch.empty_like(own) for _ in range(2)], own)
        return sums


class Joint(Task):
    Config = JointFlags
    objective: type[Objective] = SimClr
    defaults = {"weight_decay": 0.0, "optimizer": "sgd", "momentum": 0.9, "max_grad_norm": 0.0}

    @cached_property
    def _data(self):
        sizes = {"train": self.config.num_train, "val": 8, "test": 8}
        return {name: Pairs(size, seed) for seed, (name, size) in enumerate(sizes.items())}

    def splits(self):
        return self._data

    def build_objective(self):
        return self.objective((TwoTowers if "Clip" in self.objective.__name__ else Encoder)(self.config))


class Clips(Joint):
    objective = Clip


class ClipsOfABatch(Joint):
    objective = ClipOfABatch


class OfTriplets(Joint):
    objective = Triplets


class VicRegs(Joint):
    objective = VicReg


class Centred(Joint):
    def build_objective(self):
        model = Encoder(self.config)
        model.register_buffer("centre", torch.zeros(NUM_OUTPUTS))
        model.of_rows = nn.BatchNorm1d(NUM_OUTPUTS)
        return Centring(model)


class Gathers(Joint):
    objective = Gathering


class GathersItself(Joint):
    objective = OwnGathering


class GathersPadded(Joint):
    objective = type("Padded", (OwnGathering,), {"pads": True})


class OfTheBatch(SimClr):
    def outputs(self, batch, phase="train"):
        rows = super().outputs(batch, phase)
        return {**rows, "padded": rows["a"].new_zeros(len(batch["index"]), int(batch["index"].max()))}


class Unlike(Joint):
    """Task whose rows have a length that depends on the batch."""

    objective = OfTheBatch


class OnlyRows(Objective):
    outputs = SimClr.outputs


class NoLoss(Joint):
    objective = OnlyRows


class Summed(Triplets):
    def outputs(self, batch, phase="train"):
        return {"e": self.model(batch["a"]).sum()}


class NoRows(Joint):
    objective = Summed
