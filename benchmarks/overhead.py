"""Measures the overhead of the trainer over a hand-written loop that does the same work.

    python benchmarks/overhead.py

Both train the same small network on the same data in memory, with the same shuffling, dropout, clipping, schedule,
label smoothing and fused AdamW. Each epoch ends with an evaluation and a checkpoint. The trainer runs the command
line's own train(), with its progress bar and all logs. Trainer and loop alternate in one process in blocks of steps.
The result is the median of the ratios of neighbouring blocks.
"""

import argparse
import io
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.opened_run import opened_run
from data.har.windows import SIGNALS, HarDataset, HarRecordings
from models.har.harnet import HarNet
from models.layers.standardised import Standardised
from tasks.har import HarObjective, HarTask
from trainer import Batch, Sums
from trainer.loading.batches import KeyedDataset
from trainer.loading.order import EpochOrder, SampleKeys
from trainer.loop.optimizers import without_compiler
from trainer.loop.train import train

BATCH_SIZE = 16
WIDTHS = (8, 16)
HIDDEN_DIMS = (64,)
DROPOUT = 0.2
BLOCK_STEPS = 20
LABEL_SMOOTHING = 0.1
PEAK_LR, WARMUP_EPOCHS, MAX_GRAD_NORM, WEIGHT_DECAY = 1e-3, 2, 1.0, 0.01


def small_model() -> Standardised:
    """Builds a model whose step takes about 2 ms on one CPU thread, so that overhead shows."""
    return Standardised(HarNet(hidden_dims=HIDDEN_DIMS, dropout=DROPOUT, widths=WIDTHS, num_members=1), len(SIGNALS))


def everything(dataset: KeyedDataset) -> tuple[np.ndarray, np.ndarray]:
    """Returns all windows of signals, and their labels."""
    samples = dataset.__getitems__(SampleKeys(np.arange(len(dataset)), epoch=0))
    return samples["signals"], samples["label"]


class SmallObjective(HarObjective):
    """Computes the same sums as the hand-written loop in training."""

    def forward(self, batch: Batch, phase: str = "train") -> Sums:
        if not self.training:
            return super().forward(batch, phase)
        logits, label = self.model(batch["signals"]), batch["label"]
        loss = F.cross_entropy(logits, label, reduction="sum", label_smoothing=self.label_smoothing)
        return {"loss": loss, "correct": (logits.detach().argmax(1) == label).sum()}


class SmallHar(HarTask):
    """Default task with the small model, and with four copies of the data, so that epochs have a realistic length."""

    @cached_property
    def _splits(self):
        splits = dict(super()._splits)
        signals, labels = everything(splits["train"])
        copies = HarRecordings(signals, labels, np.zeros_like(labels), np.zeros(len(labels), bool))
        splits["train"] = HarDataset(copies, np.tile(np.arange(len(labels)), 4))
        return splits

    def build_objective(self) -> SmallObjective:
        return SmallObjective(small_model(), LABEL_SMOOTHING)


class Terminal(io.StringIO):
    """Replacement for a terminal, so that the progress bar is drawn, but not shown."""

    def isatty(self) -> bool:
        return True


class BareLoop:
    def __init__(self, run, folder: Path) -> None:
        splits = run.task.splits()
        self.train_x, self.train_y = map(torch.tensor, everything(splits["train"]))
        self.val_x, self.val_y = map(torch.tensor, everything(splits["val"]))
        torch.manual_seed(0)
        self.model = small_model()
        decayed = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = without_compiler(torch.optim.AdamW)(groups, lr=PEAK_LR, fused=True)
        self.params = decayed + others
        self.folder = folder
        self.total_epochs = run.plan.epochs

    def steps(self) -> Iterator[None]:
        """Trains for all epochs, and yields after each step."""
        for epoch in range(self.total_epochs):
            self.model.train()
            total_loss = torch.zeros(())
            correct = torch.zeros((), dtype=torch.int64)
            num_samples = len(self.train_y)
            order = torch.from_numpy(EpochOrder(0, epoch, 0, num_samples).take(0, num_samples))
            for start in range(0, num_samples, BATCH_SIZE):
                index = order[start : start + BATCH_SIZE]
                x, y = self.train_x[index], self.train_y[index]
                learning_rate = self.learning_rate(epoch + start / num_samples)
                for group in self.optimizer.param_groups:
                    group["lr"] = learning_rate
                logits = self.model(x)
                loss = F.cross_entropy(logits, y, label_smoothing=LABEL_SMOOTHING)
                loss.backward()
                nn.utils.clip_grad_norm_(self.params, MAX_GRAD_NORM)
                self.optimizer.step()
                self.optimizer.zero_grad()
                total_loss += loss.detach() * len(index)
                correct += (logits.detach().argmax(1) == y).sum()
                yield

    def end_epoch(self) -> None:
        self.evaluate()
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, self.folder / "bare.pth")

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        hits = 0
        for start in range(0, len(self.val_y), BATCH_SIZE):
            logits = self.model(self.val_x[start : start + BATCH_SIZE])
            hits += int((logits.argmax(1) == self.val_y[start : start + BATCH_SIZE]).sum())
        return hits / len(self.val_y)

    def learning_rate(self, progress: float) -> float:
        if progress < WARMUP_EPOCHS:
            return PEAK_LR * max(progress, 1e-3) / WARMUP_EPOCHS
        done = (progress - WARMUP_EPOCHS) / (self.total_epochs - WARMUP_EPOCHS)
        return PEAK_LR * 0.5 * (1 + math.cos(math.pi * done))


def build_lockstep(folder: Path, num_epochs: int):
    argv = [
        "--task", f"{__file__}:SmallHar", "--epochs", str(num_epochs),
        "--batch-size", str(BATCH_SIZE), "--lr", str(PEAK_LR), "--warmup-epochs", str(WARMUP_EPOCHS),
        "--max-grad-norm", str(MAX_GRAD_NORM), "--weight-decay", str(WEIGHT_DECAY), "--no-augmentation",
    ]  # fmt: skip
    return opened_run(folder, argv)


class Turns:
    """Alternates blocks of steps of train() and the hand-written loop, and records the times of the blocks.

    Blocks are short, because the speed of a machine changes from second to second.
    """

    def __init__(self, run, bare) -> None:
        self.bare, self.bare_steps = bare, bare.steps()
        self.advance, run.log.advance = run.log.advance, self.after_step
        self.start_epoch, run.log.start_segment = run.log.start_segment, self.before_epoch
        self.end_training, run.log.end_training = run.log.end_training, self.after_epoch
        self.blocks: list[tuple[float, float]] = []
        self.ends: list[tuple[float, float]] = []
        self.num_steps = 0

    def before_epoch(self, *args) -> None:
        if self.num_steps:
            self.ends[-1] = (time.perf_counter() - self.ends[-1][0], self.ends[-1][1])
        self.start_epoch(*args)
        self.mark = time.perf_counter()

    def after_step(self, num_samples: int) -> None:
        self.advance(num_samples)
        self.num_steps += 1
        if self.num_steps % BLOCK_STEPS == 0:
            ours = time.perf_counter() - self.mark
            started = time.perf_counter()
            for _ in range(BLOCK_STEPS):
                next(self.bare_steps)
            self.blocks.append((ours, time.perf_counter() - started))
            self.mark = time.perf_counter()

    def after_epoch(self) -> None:
        self.end_training()
        started = time.perf_counter()
        self.bare.end_epoch()
        self.bare.model.train()
        self.ends.append((time.perf_counter(), time.perf_counter() - started))


def fastest_tenth(blocks: list[tuple[float, float]], who: int) -> float:
    """Returns the first decile of the blocks' times, which estimates the time on an otherwise idle machine."""
    return statistics.quantiles((block[who] for block in blocks), n=10)[0]


def measure(num_epochs: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        run = build_lockstep(Path(folder) / "run", num_epochs)
        turns = Turns(run, BareLoop(run, Path(folder)))
        train(run)
        run.close()
        run.directory.release()
    blocks = turns.blocks[len(turns.blocks) // num_epochs :]  # the first epoch pays for warm-up
    ends = turns.ends[1:-1]
    ratios = [ours / bare for ours, bare in blocks]
    our_step, bare_step = (statistics.median(times) / BLOCK_STEPS for times in zip(*blocks, strict=True))
    our_end, bare_end = (statistics.median(times) for times in zip(*ends, strict=True))
    steps_per_epoch = run.plan.steps_per_epoch
    step_ratio = statistics.median(ratios)
    return {
        "bare_step_ms": round(1e3 * bare_step, 3),
        "lockstep_step_ms": round(1e3 * our_step, 3),
        "training_ratio": round(step_ratio, 4),
        "training_ratio_of_fastest_tenths": round(fastest_tenth(blocks, 0) / fastest_tenth(blocks, 1), 4),
        "training_ratio_quartiles": [round(q, 4) for q in statistics.quantiles(ratios, n=4)],
        "bare_epoch_end_ms": round(1e3 * bare_end, 1),
        "lockstep_epoch_end_ms": round(1e3 * our_end, 1),
        "epoch_ratio": round(
            (step_ratio * bare_step * steps_per_epoch + our_end) / (bare_step * steps_per_epoch + bare_end), 4
        ),
        "num_blocks": len(blocks),
        "steps_per_block": BLOCK_STEPS,
        "steps_per_epoch": steps_per_epoch,
        "batch_size": BATCH_SIZE,
        "num_parameters": sum(p.numel() for p in turns.bare.model.parameters()),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=21, help="number of epochs; the first is a warm-up")
    parser.add_argument("--processor-time", action="store_true", help="measure CPU time, for a busy machine")
    args = parser.parse_args()
    num_epochs = args.epochs
    if args.processor_time:
        time.perf_counter = time.process_time
    real_stderr = sys.stderr
    sys.stderr = Terminal()
    try:
        result = measure(num_epochs)
    finally:
        sys.stderr = real_stderr
    print(f"hand-written step {result['bare_step_ms']} ms, Lockstep step {result['lockstep_step_ms']} ms")
    print(f"training for an epoch, with bar and logs: {result['training_ratio']} times the hand-written loop (median)")
    print(f"training with evaluation and checkpoint: {result['epoch_ratio']} times")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
