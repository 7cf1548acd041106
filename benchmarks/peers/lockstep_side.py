"""Task for Lockstep: `python main.py --task benchmarks/peers/lockstep_side.py:Tagging`."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.tagging import IGNORED, Sequences, Settings, Tagger, loss_of, new_model
from benchmarks.peers.watch import Watch
from trainer import Batch, FlagGroup, Objective, SampleKeys, Sums, Task, flag


@dataclass
class TaggingFlags(FlagGroup):
    """Task: tags of tokens"""

    num_train: int = flag(203, "training sequences", at_least=1)
    num_eval: int = flag(101, "sequences of the evaluation", at_least=1)
    width: int = flag(32, "of the embedding", at_least=1)
    dropout: float = flag(0.0, "before the last layer", at_least=0, below=1)


class Keyed(Sequences):
    def __getitems__(self, keys: SampleKeys) -> Batch:
        return {name: part for name, part in super().__getitems__(keys.index).items() if name != "index"}


class TaggingObjective(Objective):
    coupled = True  # skips a check, because `Watch` would record its forward passes

    def __init__(self, model: Tagger, watch: Watch) -> None:
        super().__init__(model)
        self.watch = watch

    def forward(self, batch: Batch, phase: str = "train") -> Sums:
        if self.training:
            self.watch.seen(batch["index"], self.model, batch["weight"])
        scores, tags = self.model(batch["tokens"]), batch["tags"]
        loss = loss_of(scores, tags, "sum")
        if self.training:
            return {"loss": loss}
        return {"loss": loss, "hits": (scores.argmax(2) == tags).sum(), "num_samples": loss.new_tensor(len(tags))}


class Tagging(Task):
    Config = TaggingFlags
    monitor = ("val/loss", "min")

    def splits(self) -> Mapping[str, Keyed]:
        return self._splits

    @cached_property
    def _splits(self) -> Mapping[str, Keyed]:
        return {"train": Keyed(self.config.num_train, seed=1), "test": Keyed(self.config.num_eval, seed=2)}

    def collate(self, samples: Batch, keys: SampleKeys) -> Batch:
        batch = super().collate(samples, keys)
        return {**batch, "weight": (batch["tags"] != IGNORED).sum(1).float()}

    def build_objective(self) -> TaggingObjective:
        settings = Settings(**vars(self.config), dtype="float32")  # the trainer casts the model to --dtype
        return TaggingObjective(new_model(settings), Watch(num_uncounted=1))  # the dry run is one forward pass

    def summarise(self, sums: dict) -> dict[str, float]:
        found = {"loss": float(sums["loss"] / sums["weight"])}
        if "hits" in sums:
            found |= {"accuracy": float(sums["hits"] / sums["weight"]), "num_samples": float(sums["num_samples"])}
        return found
