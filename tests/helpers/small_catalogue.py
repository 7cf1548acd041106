"""Small data set with a knowledge graph, in the layout of KGAT, and a KGAT task that kills its process."""

import os
import signal
from pathlib import Path

import numpy as np

from tasks.kgat import KgatTask

NUM_USERS, NUM_ITEMS, NUM_ENTITIES, NUM_RELATIONS = 23, 17, 30, 3


def write_catalogue(folder: Path) -> Path:
    """Writes three to eight training items and one or two test items per user; all items are in the graph."""
    random = np.random.default_rng(3)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [random.permutation(NUM_ITEMS)[: random.integers(4, 10)].tolist() for _ in range(NUM_USERS)]
    for name, part in {"train.txt": slice(2, None), "test.txt": slice(0, 2)}.items():
        lines = [" ".join(map(str, [user, *items[part]])) for user, items in enumerate(rows)]
        (folder / name).write_text("\n".join(lines) + "\n")
    triples = {(item, 0, NUM_ITEMS + item % 5) for item in range(NUM_ITEMS)} | {(1, 1, 25), (25, 1, 1), (0, 1, 17)}
    triples |= {tuple(random.integers(0, [NUM_ENTITIES, NUM_RELATIONS, NUM_ENTITIES]).tolist()) for _ in range(25)}
    text = "".join(f"{head} {relation} {tail}\n" for head, relation, tail in sorted(triples))
    (folder / "kg_final.txt").write_text(text)
    return folder


class KilledInRefresh(KgatTask):
    """Kills the process at the start of the second epoch, the first time that a data set is used."""

    def on_epoch_start(self, objective, epoch, progress):
        super().on_epoch_start(objective, epoch, progress)
        mark = self.config.data_dir / "killed"
        if epoch == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
