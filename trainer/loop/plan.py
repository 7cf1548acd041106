"""Position in a run <-> (epoch, phase, global batch). Needs no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.config import FlagGroup, flag
from trainer.loading.order import Position


@dataclass
class BatchFlags(FlagGroup):
    """Batches"""

    batch_size: int = flag(32, "samples per device per forward", at_least=1)
    grad_accum_steps: int = flag(1, "forwards per optimizer step", at_least=1)
    global_batch_size: int | None = flag(
        None, "samples per optimizer step over all devices; --grad-accum-steps then follows from it", at_least=1
    )
    eval_batch_size: int | None = flag(
        None, "samples per device per forward in evaluation (default: --batch-size)", at_least=1
    )

    def problems(self) -> list[str]:
        if self.global_batch_size is not None and self.grad_accum_steps != 1:
            return [
                f"--global-batch-size {self.global_batch_size} and --grad-accum-steps {self.grad_accum_steps}: "
                "exclude each other; the second follows from the first"
            ]
        return []


@dataclass(frozen=True)
class Plan:
    """The arithmetic of a run: `epochs` passes over phases of `phase_sizes` samples, in global batches.

    eval_every: epochs from one validation to the next; None where there is no validation set.
    """

    epochs: int
    phase_sizes: tuple[int, ...]
    global_batch_size: int
    eval_every: int | None = 1

    @property
    def samples_per_epoch(self) -> int:
        return sum(self.phase_sizes)

    @property
    def steps_per_epoch(self) -> int:
        return sum(-(-size // self.global_batch_size) for size in self.phase_sizes)

    def validates_after(self, num_epochs: int) -> bool:
        """Whether the validation set is scored after so many epochs: every `eval_every`, and after the last."""
        if self.eval_every is None:
            return False
        return num_epochs % self.eval_every == 0 or num_epochs == self.epochs

    def rest_of_phase(self, position: Position) -> Iterator[tuple[int, int]]:
        """(start, stop) of each global batch that is left in the phase; the last one may be short."""
        size = self.phase_sizes[position.phase]
        for start in range(position.samples, size, self.global_batch_size):
            yield start, min(start + self.global_batch_size, size)

    def consumed(self, position: Position) -> int:
        """Samples of the current epoch, over all its phases."""
        return sum(self.phase_sizes[: position.phase]) + position.samples

    def epochs_done(self, position: Position) -> float:
        """Training progress in epochs, in [0, epochs]."""
        return position.epoch + self.consumed(position) / self.samples_per_epoch


@dataclass(frozen=True)
class BatchSplit:
    """How a global batch is cut.

    batch_size: samples per device per forward, at the most. micro_batch_size: the same per process (a
    DataParallel process feeds several devices). grad_accum_steps: forwards per step. global_batch_size: samples
    per step over all devices.
    """

    batch_size: int
    micro_batch_size: int
    grad_accum_steps: int
    global_batch_size: int


def split_batch(
    batch_size: int, grad_accum_steps: int, global_batch_size: int | None, num_devices: int, world_size: int
) -> BatchSplit:
    """Derives what the user left open.

    With `global_batch_size` given, `batch_size` is the most that one device takes at once, and the number of
    accumulation steps follows; a share that does not divide evenly is trained on exactly all the same.
    """
    devices_per_process = num_devices // world_size
    if global_batch_size is None:
        global_batch_size = batch_size * grad_accum_steps * num_devices
    else:
        share = -(-global_batch_size // num_devices)
        grad_accum_steps = -(-share // batch_size)
        batch_size = -(-share // grad_accum_steps)
    return BatchSplit(batch_size, batch_size * devices_per_process, grad_accum_steps, global_batch_size)
