"""Tasks whose forwards have effects that the replay of a CUDA graph repeats wrongly or not at all."""

import random

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.shaped_task import NUM_CLASSES, NUM_FEATURES, Shaped, ShapedObjective


class Network(nn.Module):
    """Network in which some forwards skip layers, and no forward uses the layer `unused`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(NUM_FEATURES, 8), nn.Linear(8, NUM_CLASSES)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.dropout(self.norm(torch.tanh(self.first(x)))))


class Plain(Shaped):
    """Task that a CUDA graph can capture without problems."""

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


class HookedLater(Shaped):
    def build(self):
        return Network()

    def on_epoch_start(self, objective, epoch, progress):
        if epoch == 1:
            objective.model.first.register_forward_hook(lambda module, args, output: output * 2)


CALLS = [0]


class CountingElsewhere(Network):
    """Uses a counter outside of all modules; only gradients show that a CUDA graph froze its value."""

    def forward(self, x):
        CALLS[0] += self.training
        return super().forward(x) * (1 + CALLS[0] % 7 / 10)


FACTOR = [1.0]


class ScaledElsewhere(Network):
    def forward(self, x):
        return super().forward(x) * FACTOR[0]


class ChangingElsewhere(Shaped):
    """Task whose later epochs change a number outside of all modules."""

    def build(self):
        return ScaledElsewhere()

    def on_epoch_start(self, objective, epoch, progress):
        FACTOR[0] = 1.0 if epoch < 4 else 1.5


KEPT: dict[int, torch.Tensor] = {}


class KeepingElsewhere(Network):
    """Keeps an activation of each forward outside of all modules."""

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        before = KEPT.get(len(x))
        KEPT[len(x)] = hidden.detach()
        return self.last(hidden if before is None or before.device != x.device else hidden + before)


class FromHost(Network):
    def forward(self, x):
        return super().forward(x) + torch.tensor([0.5, -0.5]).to(x.device, non_blocking=True)


class Pinning(Network):
    """Uploads a constant from memory that each forward pins."""

    def forward(self, x):
        shift = torch.tensor([0.5, -0.5]).pin_memory() if x.is_cuda else torch.tensor([0.5, -0.5])
        return super().forward(x) + shift.to(x.device, non_blocking=True)


def task_of(network: type[nn.Module]) -> type[Shaped]:
    return type(f"{network.__name__}Task", (Shaped,), {"build": lambda self: network(), "Config": Shaped.Config})


WaitingTask, DrawingTask, DrawingByTorchTask = task_of(Waiting), task_of(Drawing), task_of(DrawingByTorch)
CountingTask, HookedTask, FromHostTask = task_of(Counting), task_of(Hooked), task_of(FromHost)
CountingElsewhereTask, PinningTask = task_of(CountingElsewhere), task_of(Pinning)


class ChangingObjective(ShapedObjective):
    """Objective that modifies its batch: removes entries, writes into tensors, and requires a gradient of a tensor."""

    coupled = True  # it returns weights among its sums

    def forward(self, batch, phase="train"):
        x = batch["x"].mul_(2).requires_grad_()
        batch["index"] = batch.pop("y")
        logits = self.model.last(torch.tanh(self.model.first(x)))
        loss = F.cross_entropy(logits, batch["index"], reduction="sum").double()
        if not self.training:
            return {"loss": loss}
        (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        sums = {
            "weights": self.model.last.weight,
            "none": x[:0].sum(1),
            "any": (x > 0).any(),
            "same": x.sum().expand(3),
        }
        return {"loss": loss + slope.square().sum() / 3, **sums}


class Changing(Shaped):
    def build_objective(self):
        return ChangingObjective(Network())

    def summarise(self, sums):
        return {"loss": float(sums["loss"] / sums["weight"])}


class ByEpoch(Network):
    def __init__(self) -> None:
        super().__init__()
        self.factors = {"all": [1.0]}

    def forward(self, x):
        return super().forward(x) * self.factors["all"][0]


class ChangingByEpoch(Shaped):
    """Task that changes a buffer, the model and optimizer settings in every epoch."""

    def build(self):
        return ByEpoch()

    def build_optimizers(self, phase, groups, lr):
        self.optimizer = torch.optim.AdamW(groups, lr=lr, fused=True)
        return [self.optimizer]

    def on_epoch_start(self, objective, epoch, progress):
        objective.model.norm.running_mean = torch.full_like(objective.model.norm.running_mean, epoch / 3)
        objective.model.factors["all"][0] = 1 + epoch / 7
        for group in self.optimizer.param_groups:
            group |= {"weight_decay": epoch / 3, "betas": (0.5 + epoch / 10, 0.9)}


class Keeping(Network):
    """Keeps an activation, with its autograd graph, for the next forward."""

    kept = None

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        before, self.kept = self.kept, hidden
        return self.last(hidden if before is None or before.shape != x.shape else hidden + before.detach())


class Refusing(Network):
    def forward(self, x):
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError("nobody looks on")
        return super().forward(x)


class AnnealedObjective(ShapedObjective):
    factor = 1.0

    def forward(self, batch, phase="train"):
        return {"loss": F.cross_entropy(self.model(batch["x"]) * self.factor, batch["y"], reduction="sum")}

    def after_step(self, phase):
        self.factor *= 0.9


class Annealed(Shaped):
    def build_objective(self):
        return AnnealedObjective(Network())


class Rows(Network):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(NUM_CLASSES, NUM_CLASSES))

    def forward(self, x):
        return super().forward(x) + F.embedding((x[:, 0] > 0).long(), self.rows, sparse=True)


class OwnRows(Shaped):
    """Task with sparse gradients that come from a functional call instead of an embedding module."""

    def build(self):
        return Rows()

    def build_optimizers(self, phase, groups, lr):
        params = [p for group in groups for p in group["params"]]
        rows = [p for p in params if p.shape == (NUM_CLASSES, NUM_CLASSES)]
        others = [p for p in params if p.shape != (NUM_CLASSES, NUM_CLASSES)]
        return [torch.optim.SparseAdam(rows, lr=lr), torch.optim.AdamW(others, lr=lr, fused=True)]


class OwnOptimizer(Plain):
    """Task whose optimizer is not captured in a CUDA graph, unlike forward and backward."""

    def build_optimizers(self, phase, groups, lr):
        return [torch.optim.RMSprop(groups, lr=lr)]


class AfterStep(Plain):
    def build_objective(self):
        return ClampedObjective(Network())


class ClampedObjective(ShapedObjective):
    def after_step(self, phase):
        weight = self.model.last.weight
        weight.add_(torch.randn_like(weight), alpha=0.01).clamp_(-0.2, 0.2)


KeepingTask, RefusingTask = task_of(Keeping), task_of(Refusing)
KeepingElsewhereTask = task_of(KeepingElsewhere)


SHIFTS = {}


class Caching(Network):
    """Caches a constant outside of all modules, and keeps only the latest value."""

    def forward(self, x):
        if len(x) not in SHIFTS:
            SHIFTS.clear()
            SHIFTS[len(x)] = torch.linspace(0, len(x) / 10, NUM_CLASSES, device=x.device)
        return super().forward(x) + SHIFTS[len(x)]


CachingTask = task_of(Caching)
