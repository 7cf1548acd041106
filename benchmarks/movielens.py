"""Trains every model of --task seqrec on MovieLens-1M with published settings and three seeds.

    python benchmarks/movielens.py --data-dir ml-1m.zip --save-dir checkpoints/movielens --jobs 2

Each run is a command of main.py, which the script prints. A run uses one thread and a folder of its own. Running the
benchmark again resumes interrupted runs and reads finished runs. Each column of the table has the test score of the
epoch whose validation score is best by the column's metric; only checkpoints of these epochs are kept. Metrics with a
hundred negatives are computed as in SASRec's code (sampled) and as in TiSASRec's code (unseen); the sampled metric
chooses the epoch of both. The last printed line is a JSON object.
"""

import argparse
import json
import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.runs import folder, main_py, train

SASREC, TISASREC = (f"--config configs/seqrec/{model}_published.toml" for model in ("sasrec", "tisasrec"))
SOFTMAX = "--loss ce --hidden-units 64 --dropout 0.1 --epochs 80 --eval-every 5"
ROWS = {
    "SASRec, 200 items": SASREC,
    "TiSASRec, 50 items": TISASREC,
    "SASRec, 50 items": f"{SASREC} --maxlen 50",
    "SASRec, 200 items, full softmax": "--config configs/seqrec/sasrec_softmax.toml",
    "SASRec, 200 items, full softmax, the last items alone": f"{SASREC} {SOFTMAX}",
    "SASRec, 50 items, pre-norm": f"{SASREC} --maxlen 50 --norm pre",
    "SASRec, 50 items, mHC": f"{SASREC} --maxlen 50 --mhc",
    "TiSASRec, 50 items, pre-norm": f"{TISASREC} --norm pre",
    "TiSASRec, 50 items, mHC": f"{TISASREC} --mhc",
    "SASRec, 50 items, 4 blocks, pre-norm": f"{SASREC} --maxlen 50 --num-blocks 4 --norm pre",
    "SASRec, 50 items, 4 blocks, mHC": f"{SASREC} --maxlen 50 --num-blocks 4 --mhc",
    "SASRec, 50 items, 8 blocks, pre-norm": f"{SASREC} --maxlen 50 --num-blocks 8 --norm pre",
    "SASRec, 50 items, 8 blocks, mHC": f"{SASREC} --maxlen 50 --num-blocks 8 --mhc",
}
METRICS = ("hr@10", "ndcg@10", "sampled_hr@10", "sampled_ndcg@10")
COLUMNS = {metric: (metric, "parity") for metric in METRICS} | {
    f"unseen_{metric}": (f"sampled_{metric}", "unseen") for metric in ("hr@10", "ndcg@10")
}
"""Metric of each column, and the value of --eval-negatives."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="MovieLens-1M data set (default: synthetic data)")
    parser.add_argument("--save-dir", type=Path, required=True, help="folder for all runs")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=ROWS, metavar="ROW", help="rows to measure")
    parser.add_argument("--seeds", nargs="*", type=int, default=(0, 1, 2))
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel runs, with one thread each")
    parser.add_argument("--epochs", type=int, help="number of epochs of each run (default: as published)")
    args = parser.parse_args()
    jobs = [(row, seed) for seed in args.seeds for row in args.rows]
    data = ["--data-dir", str(args.data_dir.resolve())] if args.data_dir else []
    epochs = ["--epochs", str(args.epochs)] if args.epochs else []
    folders = {job: folder(args.save_dir.resolve(), *job) for job in jobs}
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda job: train(folders[job], command_of(job[0], [*data, *epochs]), job[1]), jobs))
        found = dict(zip(jobs, pool.map(lambda job: scores(folders[job]), jobs), strict=True))
    results = {row: summary([found[row, seed] for seed in args.seeds]) for row in args.rows}
    print(f"\n| model | {' | '.join(COLUMNS)} | seeds | epochs of best ndcg@10 | wall s |")
    print(f"|{' --- |' * (len(COLUMNS) + 4)}")
    for row, result in results.items():
        shown = (f"{result['mean'][metric]:.4f} ({result['deviation'][metric]:.4f})" for metric in COLUMNS)
        epochs = [each["epoch"] for each in result["runs"]]
        chosen = ", ".join(f"{each['ndcg@10']} and {each['sampled_ndcg@10']}" for each in epochs)
        print(f"| {row} | {' | '.join(shown)} | {len(args.seeds)} | {chosen} | {result['wall_s']:.0f} |")
    print(json.dumps(results))


def command_of(row: str, flags: list[str]) -> list[str]:
    kept = ["--keep-checkpoints", "0", "--eval-negatives", "parity"]
    return ["--task", "seqrec", *shlex.split(ROWS[row]), *flags, *kept]


def scores(run: Path) -> dict[str, Any]:
    """Returns, for each metric, the best epoch on the validation set and its test score."""
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best, validated = best_epochs(events), validations(events)
    chosen = {run / f"checkpoint_{epoch}.pth" for epoch in best.values()}
    for checkpoint in set(run.glob("checkpoint_*.pth")) - chosen:
        checkpoint.unlink()

    @cache
    def of_test(epoch: int, negatives: str) -> dict[str, float]:
        words = ["--config", str(run / "config.json"), "--eval-only", "--eval-negatives", negatives]
        printed = main_py(*words, "--resume-from", str(run / f"checkpoint_{epoch}.pth"))
        return {name: float(value) for name, value in re.findall(r"test/(\S+) ([\d.]+)", printed)}

    return {
        "epoch": best,
        "val": {metric: validated[epoch][f"val/{metric}"] for metric, epoch in best.items()},
        "test": {name: of_test(best[metric], negatives)[metric] for name, (metric, negatives) in COLUMNS.items()},
        "wall_s": json.loads((run / "results.json").read_text())["train_seconds"],
    }


def validations(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {event["epoch"]: event for event in events if "val/ndcg@10" in event}


def best_epochs(events: list[dict[str, Any]]) -> dict[str, int]:
    """Returns the best epoch by each metric. events: lines of metrics.jsonl."""
    epochs = validations(events)
    return {metric: max(epochs, key=lambda epoch: epochs[epoch][f"val/{metric}"]) for metric in METRICS}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    columns = {metric: [run["test"][metric] for run in runs] for metric in COLUMNS}
    return {
        "mean": {metric: mean(column) for metric, column in columns.items()},
        "deviation": {metric: stdev(column) if len(column) > 1 else 0.0 for metric, column in columns.items()},
        "wall_s": mean(run["wall_s"] for run in runs),
        "runs": runs,
    }


if __name__ == "__main__":
    main()
