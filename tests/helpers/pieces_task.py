"""Task with everything that makes a model hard to shard.

The model has odd sizes that no world size divides, parameters with one element, tied embeddings, a block that is never
trained, buffers, two alternating phases that share blocks and, optionally, non-finite losses.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.weighted_task import record
from trainer import FlagGroup, Objective, Task, flag

NUM_WORDS, WIDTH, HIDDEN = 7, 5, 15
POISON = 3
"""Index of the sample whose loss is not finite."""


@dataclass
class PiecesFlags(FlagGroup):
    """Task: the next word"""

    num_train: int = flag(23, "training samples", at_least=1)
    num_blocks: int = flag(3, "blocks", at_least=1)
    hidden: int = flag(HIDDEN, "hidden units of a block", at_least=1)
    names_blocks: bool = flag(True, "name the blocks")
    poisoned: bool = flag(False, "the loss of one sample is not finite")
    ties: bool = flag(False, "two blocks share a parameter with what is around them")
    sparse: bool = flag(False, "gradients of the embedding are sparse")
    eager: bool = flag(False, "building the model needs the content of its tensors")
    scalar: bool = flag(False, "a parameter without a dimension")


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.gain = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x):
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    """Computes logits of the next word, (B, NUM_WORDS). mean: buffer that the start of each evaluation sets."""

    def __init__(self, config: PiecesFlags) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH, sparse=config.sparse)
        self.blocks = nn.ModuleList(Block(config.hidden) for _ in range(config.num_blocks))
        self.head = nn.Linear(WIDTH, NUM_WORDS)
        self.head.weight = self.embedding.weight
        self.second = nn.Linear(WIDTH, 2)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("mean", torch.zeros(()), persistent=False)
        if config.ties:
            self.outer = nn.Linear(WIDTH, config.hidden)
            self.outer.weight = self.blocks[0].up.weight
        if config.scalar:
            self.offset = nn.Parameter(torch.zeros(()))
        if config.eager and self.scale.sum().item() != WIDTH:
            raise ValueError
        self.blocks[-1].requires_grad_(False)

    def hidden(self, words):
        x = self.embedding(words) * self.scale
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, words):
        return self.head(self.hidden(words))


class PiecesObjective(Objective):
    poisoned = False

    def forward(self, batch, phase="main"):
        record(batch, self.training)
        hidden = self.model.hidden(batch["words"])
        if self.training and phase == "side":
            sides = self.model.second(hidden)
            return {"loss": (F.cross_entropy(sides, batch["next"] % 2, reduction="none") * batch["weight"]).sum()}
        logits = self.model.head(hidden)
        loss = F.cross_entropy(logits, batch["next"], reduction="none") * batch["weight"]
        if self.training and self.poisoned:
            loss = loss * torch.where(batch["index"] == POISON, torch.inf, 1.0)
        hits = (logits.argmax(1) == batch["next"]).sum()
        return {
            "loss": loss.sum(),
            "hits": hits,
            "mean": self.model.mean * len(loss),
            "samples": hits.new_full((), len(loss)),
        }

    def start_evaluation(self):
        words = torch.arange(NUM_WORDS, device=self.model.mean.device)
        self.model.mean.fill_(self.model(words).mean())


class WordPairs:
    def __init__(self, num: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.words = rng.integers(NUM_WORDS, size=num)
        self.next = (self.words * 3 + rng.integers(2, size=num)) % NUM_WORDS

    def __len__(self) -> int:
        return len(self.words)

    def __getitems__(self, keys):
        epoch = np.full(len(keys.index), keys.epoch)
        return {"words": self.words[keys.index], "next": self.next[keys.index], "epoch": epoch}


class Pieces(Task):
    Config = PiecesFlags
    monitor = ("val/loss", "min")
    phases = ("main", "side")
    turns = (2, 1)

    @cached_property
    def _splits(self):
        sizes = {"train": self.config.num_train, "val": 11, "test": 2}
        return {name: WordPairs(size, 7 + i) for i, (name, size) in enumerate(sizes.items())}

    def splits(self):
        return self._splits

    def collate(self, samples, keys):
        batch = super().collate(samples, keys)
        batch["weight"] = 1 + (batch["index"] % 3).float()
        return batch

    def build_objective(self):
        objective = PiecesObjective(Words(self.config))
        objective.poisoned = self.config.poisoned
        return objective

    def initialise(self, objective):
        objective.model.scale += 0.25

    def blocks(self, model):
        return list(model.blocks) if self.config.names_blocks else ()

    def param_groups(self, objective, phase):
        model = objective.model
        shared = [p for p in model.blocks.parameters() if p.requires_grad or phase == "main"]
        frozen = set(model.blocks[-1].parameters())
        own = {"main": [*model.embedding.parameters(), model.head.bias], "side": [*model.second.parameters()]}[phase]
        return [{"params": [*own, *(p for p in shared if p not in frozen)]}]

    def summarise(self, sums):
        means = {"loss": sums["loss"] / sums["weight"], "mean": sums["mean"] / sums["samples"]}
        return {name: float(value) for name, value in means.items()} | {"hits": float(sums["hits"])}

    def summarise_training(self, sums, phase):
        return {"loss": float(sums["loss"] / sums["weight"])}
