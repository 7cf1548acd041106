"""The runs that `--seeds` and `--folds` ask for: ordinary command lines, each with a folder of its own."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.manifest import MANIFEST, read_manifest
from trainer.checkpoint.records import CONFIG, RESULTS, read_json
from trainer.commands.flags import Flags, parse
from trainer.commands.resume import changed_flags
from trainer.config import refuse, shown
from trainer.loading.errors import BadInput
from trainer.logs.console import say


@dataclass(frozen=True)
class Job:
    """One of several runs, and what its folder tells about it without starting it.

    name: its folder below that of all runs, for example "fold-1/seed-0". fold: from 1 on; None without folds.
    hold_out: those of its flags that say what is held out. config: every flag of `argv`, as config.json holds them.
    """

    name: str
    directory: Path
    seed: int
    fold: int | None
    hold_out: Sequence[str]
    argv: Sequence[str]
    config: Mapping[str, Any]

    def _read(self, name: str) -> dict[str, Any]:
        return read_json(self.directory / name)

    @property
    def epochs_done(self) -> int:
        try:
            entries = read_manifest(self.directory / MANIFEST)
        except OSError:
            return 0
        return entries[-1].epoch if entries else 0

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Flags that differ from those that the run was last started with, if it was: (then, now)."""
        changed = changed_flags(self._read(CONFIG).get("config", {}), self.config)
        changed.pop("--save-dir", None)  # the folder may have been moved
        return changed

    @property
    def is_finished(self) -> bool:
        """Whether it needs no process. One with other flags does: it may have to go on, which is for the run to say."""
        return bool(self._read(RESULTS)) and not self.changed

    def refuse_another_run(self) -> None:
        """Raises BadInput when the folder holds a run with another seed, or one that holds out something else."""
        for name, values in self.changed.items():
            if name == "--seed" or name in self.hold_out:
                then, now = map(shown, values)
                raise BadInput(
                    f"--save-dir {self.directory}: holds a run with {name} {then}, not {now}; choose another "
                    "--save-dir, or start over with --fresh"
                )

    def tell_changes(self) -> None:
        """For one that was finished before, with other flags."""
        changes = [f"{name} {shown(then)} instead of {shown(now)}" for name, (then, now) in self.changed.items()]
        if changes:
            say(
                f"{self.directory} was finished before, with {', '.join(changes)}; to train it anew choose another "
                "--save-dir, or add --fresh"
            )

    def entry(self) -> dict[str, Any]:
        """What summary.json says of it once it is finished; "directory" is below that of all runs."""
        results = self._read(RESULTS)
        return {
            "directory": self.name,
            "seed": self.seed,
            "fold": self.fold,
            "metrics": results["metrics"],
            "train_seconds": results["train_seconds"],
        }


def plan_jobs(flags: Flags, argv: Sequence[str], folds: Sequence[Sequence[str]]) -> list[Job]:
    """Every run that is asked for, fold by fold. Raises BadInput for a command line that a run would refuse.

    argv: the whole command line; what differs is appended, since of a flag given twice the last one counts. folds: the
    flags that hold out each fold; empty without folds.
    """
    several, first_seed = flags.several, flags.run.seed
    numbered: list[tuple[int | None, Sequence[str]]] = [*enumerate(folds, start=1)]
    jobs = []
    for fold, hold_out in numbered or [(None, ())]:
        for seed in range(first_seed, first_seed + several.seeds):
            name = "/".join([f"fold-{fold}"] * (fold is not None) + [f"seed-{seed}"] * (several.seeds > 1))
            directory = flags.checkpoint.save_dir / name
            own = ["--seeds", "1", "--folds", "0", "--seed", str(seed), "--save-dir", str(directory), *hold_out]
            own_argv = [*argv, *own, *["--no-test"] * (fold is not None)]
            own_flags, problems = parse(own_argv, flags.multi is not None)
            refuse(problems)
            # By way of JSON, which has no tuples.
            config = json.loads(json.dumps(own_flags.values()))
            jobs.append(Job(name, directory, seed, fold, hold_out, own_argv, config))
    return jobs
