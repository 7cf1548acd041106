"""Trains every model of --task kgat on every data set with three seeds, for recall and NDCG in docs/results.md.

    python benchmarks/recommenders.py --save-dir checkpoints/recommenders --data music=music lfm1m=lfm1m.zip

Each run is a command of main.py, which the script prints, with a folder of its own. Running the benchmark again resumes
interrupted runs and reads finished runs. The last printed line is a JSON object.
"""

import argparse
import json
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.runs import folder, train

PAIRS = "--loss bpr --embed-dim 64 --batch-size 1024 --lr 5e-3 --eval-every 5"
MODELS = {
    "bprmf": "--model bprmf",
    "lightgcn": "--model lightgcn",
    "kg-lightgcn": "--model kg-lightgcn",
    "kgat": "--model kgat",
    "kg-lightgcn, bpr": f"--model kg-lightgcn {PAIRS} --num-layers 3 --epochs 200 --early-stopping-patience 8",
    "kgat, as published": f"--model kgat {PAIRS} --kg-batch-ratio 2 --epochs 40",
}
"""Flags of each row; the first four rows use default flags."""
SEEDS = (0, 1, 2)
METRICS = ("test/recall@20", "test/ndcg@20")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-dir", type=Path, required=True, help="folder for all runs")
    parser.add_argument(
        "--data",
        nargs="*",
        default=["default="],
        metavar="NAME=PATH",
        help="name for the tables, and value of --data-dir; no PATH: the generated catalogue",
    )
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="rows to run (default: all)")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel runs, with one thread each")
    args = parser.parse_args()
    places = dict(text.split("=", 1) for text in args.data)
    jobs = [(name, model, seed) for name in places for seed in args.seeds for model in args.models]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda job: run(*job, places[job[0]], args.save_dir), jobs))
    results = {name: scores(name, args.save_dir) for name in places}
    for name, rows in results.items():
        print(f"\n| {name} | recall@20 | NDCG@20 | seeds | wall s |\n| --- | --- | --- | --- | --- |")
        for model, row in rows.items():
            shown = (f"{row[metric]:.4f} ({', '.join(f'{x:.4f}' for x in row[f'{metric}s'])})" for metric in METRICS)
            print(f"| {model} | {' | '.join(shown)} | {row['num_seeds']} | {row['train_seconds']} |")
    print(json.dumps(results))


def run(name: str, model: str, seed: int, place: str, save_dir: Path) -> None:
    data = ["--data-dir", place] if place else []
    flags = ["--task", "kgat", *data, *shlex.split(MODELS[model]), "--keep-checkpoints", "1"]
    train(folder(save_dir / name, model, seed), flags, seed)


def scores(name: str, save_dir: Path) -> dict[str, Any]:
    """Returns the results of each model that has runs, and of the simple models that the runs scored as baselines."""
    trained, simple = dict[str, Any](), dict[str, Any]()
    for model in MODELS:
        found = [folder(save_dir / name, model, seed) / "results.json" for seed in SEEDS]
        results = [json.loads(path.read_text()) for path in found if path.exists()]
        if results:
            simple |= {kind: [metrics] for kind, metrics in results[0]["baselines"].items()}
            trained[model] = summary([result["metrics"] for result in results]) | {
                "train_seconds": round(mean(result["train_seconds"] for result in results), 1)
            }
    return {kind: summary(metrics) | {"train_seconds": 0.0} for kind, metrics in simple.items()} | trained


def summary(metrics: list[dict[str, float]]) -> dict[str, Any]:
    means = {name: mean(each[name] for each in metrics) for name in METRICS}
    return means | {f"{name}s": [each[name] for each in metrics] for name in METRICS} | {"num_seeds": len(metrics)}


if __name__ == "__main__":
    main()
