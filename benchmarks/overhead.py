"""What the trainer costs over a bare hand-written loop that does the same work.

    python benchmarks/overhead.py

Both train the same small network on the same windows in memory: same shuffle, dropout, clipping, schedule, label
smoothing and fused AdamW; each epoch ends with an evaluation and a saved checkpoint. The trainer runs through the
command line's own train(), with its progress bar drawn and all its logs written. Epochs alternate in one process; the
figure is the median of the ratios of neighbours.
"""

import argparse
import dataclasses
import io
import json
import math
import statistics
import sys
import tempfile
import time
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.har import HarDataset
from data.order import epoch_permutation
from models.har import HarNet
from trainer.build import build_run, build_task, open_run, set_up_torch
from trainer.checkpoint import RunDirectory
from trainer.config import refuse
from trainer.flags import parse
from trainer.loop import train
from trainer.parallel import SingleDevice
from trainer.tasks.har import HarObjective, HarTask

BATCH_SIZE = 32
WIDTHS = (16, 16, 32)
HIDDEN_DIMS = (64,)
DROPOUT = 0.2
LABEL_SMOOTHING = 0.1
PEAK_LR, WARMUP_EPOCHS, MAX_GRAD_NORM, WEIGHT_DECAY = 1e-3, 2, 1.0, 0.01


def small_network() -> HarNet:
    """A model whose step takes about 2 ms on one CPU thread, so that overhead shows."""
    return HarNet(hidden_dims=HIDDEN_DIMS, dropout=DROPOUT, widths=WIDTHS)


class SmallHar(HarTask):
    """The default task with that model, and four times its windows, for epochs of a usual number of steps."""

    @cached_property
    def _splits(self):
        splits = dict(super()._splits)
        train = splits["train"]
        splits["train"] = HarDataset(np.tile(train.signals, (4, 1, 1)), np.tile(train.labels, 4))
        return splits

    def build_objective(self) -> HarObjective:
        return HarObjective(small_network(), LABEL_SMOOTHING)


class Terminal(io.StringIO):
    """A standard error on which the progress bar is drawn, and forgotten."""

    def isatty(self) -> bool:
        return True


class BareLoop:
    """What one would write by hand for this model and this data."""

    def __init__(self, run, folder: Path) -> None:
        splits = run.task.splits()
        self.train_x, self.train_y = (torch.tensor(a) for a in (splits["train"].signals, splits["train"].labels))
        self.val_x, self.val_y = (torch.tensor(a) for a in (splits["val"].signals, splits["val"].labels))
        torch.manual_seed(0)
        self.model = small_network()
        decayed = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, fused=True)
        self.params = decayed + others
        self.folder = folder
        self.total_epochs = run.plan.epochs

    def epoch(self, epoch: int) -> float:
        """Trains, evaluates and saves one epoch; returns the training time in seconds."""
        started = time.perf_counter()
        num_samples = len(self.train_y)
        order = torch.from_numpy(epoch_permutation(0, epoch, 0, num_samples))
        total_loss = torch.zeros(())
        correct = torch.zeros((), dtype=torch.int64)
        self.model.train()
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
        seconds = time.perf_counter() - started
        self.evaluate()
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "loss": total_loss}
        torch.save(state, self.folder / f"bare_{epoch}.pth")
        return seconds

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
        "--task", f"{__file__}:SmallHar", "--save-dir", str(folder), "--epochs", str(num_epochs),
        "--batch-size", str(BATCH_SIZE), "--lr", str(PEAK_LR), "--warmup-epochs", str(WARMUP_EPOCHS),
        "--max-grad-norm", str(MAX_GRAD_NORM), "--weight-decay", str(WEIGHT_DECAY), "--no-augmentation",
        "--device", "cpu", "--num-threads", "1",
    ]  # fmt: skip
    flags, problems = parse(argv, several_devices=False)
    refuse(problems)
    parallel = SingleDevice(torch.device("cpu"))
    set_up_torch(flags, parallel)
    directory = RunDirectory(folder, flags.checkpoint.keep_checkpoints, print)
    directory.acquire()
    run, notes = build_run(flags, build_task(flags), parallel, directory)
    open_run(run, notes, flags, argv, directory)
    return run


def measure(num_epochs: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        run = build_lockstep(Path(folder) / "run", num_epochs)
        bare = BareLoop(run, Path(folder))
        whole_plan = run.plan
        bare_train, bare_whole, lockstep_train, lockstep_whole = [], [], [], []
        for epoch in range(num_epochs):
            for turn in (0, 1) if epoch % 2 else (1, 0):
                started = time.perf_counter()
                if turn:
                    bare_train.append(bare.epoch(epoch))
                    bare_whole.append(time.perf_counter() - started)
                else:
                    run.plan = dataclasses.replace(whole_plan, epochs=epoch + 1)
                    train(run)
                    lockstep_whole.append(time.perf_counter() - started)
                    lockstep_train.append(run.log.training_seconds)
        run.close()
        run.directory.release()
    # The first epoch of each pays for its own warm-up.
    ratios = [a / b for a, b in zip(lockstep_whole[1:], bare_whole[1:], strict=True)]
    train_ratios = [a / b for a, b in zip(lockstep_train[1:], bare_train[1:], strict=True)]
    return {
        "bare_step_ms": round(1e3 * statistics.median(bare_train[1:]) / whole_plan.steps_per_epoch, 3),
        "lockstep_step_ms": round(1e3 * statistics.median(lockstep_train[1:]) / whole_plan.steps_per_epoch, 3),
        "epoch_ratio": round(statistics.median(ratios), 4),
        "training_ratio": round(statistics.median(train_ratios), 4),
        "epoch_ratio_quartiles": [round(q, 4) for q in statistics.quantiles(ratios, n=4)],
        "num_epochs": len(ratios),
        "steps_per_epoch": whole_plan.steps_per_epoch,
        "batch_size": BATCH_SIZE,
        "num_parameters": sum(p.numel() for p in bare.model.parameters()),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=21, help="epochs of each; the first is not counted")
    num_epochs = parser.parse_args().epochs
    real_stderr = sys.stderr
    sys.stderr = Terminal()
    try:
        result = measure(num_epochs)
    finally:
        sys.stderr = real_stderr
    print(f"bare step {result['bare_step_ms']} ms, Lockstep step {result['lockstep_step_ms']} ms")
    print(f"training an epoch, bar and logs on: {result['training_ratio']} times the bare loop (median)")
    print(f"the same with evaluation and a durable checkpoint: {result['epoch_ratio']} times")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
