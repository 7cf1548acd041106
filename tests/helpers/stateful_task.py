"""Tasks whose models keep state between forwards, in persistent or non-persistent buffers, or in plain attributes.

`--task FILE:KINDTask` trains a model with a layer of one of `KINDS` in its only block.
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations

from tests.helpers.shaped_task import NUM_CLASSES, NUM_FEATURES, Shaped, ShapedObjective

WIDTH = 5


class Standardised(nn.Module):
    """Standardises by mean and deviation of the first batch; a flag marks that they are set."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("std", torch.ones(WIDTH))
        self.is_set = False

    def forward(self, x):
        if self.training and not self.is_set:
            with torch.no_grad():
                self.mean.copy_(x.mean(0))
                self.std.copy_(x.std(0, correction=0))
            self.is_set = True
        return (x - self.mean) / self.std


class Scaled(nn.Module):
    """Divides by a running scale; backward needs the value that forward computed."""

    def __init__(self, persistent=True):
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH), persistent)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.scale.lerp_(x.abs().mean(0) * 4, 0.5)
        return x / self.scale


class ScaledLocally(Scaled):
    def __init__(self):
        super().__init__(persistent=False)


class LateScaled(Scaled):
    """Changes its scale only from the fourth call on."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) if self.calls > 3 else x / self.scale


class Quantised(nn.Module):
    """Quantises to the nearest of four codes, which move towards their inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH))

    def forward(self, x):
        nearest = torch.cdist(x, self.codes).argmin(1)
        found = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                for code in range(4):
                    if bool((nearest == code).any()):
                        self.codes[code] = self.codes[code].lerp(x[nearest == code].mean(0), 0.3)
        return x + (x * found).tanh()


class Queued(nn.Module):
    """Compares inputs with a queue of earlier keys, like MoCo."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.linspace(-1, 1, 6 * WIDTH).view(6, WIDTH))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        near = x @ self.queue.clone().t()
        if self.training:
            with torch.no_grad():
                for row in x:
                    self.queue[int(self.place)] = row
                    self.place.add_(1).remainder_(6)
        return x + near.softmax(1) @ torch.ones(6, WIDTH).to(x)


class Counting(nn.Module):
    """Counts forwards in plain attributes of several types."""

    def __init__(self):
        super().__init__()
        self.calls, self.last, self.names = 0, None, "none"
        self.mean = torch.zeros(WIDTH)
        self.history, self.by_size, self.pair = deque(maxlen=3), {}, ([0], "pair")

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.names = f"call {self.calls}"
            self.last = x.detach().mean(0)
            self.mean = self.mean.to(x).lerp(self.last, 0.5)
            self.history.append(self.last)
            self.by_size.setdefault(len(x), []).append(self.calls)
            self.pair[0][0] += 1
        return x + self.mean.to(x) / (1 + self.calls)


class Table(nn.Module):
    """Table that grows as forwards need it: two rows, then one more row in each call."""

    def __init__(self, persistent=False, calls=0):
        super().__init__()
        self.register_buffer("table", torch.ones(1, WIDTH), persistent)
        self.calls = calls

    def forward(self, x):
        if self.training:
            self.calls += 1
            if self.calls > 0:
                num = 1 + self.calls + (dist.get_rank() if dist.is_initialized() else 0)
                self.table = torch.arange(1.0, 1 + num * WIDTH).view(num, WIDTH).sin().to(x)
        return x * (1 + self.table[:1])


class PersistentTable(Table):
    def __init__(self):
        super().__init__(persistent=True)


class LatePersistentTable(Table):
    def __init__(self):
        super().__init__(persistent=True, calls=-3)


class EvaluatedTable(nn.Module):
    """Table that grows in evaluation, only on rank 1."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(1, WIDTH))

    def forward(self, x):
        if not self.training and dist.is_initialized():
            self.table = torch.ones(1 + dist.get_rank(), WIDTH).to(x)
        return x * self.table[:1]


class Masked(nn.Module):
    """Applies a mask that the first forward creates."""

    def forward(self, x):
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.arange(WIDTH) > 1, persistent=False)
        return x * self.mask


class Rotary(nn.Module):
    """Recomputes its frequencies for inputs longer than all previous inputs, like inv_freq in transformers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(WIDTH), persistent=False)
        self.longest = 1.5

    def forward(self, x):
        length = float(x.detach().abs().max())
        if length > self.longest:
            self.longest = length
            self.register_buffer("inv_freq", torch.full((WIDTH,), length).to(x), persistent=False)
        return x * self.inv_freq


class LargestSeen(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return x / (1 + self.largest)


def normed(momentum):
    return nn.BatchNorm1d(WIDTH, momentum=momentum)


KINDS = {
    "Standardised": Standardised,
    "Scaled": Scaled,
    "ScaledLocally": ScaledLocally,
    "LateScaled": LateScaled,
    "Quantised": Quantised,
    "Queued": Queued,
    "Counting": Counting,
    "Table": Table,
    "PersistentTable": PersistentTable,
    "LatePersistentTable": LatePersistentTable,
    "EvaluatedTable": EvaluatedTable,
    "Masked": Masked,
    "Rotary": Rotary,
    "LargestSeen": LargestSeen,
    "SpectralNorm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "OldSpectralNorm": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "WeightNorm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "OldWeightNorm": lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "BatchNorm": lambda: normed(0.1),
    "MeanBatchNorm": lambda: normed(None),
}


def build(kind):
    block = nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), KINDS[kind](), nn.Tanh())
    return nn.Sequential(block, nn.Linear(WIDTH, NUM_CLASSES))


class Stateful(Shaped):
    kind = "Scaled"

    def build(self):
        return build(self.kind)

    def blocks(self, model):
        return [model[0]]


class CountingObjective(ShapedObjective):
    """Counts forwards in an attribute, and copies the count to a buffer."""

    def __init__(self, model):
        super().__init__(model)
        self.calls = 0
        model.register_buffer("calls_of_objective", torch.zeros(()))

    def forward(self, batch, phase="train"):
        if self.training:
            self.calls += 1
            self.model.calls_of_objective.fill_(self.calls)
        return super().forward(batch, phase)


class Counted(Stateful):
    def build_objective(self):
        return CountingObjective(build("Scaled"))


for _kind in KINDS:
    globals()[f"{_kind}Task"] = type(f"{_kind}Task", (Stateful,), {"kind": _kind, "__module__": __name__})
