"""What it costs that two processes compare their weights and their times as they train.

    python benchmarks/watching.py

Two CPU processes train the small network of overhead.py, whose step takes about 2 ms, through the shipped loop, with
both and without in turns, a block of steps each. In each block with them the weights are compared once, five times as
often as by default. The figure is the median of the ratios of neighbouring blocks.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer.commands.build import assemble_run, build_task, prepare_training, set_up_torch, start_parallel
from trainer.commands.parse import parse
from trainer.config import refuse
from trainer.logs.run_log import SilentLog
from trainer.loop.lockstep import Lockstep
from trainer.loop.rank_times import REPORT_EVERY, RankTimes
from trainer.loop.run import Run
from trainer.loop.train import train_epoch
from trainer.parallel.environment import RankEnvironment
from trainer.parallel.launch import launch

BLOCK_STEPS = REPORT_EVERY
TASK = Path(__file__).with_name("overhead.py")


class EnoughSteps(Exception):
    pass


def now() -> tuple[float, float]:
    """Seconds that have passed, and seconds of this process on a core."""
    return time.perf_counter(), time.process_time()


class Turns(SilentLog):
    """A log that switches at the end of every block, and keeps the times of the blocks."""

    def __init__(self, run: Run, num_blocks: int) -> None:
        self.run, self.left = run, num_blocks
        self.steps = 0
        self.blocks: list[tuple[float, float]] = []
        self.watching = run.lockstep, run.rank_times
        self.idle = Lockstep(run.learner.objective, run.parallel, every=0), RankTimes(run.parallel, 1.3)
        for watch in self.watching:
            watch.begin()
        self.marks = run.parallel.activity.on_border, run.parallel.mark_comm_start
        self.since = now()

    def advance(self, num_samples: int) -> None:
        self.steps += 1
        if self.steps % BLOCK_STEPS:
            return
        before, self.since = self.since, now()
        self.blocks.append((self.since[0] - before[0], self.since[1] - before[1]))
        if len(self.blocks) == self.left:
            raise EnoughSteps
        watches = len(self.blocks) % 2 == 0
        self.run.lockstep, self.run.rank_times = self.watching if watches else self.idle
        on_border, mark_comm_start = self.marks if watches else (lambda name: None, lambda loss: None)
        self.run.parallel.activity.on_border = on_border
        self.run.parallel.mark_comm_start = mark_comm_start  # type: ignore[method-assign]


def measure(environment: RankEnvironment, folder: Path, num_blocks: int) -> int:
    """What each process does; the main one writes the result."""
    argv = [
        "--multi-gpu", "ddp", "--device", "cpu", "--num-threads", "1", "--task", f"{TASK}:SmallHar",
        "--batch-size", "16",
        "--max-steps", str(2**30), "--no-augmentation", "--save-dir", str(folder / "run"), "--cache-dir", str(folder),
        "--lockstep-every", str(BLOCK_STEPS),
    ]  # fmt: skip
    flags, problems = parse(argv, several_devices=True)
    refuse(problems)
    parallel = start_parallel(flags, environment)
    set_up_torch(flags, parallel)
    run = assemble_run(flags, build_task(flags), parallel)
    prepare_training(flags, run.task, run.learner, run.parallel, run.plan.orders, run.memory)
    run.log = turns = Turns(run, num_blocks)
    try:
        while True:
            train_epoch(run)
            run.progress.start_epoch(run.progress.position.epoch + 1, run.task.phases)
    except EnoughSteps:
        pass
    if parallel.is_main:
        (folder / "blocks.json").write_text(json.dumps(turns.blocks))
    parallel.close()
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100, help="of blocks; the first two are not counted")
    num_pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as folder:
        status = launch(partial(measure, folder=Path(folder), num_blocks=2 * num_pairs), 2)
        assert status == 0
        blocks = json.loads((Path(folder) / "blocks.json").read_text())
    pairs = [*zip(blocks[4::2], blocks[5::2], strict=True)]
    ratios, cpu_ratios = ([watched[i] / idle[i] for watched, idle in pairs] for i in range(2))
    result = {
        "step_ms": round(1e3 * statistics.median(idle[0] for _, idle in pairs) / BLOCK_STEPS, 3),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(quartile, 4) for quartile in statistics.quantiles(ratios, n=4)],
        "cpu_ms": round(1e3 * statistics.median(idle[1] for _, idle in pairs) / BLOCK_STEPS, 3),
        "cpu_ratio": round(statistics.median(cpu_ratios), 4),
        "cpu_ratio_quartiles": [round(quartile, 4) for quartile in statistics.quantiles(cpu_ratios, n=4)],
        "num_pairs": len(ratios),
        "steps_per_block": BLOCK_STEPS,
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
