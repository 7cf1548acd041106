"""Functions that each add a mistake to the program, which the tests of this folder must detect."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import trainer.checkpoint.directory
import trainer.checkpoint.file
import trainer.commands.build
import trainer.logs.run_directory
from trainer.checkpoint.directory import RunDirectory
from trainer.loading.order import Position
from trainer.loop.ema import ExponentialMovingAverage
from trainer.loop.progress import Progress
from trainer.loop.totals import Totals
from trainer.parallel.strategy import Strategy


def _after_restoring(change: Callable[[Progress], None]) -> None:
    """Makes every restore apply a change to the restored progress."""
    real = trainer.commands.build.restore_progress

    def restore(*args: Any) -> Progress:
        progress = real(*args)
        change(progress)
        return progress

    trainer.commands.build.restore_progress = restore


def position_off_by_one() -> None:
    def shift(progress: Progress) -> None:
        position = progress.position
        progress.position = Position(position.epoch, position.phase, position.samples + 1)

    _after_restoring(shift)


def moments_not_restored() -> None:
    Strategy.load_optimizer_states = lambda self, *state: None  # type: ignore[method-assign]


def average_not_restored() -> None:
    ExponentialMovingAverage.restore = lambda self, state: None  # type: ignore[method-assign]


def sums_not_restored() -> None:
    def forget(progress: Progress) -> None:
        progress.totals = {phase: Totals() for phase in progress.totals}
        progress.reported = dict.fromkeys(progress.totals, (0.0, 0.0))

    _after_restoring(forget)


def metrics_not_cut_back() -> None:
    trainer.logs.run_directory._truncated = lambda path, step, last_report: path.open("a", buffering=1)


def checkpoint_not_flushed() -> None:
    real = trainer.checkpoint.file.os.fsync

    def write(state: dict[str, Any], path: Path) -> Any:
        trainer.checkpoint.file.os.fsync = lambda descriptor: None
        try:
            return trainer.checkpoint.file.write_checkpoint(state, path)
        finally:
            trainer.checkpoint.file.os.fsync = real

    trainer.checkpoint.directory.write_checkpoint = write


def named_before_flushed() -> None:
    """Syncs the content of a checkpoint only after the rename."""
    checkpoint_not_flushed()
    flush = trainer.checkpoint.directory.flush_path

    def flush_late(path: Path) -> None:
        for checkpoint in path.glob("checkpoint_*.pth"):
            flush(checkpoint)
        flush(path)

    trainer.checkpoint.directory.flush_path = flush_late


def listed_after_named() -> None:
    """Writes the manifest only after the rename of the checkpoint."""
    write, flush = trainer.checkpoint.directory.write_manifest, trainer.checkpoint.directory.flush_path
    late: list[tuple[Any, ...]] = []

    def flush_and_write(path: Path) -> None:
        flush(path)
        while late:
            write(*late.pop())

    trainer.checkpoint.directory.write_manifest = lambda *args: late.append(args)
    trainer.checkpoint.directory.flush_path = flush_and_write


def folder_not_flushed() -> None:
    flush = trainer.checkpoint.directory.flush_path
    trainer.checkpoint.directory.flush_path = lambda path: None if path.is_dir() else flush(path)


def evicted_first() -> None:
    """Deletes old checkpoints before the new one is saved."""
    save = RunDirectory.save

    def evict_and_save(directory: RunDirectory, *args: Any) -> Path:
        for entry in directory.entries[:]:
            (directory.path / entry.file).unlink()
            directory.entries.remove(entry)
        return save(directory, *args)

    RunDirectory.save = evict_and_save  # type: ignore[method-assign]


def best_not_restored() -> None:
    def forget(progress: Progress) -> None:
        progress.best = None

    _after_restoring(forget)
