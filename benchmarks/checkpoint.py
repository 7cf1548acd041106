"""Measures how much saving checkpoints in the background slows down training.

    python benchmarks/checkpoint.py

A model of 50 million parameters, whose checkpoint with AdamW's two moments has 600 MB, trains on the CPU in the
trainer's loop. Blocks of steps with and without a save alternate. A block with a save ends when its checkpoint is on
the disk. The benchmark also times a plain copy of the state and a blocking save. Results are medians of the ratios of
neighbouring blocks, because the speed of a machine changes from minute to minute.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.autoencoder import Autoencoder
from benchmarks.opened_run import opened_run
from trainer.checkpoint.background import state_bytes
from trainer.loop.checkpointing import save
from trainer.loop.run import Run
from trainer.loop.train import train_epoch

BATCH_SIZE = 8


class Large(Autoencoder):
    width, num_layers = 4096, 3


LARGE = f"{__file__}:Large"


def build_lockstep(folder: Path, num_steps: int, device: str, task: str) -> Run:
    argv = [
        "--task", task, "--epochs", "1", "--batch-size", str(BATCH_SIZE),
        "--num-train", str(BATCH_SIZE * num_steps), "--log-interval", "1000000", "--keep-checkpoints", "1",
    ]  # fmt: skip
    return opened_run(folder, argv, device)


class Timer:
    """Saves at the start of every second block of steps, and times blocks and saves."""

    def __init__(self, run: Run, num_steps: int) -> None:
        self.run, self.num_steps = run, num_steps
        self.wait = torch.cuda.synchronize if run.strategy.device.type == "cuda" else lambda: None
        self.steps_done = -1  # the first step allocates the moments
        self.stalls: list[float] = []
        self.clones: list[float] = []
        self.blocking: list[float] = []
        self.without: list[float] = []
        self.with_save: list[float] = []
        self.started = 0.0
        self.advance, run.log.advance = run.log.advance, self.after_step

    def after_step(self, num_samples: int) -> None:
        self.advance(num_samples)
        self.steps_done += 1
        num_blocks, step_of_block = divmod(self.steps_done, self.num_steps)
        saves = num_blocks % 2 == 1
        if step_of_block == 0 and num_blocks > 0:
            self._end_block(saved=not saves)
        if step_of_block == 0:
            self.wait()
            self.started = time.perf_counter()
            if saves:
                save(self.run)
                self.stalls.append(time.perf_counter() - self.started)

    def _end_block(self, saved: bool) -> None:
        self.run.await_saver(self.run.saver.finish)
        self.wait()
        (self.with_save if saved else self.without).append(time.perf_counter() - self.started)
        if saved:
            self._time_references()

    def _time_references(self) -> None:
        state = self.run.strategy.full_state(self.run.learner.objective, self.run.learner.optimizers)
        tensors = []
        started = time.perf_counter()
        for value in state["model"].values():
            tensors.append(value.to("cpu", copy=True))
        for moments in state["optimizers"]["train"][0]["state"].values():
            tensors += [value.to("cpu", copy=True) for value in moments.values()]
        self.clones.append(time.perf_counter() - started)
        del tensors
        started = time.perf_counter()
        save(self.run)
        self.run.await_saver(self.run.saver.finish)
        self.blocking.append(time.perf_counter() - started)


def measure(num_cycles: int, num_steps: int, device: str = "cpu", task: str = LARGE) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        run = build_lockstep(Path(folder), 1 + 2 * num_cycles * num_steps, device, task)
        timer = Timer(run, num_steps)
        train_epoch(run)
        num_bytes = state_bytes(run.strategy.full_state(run.learner.objective, run.learner.optimizers))
        num_parameters = run.learner.num_parameters
        run.close()
        run.directory.release()
    extra = [more - less for more, less in zip(timer.with_save, timer.without, strict=True)]
    return {
        "stall_over_clone": median_ratio(timer.stalls, timer.clones),
        "extra_over_blocking_save": median_ratio(extra, timer.blocking),
        "stall_s": round(statistics.median(timer.stalls), 3),
        "clone_s": round(statistics.median(timer.clones), 3),
        "blocking_save_s": round(statistics.median(timer.blocking), 3),
        "steps_without_s": round(statistics.median(timer.without), 3),
        "steps_with_save_s": round(statistics.median(timer.with_save), 3),
        "stalls_over_clones": [round(a / b, 3) for a, b in zip(timer.stalls, timer.clones, strict=True)],
        "extras_over_blocking_saves": [round(a / b, 3) for a, b in zip(extra, timer.blocking, strict=True)],
        "num_steps": num_steps,
        "num_cycles": num_cycles,
        "num_parameters": num_parameters,
        "state_mb": round(num_bytes / 1e6),
        "torch": torch.__version__,
    }


def median_ratio(times: list[float], references: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(times, references, strict=True)), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=9, help="number of pairs of blocks; one block of a pair saves")
    parser.add_argument("--steps", type=int, default=50, help="number of steps per block")
    arguments = parser.parse_args()
    result = measure(arguments.cycles, arguments.steps)
    print(f"{result['num_parameters'] / 1e6:.0f} M parameters, a state of {result['state_mb']} MB; medians of:")
    for name, key in (
        ("copying the state", "clone_s"),
        ("stall of the loop by a save", "stall_s"),
        ("a blocking save", "blocking_save_s"),
        (f"{result['num_steps']} steps without a save", "steps_without_s"),
        (f"{result['num_steps']} steps with a save", "steps_with_save_s"),
    ):
        print(f"  {name:<32}{result[key]:>9.3f} s")
    print(f"  {'stall / copying the state':<32}{result['stall_over_clone']:>9.3f}")
    print(f"  {'extra time / blocking save':<32}{result['extra_over_blocking_save']:>9.3f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
