"""What the trainer's loop costs over a bare hand-written one on the GPU, with a short step and one of 20 ms.

The first is all launching of kernels, so that whatever the host does more is seen; the second is all work of the GPU,
behind which the host must hide. Both loops train linear layers with the same batches, page-locked copies, clipping,
schedule and fused AdamW, and take turns in one process, a block of steps each; figures are medians of neighbours.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.on_gpu.part import ROOT, Report, Setting
from benchmarks.opened_run import opened_run
from benchmarks.overhead import BLOCK_STEPS, Terminal, Turns
from trainer.config import FlagGroup, flag
from trainer.loading.order import EpochOrder
from trainer.loop.train import train
from trainer.task import Objective, Task

NUM_INPUTS = 64
PEAK_LR, MAX_GRAD_NORM, WEIGHT_DECAY = 1e-4, 1.0, 0.01
LONG_STEP_S = 0.02


class Rows:
    """Random rows, in memory."""

    def __init__(self, num: int) -> None:
        self.rows = np.random.default_rng(0).normal(size=(num, NUM_INPUTS)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, keys):
        return {"x": self.rows[keys.index]}


@dataclass
class LayersFlags(FlagGroup):
    """Task: linear layers"""

    width: int = flag(64, "units of a layer", at_least=1)
    num_layers: int = flag(1, "layers of width x width", at_least=0)
    num_train: int = flag(1000, "training rows", at_least=1)


class Reproduction(Objective):
    def forward(self, batch, phase="train"):
        return {"loss": F.mse_loss(self.model(batch["x"]), batch["x"], reduction="none").mean(1).sum()}


def layers(width: int, num_layers: int) -> nn.Sequential:
    between = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num_layers)]
    return nn.Sequential(nn.Linear(NUM_INPUTS, width), nn.ReLU(), *between, nn.Linear(width, NUM_INPUTS))


class Layers(Task):
    Config = LayersFlags
    monitor = ("val/loss", "min")

    def splits(self):
        return {"train": Rows(self.config.num_train), "val": Rows(1), "test": Rows(1)}

    def build_objective(self):
        return Reproduction(layers(self.config.width, self.config.num_layers))

    def summarise(self, sums):
        return {"loss": float(sums["loss"] / sums["weight"])}


@dataclass(frozen=True)
class Size:
    width: int
    num_layers: int
    batch_size: int
    steps_per_epoch: int

    @property
    def num_rows(self) -> int:
        return self.batch_size * self.steps_per_epoch


class BareLoop:
    """What one would write by hand for such a model on this device."""

    def __init__(self, setting: Setting, size: Size) -> None:
        self.device, self.batch_size = torch.device(setting.device), size.batch_size
        self.rows = torch.from_numpy(Rows(size.num_rows).rows)
        self.model = layers(size.width, size.num_layers).to(self.device)
        decayed = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, fused=True)
        self.params = decayed + others

    def batch(self, index: Tensor) -> Tensor:
        rows = self.rows[index]
        return rows.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else rows

    def steps(self) -> Iterator[None]:
        """Trains for ever, one step at a time."""
        self.model.train()
        for epoch in range(10**6):
            total_loss = torch.zeros((), device=self.device)
            order = torch.from_numpy(EpochOrder(0, epoch, 0, len(self.rows)).take(0, len(self.rows)))
            for start in range(0, len(self.rows), self.batch_size):
                for group in self.optimizer.param_groups:
                    group["lr"] = PEAK_LR
                x = self.batch(order[start : start + self.batch_size])
                loss = F.mse_loss(self.model(x), x)
                loss.backward()
                nn.utils.clip_grad_norm_(self.params, MAX_GRAD_NORM)
                self.optimizer.step()
                self.optimizer.zero_grad()
                total_loss += loss.detach() * len(x)
                yield

    def end_epoch(self) -> None:
        """Only steps are compared here."""


def measure(setting: Setting, report: Report) -> None:
    short = Size(*setting.pick((64, 1, 64, 200), (8, 1, 4, 40)))
    report.attempt("short step", partial(compare, setting, report, "short step", short))
    report.attempt("step of 20 ms", lambda: compare(setting, report, "step of 20 ms", long_one(setting)))


def long_one(setting: Setting) -> Size:
    """A large model with the batch whose bare step comes closest to 20 ms from below."""
    size, most = Size(*setting.pick((4096, 8, 64, 200), (16, 2, 4, 40))), setting.pick(16384, 8)
    while size.batch_size < most:
        larger = replace(size, batch_size=2 * size.batch_size)
        if bare_step_s(setting, larger) > LONG_STEP_S:
            break
        size = larger
    return size


def bare_step_s(setting: Setting, size: Size, num_steps: int = 10) -> float:
    steps = BareLoop(setting, size).steps()
    for _ in range(3):
        next(steps)
    setting.synchronise()
    started = time.perf_counter()
    for _ in range(num_steps):
        next(steps)
    setting.synchronise()
    return (time.perf_counter() - started) / num_steps


def compare(setting: Setting, report: Report, name: str, size: Size) -> None:
    num_epochs = setting.pick(4 if size.width > 1000 else 31, 3)  # a checkpoint after each
    argv = [
        "--task", f"{ROOT / 'benchmarks' / 'on_gpu' / 'loop.py'}:Layers", "--epochs", num_epochs, "--eval-every", 1000,
        "--width", size.width, "--num-layers", size.num_layers, "--num-train", size.num_rows,
        "--batch-size", size.batch_size, "--lr", PEAK_LR, "--max-grad-norm", MAX_GRAD_NORM, "--amp", "off",
        "--weight-decay", WEIGHT_DECAY, "--keep-checkpoints", 1, "--no-test",
    ]  # fmt: skip
    run = opened_run(setting.folder / name, list(map(str, argv)), setting.device)
    turns = Turns(run, BareLoop(setting, size), setting.synchronise)
    with redirect_stderr(Terminal()):  # on which the progress bar is drawn
        train(run)
    run.close()
    run.directory.release()
    blocks = turns.blocks[len(turns.blocks) // num_epochs :]  # the first epoch pays for warm-up
    ratios = [ours / bare for ours, bare in blocks]
    ours, bare = (statistics.median(times) / BLOCK_STEPS for times in zip(*blocks, strict=True))
    report.figure(f"{name}, batch, width, layers", [size.batch_size, size.width, size.num_layers])
    report.figure(f"{name}, bare ms", round(1e3 * bare, 4))
    report.figure(f"{name}, lockstep ms", round(1e3 * ours, 4))
    report.figure(f"{name}, ratio", round(statistics.median(ratios), 4))
    report.figure(f"{name}, quartiles of the ratio", [round(q, 4) for q in statistics.quantiles(ratios, n=4)])
    report.figure(f"{name}, blocks", len(blocks))
