"""Checks steps and scores of Lockstep, Lightning and Accelerate against exact results of the whole batch and data set.

    pip install -r requirements.txt -r benchmarks/peers/requirements.txt
    python benchmarks/peers/exactness.py lockstep       # or lightning, or accelerate

Accumulation: one process and two processes train on 203 sequences of 1 to 24 tokens, in micro-batches of 4 and steps of
16 sequences; the last step and its last micro-batch are smaller. A plain loop repeats the steps, with all recorded
samples of a step in one batch. The result is the distance between the weights of trainer and plain loop, divided
by the distance of the plain loop's weights from the initial weights. Evaluation: scores on 101 sequences and on one
sequence are compared with exact scores of the same weights.
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
