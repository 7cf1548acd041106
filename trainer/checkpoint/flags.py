"""The flags of the run directory."""

from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.retention import Retention
from trainer.config import FlagGroup, flag
from trainer.task import Task


@dataclass
class CheckpointFlags(FlagGroup):
    """The run directory: saving, resuming, evaluating"""

    save_dir: Path = flag(
        Path("checkpoints"),
        "everything of this run; an unfinished run in it is resumed; if not given, a folder named after the task",
        from_record="ignored",
    )
    save_every_steps: int = flag(0, "also save every so many steps; 0 is off", at_least=0)
    save_every_minutes: float = flag(
        0.0, "also save when so much time has passed since the last checkpoint; 0 is off", at_least=0
    )
    keep_checkpoints: int = flag(3, "newest checkpoints to keep; 0 keeps all", metavar="N", at_least=0)
    keep_best: int = flag(1, "of those with the best validation scores so many are kept too", metavar="K", at_least=1)
    resume_from: Path | None = flag(
        None, "go on from this checkpoint file instead of the newest in --save-dir", from_record="refused"
    )
    init_from: Path | None = flag(
        None, "start with the weights of this checkpoint file, and nothing else of it; a plain state dict will do",
        from_record="refused",
    )  # fmt: skip
    init_from_partial: Path | None = flag(
        None, "the same with as many of its weights as the model has by name and shape; says which these are",
        from_record="refused",
    )  # fmt: skip
    fresh: bool = flag(
        False, "start over; what --save-dir holds is moved to a folder previous-N inside it", from_record="ignored"
    )
    eval_only: bool = flag(
        False,
        "do not train: score the best weights of --save-dir (or --resume-from FILE), on validation and test sets",
        from_record="ignored",
    )

    def retention(self, task: Task) -> Retention:
        """Which checkpoints stay of a run of this task."""
        return Retention(self.keep_checkpoints, self.keep_best, mode=task.monitor[1])

    def problems(self) -> list[str]:
        found = []
        files = {
            "--resume-from": self.resume_from,
            "--init-from": self.init_from,
            "--init-from-partial": self.init_from_partial,
        }
        for name, path in files.items():
            if path is not None and not path.is_file():
                found.append(f"{name} {path}: {'is not a file' if path.exists() else 'does not exist'}")
        if self.resume_from is not None and self.init_from is not None:
            found.append("--resume-from and --init-from: exclude each other; the first goes on, the second starts anew")
        if self.init_from_partial is not None:
            others = {"--resume-from": self.resume_from, "--init-from": self.init_from, "--eval-only": self.eval_only}
            found += [
                f"{name} and --init-from-partial: exclude each other; give one"
                for name, value in others.items()
                if value
            ]
        if self.fresh and self.resume_from is not None:
            found.append("--fresh and --resume-from: exclude each other; to start from weights use --init-from")
        if self.eval_only and self.fresh:
            found.append("--eval-only and --fresh: exclude each other; a fresh directory has nothing to score")
        return found
