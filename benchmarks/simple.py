"""Scores simple recommenders, as baselines, on generated data and all recommendation data sets in LOCKSTEP_DATA.

    LOCKSTEP_DATA=data python benchmarks/simple.py

Small data sets come first. The files of --task seqrec are scored twice: unchanged, and with the interactions of each
second shuffled. The last printed line is a JSON object.

    python benchmarks/simple.py --runs checkpoints/ml-1m checkpoints/music

compares the best weights of finished runs with the best simple model, user by user. The script then prints the mean
difference of the monitored validation metric, and two standard errors of the difference.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.ties import write_shuffled
from tasks.kgat import KgatFlags, KgatTask
from tasks.recommender import RecommenderTask
from tasks.seqrec import SeqrecFlags, SeqrecTask
from trainer.api import load
from trainer.config import group_from_values
from trainer.loading.order import SampleKeys
from trainer.task import Objective

METRICS = {"seqrec": ("hr@10", "ndcg@10"), "kgat": ("recall@20", "ndcg@20")}
MUSIC = "kgcn/music"
SEQUENCES = {
    "ml-100k": ("ml-100k/ml-100k.zip", None),
    "ml-1m, 2,000 users": ("ml-1m/ml-1m_complete_order.txt.gz", 2000),
    "ml-1m": ("ml-1m/ml-1m_complete_order.txt.gz", None),
}
"""Files in the folder LOCKSTEP_DATA, and the number of users to take from each (None: all)."""
CATALOGUES = {"music": MUSIC, "book": "mcclk_book", "lfm1m": "kgat/lfm1m.zip"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=os.environ.get("LOCKSTEP_DATA"), help="data folder (default: $LOCKSTEP_DATA)"
    )
    parser.add_argument("--only", nargs="*", help="names of the data sets to score")
    parser.add_argument("--cache-dir", type=Path, default="~/.cache/lockstep")
    parser.add_argument("--runs", nargs="*", type=Path, default=(), help="finished runs to compare with simple models")
    given = parser.parse_args()
    if given.runs:
        print(json.dumps({str(folder): compared(folder) for folder in given.runs}))
        return
    cache = given.cache_dir.expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, task in tasks(given.folder and Path(given.folder), cache, given.only):
        task.most_scores = sys.maxsize
        task.splits()
        started = time.process_time()
        baselines = task.baselines()
        seconds = time.process_time() - started
        metrics = METRICS["seqrec" if isinstance(task, SeqrecTask) else "kgat"]
        columns = [f"{part}/{metric}" for part in ("test", "val") for metric in metrics]
        results[name] = {kind: {column: own.metrics[column] for column in columns} for kind, own in baselines.items()}
        print(f"\n| {name} ({seconds:.0f} CPU s) | {' | '.join(columns)} |\n|{' --- |' * (1 + len(columns))}")
        for kind, scores in results[name].items():
            print(f"| {kind} | {' | '.join(f'{score:.4f}'[1:] for score in scores.values())} |", flush=True)
    print(json.dumps(results))


def compared(folder: Path) -> dict[str, float | str]:
    """Compares a run's best weights with the simple model that has the best validation score."""
    record = json.loads((folder / "config.json").read_text())["config"]
    task_type: type[SeqrecTask | KgatTask] = SeqrecTask if record["--task"] == "seqrec" else KgatTask
    task = task_type(group_from_values(task_type.Config, record), record["--seed"], Path(record["--cache-dir"]))
    trained = task.build_objective()
    trained.model.load_state_dict(load(folder).state_dict())
    metric, _ = task.monitor
    baselines = task.baselines()
    kind = max(baselines, key=lambda name: baselines[name].metrics[metric])
    simple = task.fitted_objective(kind, task.training_histories())
    own, other = (of_each_user(task, objective) for objective in (trained, simple))
    two_errors = 2 * np.std(own - other, ddof=1) / len(own) ** 0.5
    print(
        f"{folder}: {metric} {own.mean():.4f}, {kind} {other.mean():.4f}: {(own - other).mean():+.4f} +- "
        f"{two_errors:.4f} over {len(own)} users",
        flush=True,
    )
    return {"run": own.mean(), "simple": kind, kind: other.mean(), "two_errors": two_errors}


@torch.no_grad()
def of_each_user(task: RecommenderTask, objective: Objective) -> np.ndarray:
    """Returns the monitored metric of each user of the validation set."""
    dataset, found = task.splits()["val"], []
    objective.eval()
    objective.start_evaluation()
    for user in range(len(dataset)):
        keys = SampleKeys(np.array([user]), epoch=0)
        sums = objective(task.collate(dataset.__getitems__(keys), keys)) | {"weight": torch.ones(())}
        found.append(task.summarise(sums)[task.monitor[0].removeprefix("val/")])
    return np.array(found)


def tasks(folder: Path | None, cache: Path, only: list[str] | None) -> Iterator[tuple[str, RecommenderTask]]:
    """Yields name and task of each generated data set, and of each data set in folder."""

    def wanted(name: str, place: str | None) -> bool:
        is_there = place is None or (folder is not None and (folder / place).exists())
        return is_there and (not only or name in only)

    if wanted("generated catalogue, seqrec", None):
        yield "generated catalogue, seqrec", SeqrecTask(SeqrecFlags(), 0, cache)
    if wanted("generated catalogue, kgat", None):
        yield "generated catalogue, kgat", KgatTask(KgatFlags(), 0, cache)
    for name, (place, num_users) in SEQUENCES.items():
        if folder is not None and wanted(name, place):
            for label, seed in ((name, None), (f"{name}, ties shuffled", 0)):
                path = cache / f"{label.replace(', ', '-').replace(' ', '-')}.tsv"
                write_shuffled(folder / place, path, seed, num_users)
                yield label, SeqrecTask(SeqrecFlags(data_dir=path), 0, cache)
    for name, place in CATALOGUES.items():
        if folder is not None and wanted(name, place):
            path = folder / place
            if place == MUSIC:
                split = [sys.executable, str(ROOT / "benchmarks" / "split_music.py"), str(path), str(cache / "music")]
                subprocess.run(split, check=True, stdout=subprocess.DEVNULL)
                path = cache / "music"
            yield name, KgatTask(KgatFlags(data_dir=path), 0, cache)


if __name__ == "__main__":
    main()
