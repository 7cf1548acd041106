"""Task whose model size depends on the data: it predicts the next letter of a text file."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch.nn.functional as F
from torch import nn

from trainer import FlagGroup, Objective, Task, flag


@dataclass
class LexiconFlags(FlagGroup):
    """Task: letters"""

    text: Path = flag(Path("text.txt"), "what to learn from")


class Pairs:
    def __init__(self, text: str, letters: str) -> None:
        self.numbers = np.array([letters.index(letter) for letter in text])

    def __len__(self):
        return len(self.numbers) - 1

    def __getitems__(self, keys):
        return {"letter": self.numbers[keys.index], "next": self.numbers[keys.index + 1]}


class LexiconObjective(Objective):
    def forward(self, batch, phase="train"):
        return {"loss": F.cross_entropy(self.model(batch["letter"]), batch["next"], reduction="sum")}


class Lexicon(Task):
    Config = LexiconFlags
    monitor = ("val/loss", "min")

    @cached_property
    def letters(self) -> str:
        if self.data_facts is not None:
            return self.data_facts["letters"]
        return "".join(sorted(Counter(self.config.text.read_text())))

    def splits(self):
        pairs = Pairs(self.config.text.read_text(), self.letters)
        return {"train": pairs, "val": pairs, "test": pairs}

    def describe_data(self):
        return {"letters": self.letters}

    def build_objective(self):
        return LexiconObjective(nn.Embedding(len(self.letters), len(self.letters)))

    def summarise(self, sums):
        return {"loss": float(sums["loss"] / sums["weight"])}

    def new_data(self, path):
        return Pairs(path.read_text() + path.read_text()[0], self.letters)

    def predictions(self, objective, batch):
        return {"next": [self.letters[i] for i in objective.model(batch["letter"]).argmax(1).tolist()]}
