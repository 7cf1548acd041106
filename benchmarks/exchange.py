"""Measures how long two CPU processes take to exchange gradients, and how long they wait for each other.

    python benchmarks/exchange.py

Two processes run the default model's training step in five variants, which alternate in blocks of steps: without any
exchange; waiting for the other process once per step, without exchanging data; a hand-written loop with
DistributedDataParallel; Lockstep's step; Lockstep's step with `--parts 2`, which makes results independent of the
number of processes. Processes that wait for each other are as slow as the slower process, and the speed of a shared
machine's cores varies, so no variant that exchanges data can be faster than the second variant.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tasks.har import HarFlags, HarTask
from trainer.flags import DeviceFlags, MultiDeviceFlags
from trainer.loading.batches import WeightedBatch, weighted
from trainer.loading.order import EpochOrder, SampleKeys
from trainer.loading.workers import BatchLoader
from trainer.loop.ema import ExponentialMovingAverage
from trainer.loop.learner import Learner
from trainer.loop.parts import PartsLearner
from trainer.loop.precision import Precision, in_precision
from trainer.loop.train import train_step
from trainer.parallel.ddp import Replicated
from trainer.parallel.environment import RankEnvironment
from trainer.parallel.launch import launch
from trainer.parallel.process_group import ProcessGroup
from trainer.parallel.strategy import SingleDevice, Strategy
from trainer.task import Objective

BATCH_SIZE = 32
NUM_BATCHES = 16
BLOCK_STEPS = 10
WARM_UP_ROUNDS = 5
WORLD_SIZE = 2
CPU = torch.device("cpu")

Step = Callable[[], None]


def shuffled_batches(task: HarTask, rank: int) -> Iterator[WeightedBatch]:
    """Returns an endless iterator over a few batches in memory."""
    dataset = task.splits()["train"]
    order = EpochOrder(0, 0, 0, len(dataset)).take(0, len(dataset))[rank::WORLD_SIZE]
    keys = [SampleKeys(order[i * BATCH_SIZE : (i + 1) * BATCH_SIZE], epoch=0) for i in range(NUM_BATCHES)]
    return cycle([weighted(batch) for batch in BatchLoader([dataset], task.collate)(keys)])


def optimized(model: nn.Module) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    params = list(model.parameters())
    return torch.optim.AdamW(params, lr=1e-3, fused=True), params


def lockstep_step(task: HarTask, strategy: Strategy, batches: Iterator[WeightedBatch]) -> Step:
    """Returns the trainer's step, which also sums the next accumulation window's weight over the processes."""
    precision = Precision("off", torch.float32, CPU)
    objective = strategy.place(task.build_objective, task.blocks, complete=lambda _: None)
    net = in_precision(objective, precision)
    kind = PartsLearner if strategy.num_parts else Learner
    learner = kind(objective, net, strategy, precision, 1.0, ExponentialMovingAverage(objective.model, decay=0))
    optimizer, params = optimized(objective)
    learner.set_trained({"train": params})
    learner.nets["train"] = strategy.wrap(net)
    learner.optimizers["train"] = [optimizer]
    window = [next(batches)]
    pending = strategy.group.start_sum([window[0].weight, 0.0])

    def step() -> None:
        nonlocal window, pending
        (total_weight, _), current = pending(), window
        window = [next(batches)]
        pending = strategy.group.start_sum([window[0].weight, 0.0])
        train_step(learner, "train", current, total_weight, dropout_key=(0, 0, 0, 0), learning_rate=1e-3)

    return step


def waiting_step(alone: Step, rank: int, counters: Tensor) -> Step:
    """Returns a step that ends when the other process has run as many steps. counters: steps done, in shared memory."""

    def step() -> None:
        alone()
        counters[rank * 8] += 1
        while counters[(1 - rank) * 8] < counters[rank * 8]:
            time.sleep(0)

    return step


def under_ddp(objective: Objective) -> nn.Module:
    model = nn.parallel.DistributedDataParallel(objective, gradient_as_bucket_view=True)
    model.broadcast_buffers = False
    return model


def bare_step(model: nn.Module, batches: Iterator[WeightedBatch]) -> Step:
    """Returns the step of a hand-written loop. model: objective wrapped in DDP or FSDP."""
    optimizer, params = optimized(model)

    def step() -> None:
        loss = model(next(batches)[0])["loss"] / BATCH_SIZE
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(environment: RankEnvironment, folder: Path, rounds: int) -> int:
    """Measures all variants in one of the two processes; rank 0 writes median times and efficiencies."""
    torch.set_num_threads(1)
    strategy = Replicated(ProcessGroup(environment, MultiDeviceFlags(multi_gpu="ddp"), DeviceFlags(device="cpu")))
    task = HarTask(HarFlags(), seed=0, cache_dir=folder)
    batches = shuffled_batches(task, environment.rank)
    counters = torch.from_file(str(folder / "counters"), shared=True, size=16, dtype=torch.int64)
    alone = lockstep_step(task, SingleDevice(CPU), batches)
    steps = {
        "without_exchange": alone,
        "waiting_only": waiting_step(alone, environment.rank, counters),
        "bare_ddp": bare_step(under_ddp(task.build_objective()), batches),
        "lockstep": lockstep_step(task, strategy, batches),
        "parts": lockstep_step(task, Replicated(strategy.group, num_parts=WORLD_SIZE), batches),
    }
    means = {name: times[:, 0] for name, times in in_turns(steps, rounds, strategy).items()}
    if strategy.group.is_main:
        alone_s = means["without_exchange"]
        result = {
            "step_ms": {name: round(1e3 * float(times.median()), 2) for name, times in means.items()},
            "efficiency": {name: round(float((alone_s / times).median()), 3) for name, times in means.items()},
            "lockstep_over_bare_ddp": round(float((means["lockstep"] / means["bare_ddp"]).median()), 3),
            "parts_over_lockstep": round(float((means["parts"] / means["lockstep"]).median()), 3),
        }
        (folder / "result.json").write_text(json.dumps(result))
    strategy.group.close()
    return 0


def in_turns(steps: Mapping[str, Step], rounds: int, strategy: Strategy) -> dict[str, Tensor]:
    """Alternates variants; returns wall-clock and CPU seconds per step, (rounds, 2), averaged over processes."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(WARM_UP_ROUNDS + rounds):
        for name, step in steps.items():
            dist.barrier()
            times[name].append(block_s(step))
    return {
        name: strategy.group.sum(torch.tensor(pairs[WARM_UP_ROUNDS:])) / WORLD_SIZE for name, pairs in times.items()
    }


def block_s(step: Step) -> tuple[float, float]:
    """Returns the mean wall-clock and CPU seconds of a step over a block of steps."""
    clock, processor = time.perf_counter(), time.process_time()
    for _ in range(BLOCK_STEPS):
        step()
    return (time.perf_counter() - clock) / BLOCK_STEPS, (time.process_time() - processor) / BLOCK_STEPS


def measured(measure: Callable[..., int], description: str | None) -> dict:
    """Parses `--rounds`, runs `measure` in two processes, and returns the contents of its result.json.

    description: text for `--help`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="blocks of steps per variant, at least 1")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be at least 1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if launch(partial(measure, folder=folder, rounds=args.rounds), WORLD_SIZE):
            sys.exit("a process failed; see its message above")
        result: dict = json.loads((folder / "result.json").read_text())
    return result


def main() -> None:
    result = measured(measure, __doc__)
    print("efficiency relative to processes without exchange:", result["efficiency"])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
