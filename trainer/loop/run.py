"""A run in progress: everything that one process trains with, and what of it a checkpoint keeps."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainer.checkpoint.background import BackgroundSaver, Snapshot
from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.snapshot import snapshot
from trainer.loading.batches import BatchLoader
from trainer.loading.errors import BadInput
from trainer.logs.run_log import SilentLog
from trainer.loop.batch_norm import RunningStatistics
from trainer.loop.ema import WeightAverage
from trainer.loop.memory_limit import MemoryLimit
from trainer.loop.plan import BatchSplit, Plan, Position
from trainer.loop.precision import Precision
from trainer.loop.schedule import LearningRate
from trainer.loop.step_results import Watch
from trainer.loop.totals import Totals, share_of
from trainer.parallel.base import Parallel
from trainer.parallel.signals import StopRequest
from trainer.task import Objective, Sums, Task


@dataclass
class Best:
    """The best validation score so far. epoch: number of completed epochs when it was reached."""

    epoch: int
    value: float


@dataclass
class Progress:
    """What changes while training, apart from weights and moments.

    epochs_since_best: as of the last validation; what early stopping looks at.
    train_seconds: wall time from the first step on, evaluation and saving included, over all sessions.
    totals: sums over this process's share of the current epoch.
    reported_loss, reported_weight: what of the totals over all processes the log has reported.
    skipped_steps: optimizer steps left out because they were not finite, and global batches left out since then.
    skipped_in_a_row: the last step skipped, and how many in a row that were.
    left_out: (epoch, phase, start, stop) of global batches that must not be trained on again.
    """

    position: Position = field(default_factory=Position)
    step: int = 0
    best: Best | None = None
    epochs_since_best: int = 0
    train_seconds: float = 0.0
    totals: Totals = field(default_factory=Totals)
    reported_loss: float = 0.0
    reported_weight: float = 0.0
    skipped_steps: int = 0
    skipped_in_a_row: tuple[int, int] = (0, 0)
    left_out: list[tuple[int, int, int, int]] = field(default_factory=list)

    def leaves_out(self, epoch: int, phase: int, start: int, stop: int) -> bool:
        """Whether a global batch is to be left out: any of its samples was in one of `left_out`."""
        return any(
            (epoch, phase) == (bad_epoch, bad_phase) and start < bad_stop and bad_start < stop
            for bad_epoch, bad_phase, bad_start, bad_stop in self.left_out
        )

    def start_totals(self) -> None:
        self.totals = Totals()
        self.reported_loss = self.reported_weight = 0.0


@dataclass
class Run:
    """One process's view of a training run. `directory` and `saver` are None on every process but the main one.

    eval_micro_batch_size: samples per forward of this process in evaluation.
    """

    task: Task
    parallel: Parallel
    precision: Precision
    objective: Objective
    net: nn.Module
    optimizers: dict[str, torch.optim.Optimizer]
    average: WeightAverage
    plan: Plan
    batches: BatchSplit
    eval_micro_batch_size: int
    memory_limit: MemoryLimit
    learning_rate: LearningRate
    loaders: dict[str, BatchLoader]
    directory: RunDirectory | None
    log: SilentLog
    stop: StopRequest
    seed: int
    max_grad_norm: float
    on_nonfinite: Literal["stop", "skip", "rollback"]
    watch: Watch
    running_statistics: RunningStatistics
    patience: int
    save_every_steps: int
    log_interval: int
    facts: dict[str, Any]
    """What a checkpoint records for the next start: flags, versions, batch arithmetic."""
    saver: BackgroundSaver | None = None
    progress: Progress = field(default_factory=Progress)
    clock: float = field(default_factory=time.monotonic)

    @property
    def is_complete(self) -> bool:
        """Whether all epochs are done, or early stopping has ended them."""
        out_of_patience = 0 < self.patience <= self.progress.epochs_since_best
        return out_of_patience or self.progress.position.epoch >= self.plan.epochs

    def close(self) -> None:
        """Ends workers, a write under way, and the log."""
        for loader in self.loaders.values():
            loader.close()
        if self.saver is not None:
            unsaved = self.saver.end()
            if unsaved is not None:
                self.log.say(unsaved)
        self.log.close()

    @property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        return sum(p.numel() for p in self.objective.parameters())

    def read_clock(self) -> None:
        """Adds the time since the last reading to `train_seconds`."""
        now = time.monotonic()
        self.progress.train_seconds += now - self.clock
        self.clock = now

    def metrics(self, split: str, sums: Sums) -> dict[str, float]:
        """A data set's metrics by name, such as "val/accuracy", from reduced sums."""
        if not sums:
            return {}
        return {f"{split}/{name}": value for name, value in self.task.summarise(sums).items()}

    def judge(self, value: float) -> bool:
        """Takes note of the monitored value of a validation; True if it is the best so far."""
        progress, (_, mode) = self.progress, self.task.monitor
        sign = 1 if mode == "max" else -1
        better = not math.isnan(value) and (progress.best is None or sign * value > sign * progress.best.value)
        if better:
            progress.best = Best(progress.position.epoch, value)
        progress.epochs_since_best = progress.position.epoch - (progress.best.epoch if progress.best else 0)
        return better

    def save(self, value: float | None = None, is_best: bool = False) -> None:
        """Copies this moment, and writes it as a checkpoint while training goes on. All processes call it.

        Raises BadInput if the one before could not be written, unless for lack of room: then it says so, and tries
        again. What is to be on the disk now needs `finish_saving`.
        """
        self.read_clock()
        self.parallel.sync_buffers(self.objective)
        totals = self.progress.totals.reduced(self.parallel)
        # As after a resume, so that an unbroken run adds up in the same order.
        self.progress.totals = share_of(totals, self.parallel)
        self.parallel.phase.enter("saving")
        self.parallel.on_main(lambda: self._save_in_background(totals, value, is_best))

    def _save_in_background(self, totals: dict[str, Tensor], value: float | None, is_best: bool) -> None:
        assert self.saver is not None
        self.saver.wait()
        self.report_saving()
        # The records of this checkpoint are with the operating system before it is; later ones a resume drops.
        self.log.flush()
        self.saver.start(Snapshot(snapshot(self._state(totals), self.saver.take_spare()), value, is_best))

    def report_saving(self) -> None:
        """Tells the user of a save for which there was no room."""
        refusal = self.saver.take_refusal() if self.saver is not None else None
        if refusal is not None:
            self.log.say(refusal)

    def finish_saving(self) -> None:
        """Returns when everything saved is on the disk. All processes call it. Raises BadInput if it cannot be."""
        self.parallel.on_main(lambda: self.saver.finish() if self.saver is not None else None)

    def _state(self, totals: dict[str, Tensor]) -> dict[str, Any]:
        progress = self.progress
        state = self.parallel.full_state(self.objective, self.optimizers)
        self._refuse_non_finite(state["model"])
        self.average.put_into(state)
        return state | {
            "scaler": self.precision.scaler.state_dict(),
            "position": asdict(progress.position),
            "step": progress.step,
            "best": asdict(progress.best) if progress.best else None,
            "epochs_since_best": progress.epochs_since_best,
            "train_seconds": progress.train_seconds,
            "totals": totals,
            "reported": [progress.reported_loss, progress.reported_weight],
            "skipped_steps": progress.skipped_steps,
            "left_out": progress.left_out,
            **self.facts,
        }

    def _refuse_non_finite(self, weights: Mapping[str, Tensor]) -> None:
        # A sum is read faster than every value is judged, and tells unless it overflows.
        finite = [torch.isfinite(value.sum()) for value in weights.values()]
        if finite and bool(torch.stack(finite).all()):
            return
        bad = [name for name, value in weights.items() if not bool(torch.isfinite(value).all())]
        if bad:
            position = self.progress.position
            epoch = position.epoch if position.at_epoch_start else position.epoch + 1
            raise BadInput(
                f"training diverged: {', '.join(bad[:3])} not finite after optimizer step {self.progress.step} (epoch "
                f"{epoch}), so nothing is saved; earlier checkpoints are intact; lower --lr "
                f"{self.learning_rate.peak:g}, lengthen --warmup-epochs or lower --max-grad-norm {self.max_grad_norm:g}"
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes back to the moment of a checkpoint. Its weights must fit: see `check_weights_fit`."""
        self.parallel.load_full_state(state, self.objective, self.optimizers)
        self.average.restore(state)
        if "training_model" in state:
            self.objective.model.load_state_dict(state["training_model"])
        if state["scaler"] and self.precision.scaler.is_enabled():
            self.precision.scaler.load_state_dict(state["scaler"])
        self.progress = Progress(
            position=Position(**state["position"]),
            step=state["step"],
            best=Best(**state["best"]) if state["best"] else None,
            epochs_since_best=state["epochs_since_best"],
            train_seconds=state["train_seconds"],
            totals=share_of(state["totals"], self.parallel),
            reported_loss=state["reported"][0],
            reported_weight=state["reported"][1],
            skipped_steps=state.get("skipped_steps", 0),
            left_out=[tuple(left_out) for left_out in state.get("left_out", [])],
        )


def check_weights_fit(model: nn.Module, state: Mapping[str, Any], source: str, hint: str) -> None:
    """Raises BadInput when a checkpoint's weights are of another model.

    source: what the message calls the checkpoint. hint: what to do about it.
    """
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in state["model"].items()}
    differences = [f"{name} is missing" for name in expected.keys() - found.keys()]
    differences += [f"{name} is unknown" for name in found.keys() - expected.keys()]
    differences += [
        f"{name} has shape {found[name]}, not {expected[name]}"
        for name in expected.keys() & found.keys()
        if expected[name] != found[name]
    ]
    if differences:
        shown = "; ".join(sorted(differences)[:3])
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise BadInput(f"{source} is of another model: {shown}{more}; {hint}")
