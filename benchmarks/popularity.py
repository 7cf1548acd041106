"""Scores of ranking every user's items by popularity alone: what a recommender has to beat.

    python benchmarks/popularity.py
    python benchmarks/popularity.py --data-dir ml-1m.zip

An item's score is how often it occurs in training. The flags are those of `python main.py --task seqrec`.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.interactions.sequences import TrainSequences
from tasks.seqrec import SeqrecObjective, SeqrecTask
from trainer.commands.build import build_task
from trainer.commands.parse import parse
from trainer.config import refuse
from trainer.loading.batches import BatchLoader
from trainer.loading.order import SampleKeys, evaluation_keys

USERS_PER_BATCH = 256
WHOLE_HISTORIES = ["--maxlen", "1000000"]


class Popularity(nn.Module):
    """Takes what the models take, and returns the same scores for every history."""

    def __init__(self, train: TrainSequences, num_items: int) -> None:
        super().__init__()
        batch = train.__getitems__(SampleKeys(np.arange(len(train)), epoch=0))
        trained_on = np.concatenate([batch["items"][:, 0], batch["targets"].ravel()])
        counts = np.bincount(trained_on, minlength=num_items + 1).astype(np.float64)
        counts[0] = -np.inf
        self.scores = torch.from_numpy(counts)

    def forward(self, items: Tensor, length: Tensor, times: Tensor | None) -> Tensor:
        return self.scores.repeat(len(items), 1)


def evaluate(task: SeqrecTask, split: str) -> dict[str, float]:
    train = task.splits()["train"]
    assert isinstance(train, TrainSequences)
    objective = SeqrecObjective(Popularity(train, task.num_items), task.config).eval()
    dataset = task.splits()[split]
    keys = evaluation_keys(len(dataset), (0, 1), USERS_PER_BATCH)
    parts = [objective(batch) for batch in BatchLoader(dataset, task.collate)(keys)]
    sums = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
    return task.summarise(sums | {"weight": torch.tensor(float(len(dataset)))})


def main() -> None:
    flags, problems = parse(["--task", "seqrec", *sys.argv[1:], *WHOLE_HISTORIES], several_devices=False)
    refuse(problems)
    task = build_task(flags)
    assert isinstance(task, SeqrecTask)
    scores = {f"{split}/{name}": value for split in ("val", "test") for name, value in evaluate(task, split).items()}
    print("\n".join(f"{name:22} {value:.4f}" for name, value in scores.items()))
    print(json.dumps(scores))


if __name__ == "__main__":
    main()
