"""What the folder of one of several runs tells about it, without starting it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.checkpoint.manifest import MANIFEST, DamagedManifest, read_manifest
from trainer.checkpoint.records import CONFIG, RESULTS, read_json
from trainer.commands.flags import parse
from trainer.commands.resume import changed_flags
from trainer.commands.variants import Variant
from trainer.config import refuse, shown
from trainer.loading.errors import BadInput


@dataclass(frozen=True)
class VariantFolder:
    """A variant and its folder. config: every flag of its command line, as config.json holds them."""

    variant: Variant
    config: Mapping[str, Any]

    @classmethod
    def of(cls, variant: Variant, several_devices: bool) -> "VariantFolder":
        """Raises BadInput for a command line that the run would refuse."""
        flags, problems = parse(variant.argv, several_devices)
        refuse(problems)
        return cls(variant, json.loads(json.dumps(flags.values())))

    def _read(self, name: str) -> dict[str, Any]:
        return read_json(self.variant.directory / name)

    @property
    def epochs_done(self) -> int:
        try:
            entries = read_manifest(self.variant.directory / MANIFEST)
        except (OSError, DamagedManifest):
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
        changed = self.changed
        for name in ("--seed", *(token for token in self.variant.fold_flags if token.startswith("--"))):
            if name in changed:
                then, now = map(shown, changed[name])
                raise BadInput(
                    f"--save-dir {self.variant.directory}: holds a run with {name} {then}, not {now}; choose another "
                    "--save-dir, or start over with --fresh"
                )

    def changes_text(self) -> str:
        """For a message; empty without changes."""
        return ", ".join(f"{name} {shown(then)} instead of {shown(now)}" for name, (then, now) in self.changed.items())

    def entry(self) -> dict[str, Any]:
        """What summary.json says of a finished run; "directory" is below that of all runs."""
        results = self._read(RESULTS)
        return {
            "directory": self.variant.name,
            "seed": self.variant.seed,
            "fold": self.variant.fold,
            "metrics": results["metrics"],
            "train_seconds": results["train_seconds"],
        }
