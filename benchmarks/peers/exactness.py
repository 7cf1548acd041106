"""Is a step that of its whole batch, and a score that of every sample once? Lockstep, Lightning and Accelerate.

    pip install -r requirements.txt -r benchmarks/peers/requirements.txt
    python benchmarks/peers/exactness.py lockstep       # or lightning, or accelerate

Accumulation: 203 sequences of 1 to 24 tokens in micro-batches of 4, 16 sequences a step, on one process and on two;
neither the last step nor its last micro-batch is full. The steps are then redone, each as one batch, on the samples
that the forwards got; the figure is the distance of the weights in parts of the way that training went.
Evaluation: of 101 sequences, and of one, by the scripts' own scores, beside those of the same weights.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.sides import SIDES, distance, new_run, variants_of
from benchmarks.peers.tagging import Settings, new_model, scores_of, trained_on

VARIANTS = ("lockstep", "lightning", "accelerate", "accelerate, mean of means")
GLOBAL_BATCH, MICRO_BATCH = 16, 4
SETTINGS = Settings(epochs=1, micro_batch=MICRO_BATCH, save_every=0)


def measure(variant: str, world: int, num_eval: int) -> dict:
    accumulate = GLOBAL_BATCH // MICRO_BATCH // world
    settings = replace(SETTINGS, world=world, accumulate=accumulate, num_eval=num_eval)
    with new_run(variant, settings) as run:
        run.finish_well()
        (steps,) = run.lives()
        weights, metrics = run.weights(), run.metrics()
    right = trained_on(settings, [step.index for step in steps]).state_dict()
    times = Counter(sample for step in steps for sample in step.index)
    exact = scores_of(settings, weights)
    return {
        "variant": variant,
        "processes": world,
        "steps": len(steps),
        "weights_off": float(f"{distance(weights, right, new_model(settings).state_dict()):.2g}"),
        "trained_twice": sum(count - 1 for count in times.values()),
        "never_trained": settings.num_train - len(times),
        "num_eval": num_eval,
        "scored": metrics["num_samples"],
        "loss_off": float(f"{abs(metrics['loss'] / exact['loss'] - 1):.2g}"),
        "accuracy_off": float(f"{abs(metrics['accuracy'] - exact['accuracy']):.2g}"),
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=SIDES)
    return parser


def main() -> None:
    for variant in variants_of(parser().parse_args().side, *VARIANTS):
        for world, num_eval in ((1, 101), (2, 101), (2, 1)):
            print(json.dumps(measure(variant, world, num_eval)), flush=True)


if __name__ == "__main__":
    main()
