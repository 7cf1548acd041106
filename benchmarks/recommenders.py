"""Trains every model of --task kgat on every data set with three seeds, for recall and NDCG in docs/results.md.

    python benchmarks/recommenders.py --save-dir checkpoints/recommenders --data music=music lfm1m=lfm1m.zip

Each run is a printed command line of main.py in a folder of its own. Running the benchmark again resumes interrupted
runs and reads finished runs. The last printed line is a JSON object.
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

LIGHT = "--model {} --lr 5e-3 --l2 1e-3 --epochs 200 --eval-every 5 --early-stopping-patience 8"
LIGHT_BOOK = (
    "--model {} --batch-size 4096 --draw interactions --lr 2e-2 --schedule cosine --l2 1e-2 --epochs 100 --eval-every 5"
)
LIGHT_LARGE = (
    "--model {} --batch-size 8192 --draw interactions --lr 3e-2 --schedule cosine --l2 1e-3 --epochs 28 --eval-every 4"
)
ONE_LAYER = "--layer-dims 64 --aggregator gcn"
FROM_SCRATCH = f"--model kgat {ONE_LAYER} --lr 5e-3 --l2 2e-2 --kg-lr-scale 0.1 --draw interactions"
FROM_BPRMF = (
    f"--model kgat {ONE_LAYER} --lr 3e-3 --l2 1e-2 --kg-lr-scale 0.01 --dropout 0.3 --node-dropout 0.5 --epochs 12 "
    "--early-stopping-patience 6 --init-from-partial {start}"
)
SETTINGS = {
    "default": {
        "bprmf": "--model bprmf --lr 5e-3 --epochs 200 --eval-every 5 --early-stopping-patience 8",
        "lightgcn": LIGHT.format("lightgcn"),
        "kg-lightgcn": LIGHT.format("kg-lightgcn"),
        "kgat, one layer": f"{FROM_SCRATCH} --epochs 60 --eval-every 2",
        "kgat, from bprmf": FROM_BPRMF,
        "kgat": "--model kgat --epochs 40",
    },
    "music": {
        "bprmf": "--model bprmf --lr 5e-3 --l2 1e-2 --epochs 250 --eval-every 5 --early-stopping-patience 8",
        "lightgcn": LIGHT.format("lightgcn"),
        "kg-lightgcn": LIGHT.format("kg-lightgcn"),
        "kgat, one layer": f"{FROM_SCRATCH} --epochs 60 --eval-every 2",
        "kgat, from bprmf": FROM_BPRMF,
        "kgat": "--model kgat --epochs 24 --eval-every 2",
    },
    "book": {
        "bprmf": LIGHT_BOOK.format("bprmf"),
        "lightgcn": LIGHT_BOOK.format("lightgcn"),
        "kg-lightgcn": LIGHT_BOOK.format("kg-lightgcn"),
        "kgat, one layer": f"{FROM_SCRATCH} --batch-size 4096 --epochs 30 --eval-every 3",
    },
    "lfm1m": {
        "bprmf": LIGHT_LARGE.format("bprmf"),
        "lightgcn": LIGHT_LARGE.format("lightgcn"),
        "kg-lightgcn": LIGHT_LARGE.format("kg-lightgcn"),
        "kgat, one layer": f"{FROM_SCRATCH} --batch-size 8192 --epochs 12 --eval-every 3",
    },
}
SETTINGS["ml1m-freebase"] = SETTINGS["lfm1m"]
SEEDS = (0, 1, 2)
METRICS = ("test/recall@20", "test/ndcg@20")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-dir", type=Path, required=True, help="folder for all runs")
    parser.add_argument(
        "--data", nargs="*", default=["default="], metavar="NAME=PATH", help=f"NAME is one of {', '.join(SETTINGS)}"
    )
    parser.add_argument("--models", nargs="*", help="models to run (default: all)")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel runs, with one thread each")
    args = parser.parse_args()
    places = dict(text.split("=", 1) for text in args.data)
    jobs = [
        (name, model, seed)
        for name in places
        for seed in args.seeds
        for model in args.models or SETTINGS[name]
        if model in SETTINGS[name]
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        # Runs that start from the weights of other runs come last.
        for late in (False, True):
            chosen = [job for job in jobs if ("{start}" in SETTINGS[job[0]][job[1]]) == late]
            list(pool.map(lambda job: run(*job, places[job[0]], args.save_dir), chosen))
    results = {name: scores(name, args.save_dir) for name in places}
    for name, rows in results.items():
        print(f"\n| {name} | recall@20 | NDCG@20 | seeds | wall s |\n| --- | --- | --- | --- | --- |")
        for model, row in rows.items():
            shown = (f"{row[metric]:.4f} ({', '.join(f'{x:.4f}' for x in row[f'{metric}s'])})" for metric in METRICS)
            print(f"| {model} | {' | '.join(shown)} | {row['num_seeds']} | {row['train_seconds']} |")
    print(json.dumps(results))


def run(name: str, model: str, seed: int, place: str, save_dir: Path) -> None:
    start = folder(save_dir / name, "bprmf", seed) / "best.pth"
    data = ["--data-dir", place] if place else []
    flags = shlex.split(SETTINGS[name][model].format(start=start))
    train(folder(save_dir / name, model, seed), ["--task", "kgat", *data, *flags, "--keep-checkpoints", "1"], seed)


def scores(name: str, save_dir: Path) -> dict[str, Any]:
    """Returns the results of each model that has runs, and of the simple models with which they were compared."""
    trained, simple = dict[str, Any](), dict[str, Any]()
    for model in SETTINGS[name]:
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
