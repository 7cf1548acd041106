"""Tasks for tests whose forwards do what a recording of them would not do again, or not at all."""

import random

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.shaped_task import NUM_CLASSES, NUM_FEATURES, Shaped, ShapedObjective


class Network(nn.Module):
    """Some of its layers take no part: `unused` in no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(NUM_FEATURES, 8), nn.Linear(8, NUM_CLASSES)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.dropout(self.norm(torch.tanh(self.first(x)))))


class Plain(Shaped):
    """Nothing stands in the way of recording it."""

    def build(self):
        return Network()


class Waiting(Network):
    def forward(self, x):
        return super().forward(x) if x.sum().item() < 1e9 else x


class Drawing(Network):
    def forward(self, x):
        return super().forward(x) * (2 if random.random() < 0.5 else 1)


class DrawingByTorch(Network):
    def forward(self, x):
        return super().forward(x) * (2 if torch.rand(()) < 0.5 else 1)


class Counting(Network):
    calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x) / self.calls


class Hooked(Network):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda module, args, output: output * 2)


CALLS = [0]


class CountingElsewhere(Network):
    """Its number is in no module, so only the gradients show that a recording has frozen it."""

    def forward(self, x):
        CALLS[0] += self.training
        return super().forward(x) * (1 + CALLS[0] % 7 / 10)


class FromHost(Network):
    def forward(self, x):
        return super().forward(x) + torch.tensor([0.5, -0.5]).to(x.device, non_blocking=True)


def task_of(network: type[nn.Module]) -> type[Shaped]:
    return type(f"{network.__name__}Task", (Shaped,), {"build": lambda self: network(), "Config": Shaped.Config})


WaitingTask, DrawingTask, DrawingByTorchTask = task_of(Waiting), task_of(Drawing), task_of(DrawingByTorch)
CountingTask, HookedTask, FromHostTask = task_of(Counting), task_of(Hooked), task_of(FromHost)
CountingElsewhereTask = task_of(CountingElsewhere)


class SkippingObjective(ShapedObjective):
    """Samples of one class alone give a gradient to a layer."""

    def forward(self, batch, phase="train"):
        x = torch.tanh(self.model.first(batch["x"]))
        if batch["index"].device.type != "cuda" or len(x) > 4:
            x = x + self.model.norm(x)
        return {"loss": F.cross_entropy(self.model.last(x), batch["y"], reduction="sum")}


class Skipping(Shaped):
    def build_objective(self):
        return SkippingObjective(Network())


class OwnOptimizer(Plain):
    """Its optimizer is recorded by nobody; forward and backward are."""

    def build_optimizers(self, phase, groups, lr):
        return [torch.optim.RMSprop(groups, lr=lr)]


class AfterStep(Plain):
    def build_objective(self):
        return ClampedObjective(Network())


class ClampedObjective(ShapedObjective):
    def after_step(self, phase):
        self.model.last.weight.clamp_(-0.2, 0.2)
