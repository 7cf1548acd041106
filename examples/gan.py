"""Generative adversarial network that learns to draw points from eight spots on a ring.

    python main.py --task examples/gan.py:Gan --num-threads 1

Discriminator and generator train in turns. Every sample is a function of (seed, epoch, index), so each epoch has new
data, which are the same on any number of devices. The discriminator's inputs are blurred by noise, which decreases to
zero during training (Sønderby et al., 2017).
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Batch, FlagGroup, Objective, ParamGroup, SampleKeys, Sums, Task, flag, normal, random_bits

NUM_SPOTS, SPREAD, NUM_LATENT = 8, 0.05, 4
ANGLES = np.arange(NUM_SPOTS) * 2 * np.pi / NUM_SPOTS
SPOTS = np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1).astype(np.float32)


@dataclass
class GanFlags(FlagGroup):
    """Task: a GAN on a ring of spots"""

    num_points: int = flag(50_000, "number of training points per epoch", at_least=1)
    blur: float = flag(0.2, "standard deviation of the blur at the start; decreases to 0 at the end", at_least=0)


class Points:
    """Data set of real points, each with noise for its blur and a latent vector for a generated point."""

    def __init__(self, num_points: int, seed: int, blur: float) -> None:
        self.num_points, self.seed, self.blur = num_points, seed, blur

    def __len__(self) -> int:
        return self.num_points

    def __getitems__(self, keys: SampleKeys) -> dict[str, np.ndarray]:
        spot = random_bits(self.seed, keys.epoch, keys.index, 1, stream=0)[:, 0] % NUM_SPOTS
        draws = normal(self.seed, keys.epoch, keys.index, (NUM_LATENT + 6,), stream=1)
        scatter, blur, latent = draws[:, :2], draws[:, 2:6], draws[:, 6:]
        blur *= self.blur * (1 - keys.progress)
        return {"real": SPOTS[spot] + SPREAD * scatter, "blur": blur, "latent": latent}


class Halves(nn.Module):
    """Generator, which maps noise to points, and discriminator, which gives real points high scores."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.generator = multilayer(NUM_LATENT, width, 2)
        self.discriminator = multilayer(2, width, 1)


def multilayer(num_inputs: int, width: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(num_inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, num_outputs),
    )


class GanObjective(Objective):
    model: Halves

    def forward(self, batch: Batch, phase: str = "generator") -> Sums:
        drawn = self.model.generator(batch["latent"])
        if not self.training:
            distance, nearest = torch.cdist(drawn, torch.from_numpy(SPOTS).to(drawn)).min(dim=1)
            is_near = distance < 3 * SPREAD
            return {"near": is_near.sum(), "per_spot": F.one_hot(nearest[is_near], NUM_SPOTS).sum(dim=0)}
        drawn_score = self.model.discriminator(drawn + batch["blur"][:, 2:])
        if phase == "generator":
            return {"loss": F.softplus(-drawn_score).sum()}
        real_score = self.model.discriminator(batch["real"] + batch["blur"][:, :2])
        return {"loss": (F.softplus(-real_score) + F.softplus(drawn_score)).sum()}


class Gan(Task):
    Config = GanFlags
    monitor = ("val/near", "max")
    phases, turns = ("discriminator", "generator"), (1, 1)
    defaults = {"epochs": 15, "batch_size": 128, "lr": 3e-3, "betas": (0.5, 0.99), "weight_decay": 0.0}

    def splits(self) -> dict[str, Points]:
        sizes = {"train": self.config.num_points, "val": 2000, "test": 2000}
        return {name: Points(size, self.seed + i, self.config.blur) for i, (name, size) in enumerate(sizes.items())}

    def build_objective(self) -> GanObjective:
        return GanObjective(Halves())

    def param_groups(self, objective: Objective, phase: str) -> list[ParamGroup]:
        return [{"params": getattr(objective.model, phase).parameters()}]

    def summarise(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Returns the share of points near a spot, and the number of spots with more than 1/32 of all points nearby."""
        found = sums["per_spot"] > sums["weight"] / NUM_SPOTS / 4
        return {"near": float(sums["near"] / sums["weight"]), "spots": float(found.sum())}
