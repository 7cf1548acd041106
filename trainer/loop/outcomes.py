"""Stops the run, or reports a skipped step, when a loss or gradient is not finite (`--on-nonfinite`).

`Precision.step` ensures that no process updates weights in a non-finite step.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from trainer.common.errors import UnfitState
from trainer.loop.progress import Progress
from trainer.loop.watch import Log, StepRecord, Watch
from trainer.parallel.devices import LAG_STEPS, queue_of
from trainer.parallel.strategy import Strategy

MOST_SKIPPED_IN_A_ROW = 100
NUM_SAMPLES_SHOWN = 8


class StepOutcomes(Watch):
    """Detects non-finite steps, and raises UnfitState or counts them as skipped.

    advice: text for error messages that names flags which can prevent divergence.

    On the CPU, each step is checked immediately. On a GPU, this class copies `StepOutcome.alarm` to the host in groups
    of `LAG_STEPS` steps. It reads a group when the next is full, so that all processes handle alarms at the same step.
    """

    def __init__(
        self, strategy: Strategy, phases: Sequence[str], on_nonfinite: Literal["stop", "skip"], advice: str
    ) -> None:
        self._strategy, self._phases, self._on_nonfinite, self._advice = strategy, phases, on_nonfinite, advice
        self._queue = queue_of(strategy.device)
        self._progress = Progress()
        self._new: list[StepRecord] = []
        self._sent: list[StepRecord] = []
        self._alarms: Callable[[], Any] = list

    def after_step(self, progress: Progress, record: StepRecord | None, log: Log) -> None:
        self._progress = progress
        if record is None:
            return
        if not self._queue.lag:
            if record.outcome.alarm:
                self._deal_with(record, log)
            return
        self._new.append(record)
        if len(self._new) == LAG_STEPS:
            self._receive(log)

    def settle(self, log: Log) -> None:
        self._strategy.group.barrier()
        if self._queue.lag:
            self._receive(log)
            self._receive(log)

    def _receive(self, log: Log) -> None:
        """Handles the group of alarms that is being copied, and starts to copy the next group."""
        sent, alarms = self._sent, self._alarms()
        self._sent, self._new = self._new, []
        if self._sent:
            values = torch.stack([torch.as_tensor(record.outcome.alarm) for record in self._sent])
            self._alarms = self._queue.fetch(values)
        else:
            self._alarms = list
        for record, alarm in zip(sent, alarms, strict=True):
            if alarm:
                self._deal_with(record, log)

    def _deal_with(self, record: StepRecord, log: Log) -> None:
        """Raises UnfitState, or counts the non-finite step as skipped. All processes must call this method."""
        account, progress = self._describe(record), self._progress
        if self._on_nonfinite == "stop":
            raise self._divergence(account, is_first=record.number == 1)
        progress.skipped_steps += 1
        last, in_a_row = progress.skipped_in_a_row
        progress.skipped_in_a_row = (record.number, in_a_row + 1 if record.number == last + 1 else 1)
        if progress.skipped_in_a_row[1] > MOST_SKIPPED_IN_A_ROW:
            raise self._divergence(account, f"the {MOST_SKIPPED_IN_A_ROW} steps before it were not finite either; ")
        log.say(f"Skipped: {account}. Steps skipped so far: {progress.skipped_steps}.")

    def _describe(self, record: StepRecord) -> str:
        """Describes a non-finite step: its cause, rank and samples. All processes must call this method."""
        step, world_size = record.planned, self._strategy.group.world_size
        own_loss_is_bad = torch.zeros(world_size, dtype=torch.float64)
        loss = record.sums.get("loss", torch.zeros(()))  # with --parts, a process may have no samples
        own_loss_is_bad[self._strategy.group.rank] = not bool(torch.isfinite(loss).all())
        ranks = self._strategy.group.sum(own_loss_is_bad).nonzero().flatten().tolist()
        if ranks:
            cause = "the loss" + (f" of rank {', '.join(map(str, ranks))}" if world_size > 1 else "")
        else:
            cause = "the gradient of an unknown rank" if world_size > 1 else "the gradient"
        samples = record.order.samples(step.epoch, step.start, step.end).tolist()
        shown = ", ".join(map(str, samples[:NUM_SAMPLES_SHOWN]))
        more = f" and {len(samples) - NUM_SAMPLES_SHOWN} more" if len(samples) > NUM_SAMPLES_SHOWN else ""
        phase = f", phase {self._phases[step.phase]}" if len(self._phases) > 1 else ""
        return (
            f"{cause} is not finite in optimizer step {record.number} (epoch {step.after.epoch + 1}{phase}), "
            f"whose global batch has {len(samples)} samples: {shown}{more}"
        )

    def _divergence(self, account: str, in_vain: str = "", is_first: bool = False) -> UnfitState:
        """Returns the error that ends the run. in_vain: text about skipped steps. is_first: whether step 1 failed."""
        skip = "" if in_vain else ", or skip such steps with --on-nonfinite skip"
        if is_first:
            return UnfitState(
                f"training diverged: {account}; the weights were still the initial weights; check these samples, the "
                f"flags that scale or augment them, and the model{skip}"
            )
        return UnfitState(
            f"training diverged: {account}; {in_vain}the step was not applied, and earlier checkpoints are intact; "
            f"{self._advice}; also check these samples{skip}"
        )
