"""Kills runs of Lockstep, Lightning and Accelerate, restarts them, and compares them with unbroken runs.

    pip install -r requirements.txt -r benchmarks/peers/requirements.txt
    python benchmarks/peers/resuming.py stop lockstep            # SIGKILL within an epoch, and between two epochs
    python benchmarks/peers/resuming.py worlds lightning         # SIGKILL, then a restart with more or fewer processes
    python benchmarks/peers/resuming.py kills accelerate         # SIGKILL at random moments

With `stop` and `worlds` every process kills itself in the same step. The script records the samples of every
forward pass, and two weights. The weights in the second start's first pass show from which checkpoint the run resumed;
later passes of the first start do not count. When the number of processes changes, Lockstep keeps the global batch of
16 sequences; for the other libraries, the script changes the number of accumulation steps.
"""

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch import Tensor

from benchmarks.peers.sides import SIDES, distance, new_run, same_bits, variants_of
from benchmarks.peers.tagging import Settings, new_model
from benchmarks.peers.watch import Step

VARIANTS = ("lockstep", "lightning", "lightning, plain loader", "accelerate", "accelerate, stateful loader")
GLOBAL_BATCH, MICRO_BATCH, STEPS_PER_EPOCH = 16, 4, 13
KILLED = Settings(epochs=2, micro_batch=8, width=384, dtype="float32", save_every=2)
"""Settings with 0.6 million parameters, whose checkpoint of 5 MB is saved after every second of 52 steps."""


class Stop(NamedTuple):
    """Step, counted from 1, at whose start a run of 26 steps is killed, and the number of steps between checkpoints."""

    in_step: int
    save_every: int


WITHIN_AN_EPOCH = Stop(23, save_every=5)
BETWEEN_EPOCHS = Stop(STEPS_PER_EPOCH + 1, save_every=STEPS_PER_EPOCH)


def sized(world: int, stop: Stop, dropout: float = 0.0) -> Settings:
    accumulate = GLOBAL_BATCH // MICRO_BATCH // world
    return Settings(
        micro_batch=MICRO_BATCH, accumulate=accumulate, world=world, dropout=dropout, save_every=stop.save_every
    )


class Lineage(NamedTuple):
    """Steps that led to the final weights.

    went_on_after: number of the first start's steps after which the second start resumed; None if the second start
    began with weights that the first start never had.
    """

    went_on_after: int | None
    steps: list[Step]


def lineage(first: Sequence[Step], second: Sequence[Step]) -> Lineage:
    names = [step.weights for step in first]
    if not second:
        return Lineage(None, list(first))
    if second[0].weights not in names:
        return Lineage(None, list(second))
    place = names.index(second[0].weights)
    return Lineage(place, [*first[:place], *second])


def compared(steps: Sequence[Step], unbroken: Sequence[Step], epochs: int) -> dict[str, int]:
    """Describes how the samples of a run differ from the samples of an unbroken run."""
    times = Counter(sample for step in steps for sample in set(step.index))
    every = {sample for step in unbroken for sample in step.index}
    return {
        "steps": len(steps),
        "steps_with_other_samples": sum(set(a.index) != set(b.index) for a, b in zip(steps, unbroken, strict=False)),
        "samples_left_out": sum(times[sample] < epochs for sample in every),
        "samples_repeated": sum(times[sample] > epochs for sample in every),
    }


def stopped(variant: str, stop: Stop, worlds: tuple[int, int] = (1, 1), dropout: float = 0.0) -> dict:
    """Kills and restarts a run once, and compares it. worlds: number of processes of the first and second start."""
    before, after = (sized(world, stop, dropout) for world in worlds)
    found: dict = {"variant": variant, "processes": worlds, "dropout": dropout, "killed_in_step": stop.in_step}
    with new_run(variant, before) as unbroken, new_run(variant, before) as run:
        unbroken.finish_well()
        if run.finish(die_at=(stop.in_step - 1) * before.accumulate + 1):
            sys.exit(f"{variant} was not killed")
        said_before = len(run.output())
        if not run.finish(after):
            return found | {"refused": refusal(run.output()[said_before:], run.folder)}
        first, second = run.lives()
        went_on_after, steps = lineage(first, second)
        weights, right = run.weights(), unbroken.weights()
        return found | {
            "went_on_after_step": went_on_after,
            **compared(steps, unbroken.lives()[0], before.epochs),
            "same_bits": same_bits(weights, right),
            "weights_off": float(f"{distance(weights, right, new_model(before).state_dict()):.2g}"),
        }


def refusal(output: str, folder: Path) -> str:
    """Returns the first exception that a start printed, and the line of code that raised it."""
    found = re.search(r"^ +(?P<code>\S.*)(\n +\^+)?\n(?P<error>[\w.]*(Error|Exception)\b.*)", output, re.MULTILINE)
    text = f"{found['error']} ({found['code']})" if found else output[-300:]
    return text.replace(str(folder), "...")


# --- kills at random moments -----------------------------------------------------------------------------------------


Outcome = Literal["same bits", "other weights", "refused"]


class Killed(NamedTuple):
    """Result of killing a run once. steps_redone: None if the restart failed or began with unknown weights."""

    outcome: Outcome
    steps_redone: int | None
    message: str


def killed_once(variant: str, unbroken: Sequence[Step], right: dict[str, Tensor], draw: random.Random) -> Killed:
    while True:
        with new_run(variant, KILLED) as run:
            forward, wait_s = draw.randrange(1, len(unbroken) + 1), draw.uniform(0, 0.05)
            if not run.killed(lambda run=run, forward=forward: run.num_forwards() >= forward, wait_s):
                continue  # the run had ended
            said_before = len(run.output())
            if not run.finish():
                return Killed("refused", None, refusal(run.output()[said_before:], run.folder))
            first, second = run.lives()
            names = [step.weights for step in unbroken]
            begun = names.index(second[0].weights) if second and second[0].weights in names else None
            outcome = "same bits" if same_bits(run.weights(), right) else "other weights"
            return Killed(outcome, None if begun is None else len(first) - begun, "")


def killed_often(variant: str, num_kills: int, seed: int) -> Iterator[dict]:
    """Yields a result for each kill, and finally their sums."""
    draw = random.Random(seed)
    with new_run(variant, KILLED) as run:
        run.finish_well()
        (unbroken,), right = run.lives(), run.weights()
    kills = []
    for _ in range(num_kills):
        kills.append(killed_once(variant, unbroken, right, draw))
        yield {"variant": variant, **kills[-1]._asdict()}
    outcomes = Counter(kill.outcome for kill in kills)
    redone = [kill.steps_redone for kill in kills if kill.steps_redone is not None]
    yield {
        "variant": variant,
        "kills": num_kills,
        **{name.replace(" ", "_"): outcomes[name] for name in get_args(Outcome)},
        "steps_redone_mean": round(sum(redone) / max(1, len(redone)), 1),
        "steps_redone_most": max(redone, default=None),
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("stop", "worlds", "kills"))
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--kills", type=int, default=20, help="number of runs to kill")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments at which runs are killed")
    return parser


def results(variant: str, what: str, num_kills: int, seed: int) -> Iterator[dict]:
    if what == "stop":
        yield stopped(variant, WITHIN_AN_EPOCH)
        yield stopped(variant, WITHIN_AN_EPOCH, dropout=0.1)
        yield stopped(variant, BETWEEN_EPOCHS)
    elif what == "worlds":
        yield stopped(variant, WITHIN_AN_EPOCH, worlds=(1, 2))
        yield stopped(variant, WITHIN_AN_EPOCH, worlds=(2, 1))
    else:
        yield from killed_often(variant, num_kills, seed)


def main() -> None:
    args = parser().parse_args()
    for variant in variants_of(args.side, *(SIDES if args.what == "kills" else VARIANTS)):
        for result in results(variant, args.what, args.kills, args.seed):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
