"""Which runs `--seeds` and `--folds` ask for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config import FlagGroup, flag


@dataclass
class SeveralFlags(FlagGroup):
    """Several runs"""

    seeds: int = flag(
        1, "train with so many seeds, from --seed on, each in a folder of --save-dir; then show mean, deviation and "
        "ensemble. One run per GPU at a time; on the CPU as many at once as there are cores, with --num-threads 1 "
        "unless you give another number: small models run better side by side than on several threads each",
        metavar="N", at_least=1,
    )  # fmt: skip
    folds: int = flag(
        0, "cross-validate: so many runs in the same manner, each scored on a part of the training data that it holds "
        "out; the test set is left alone; 0 is off", metavar="K", at_least=0,
    )  # fmt: skip

    def problems(self) -> list[str]:
        return ["--folds 1: must be at least 2, or 0 for none"] if self.folds == 1 else []

    @property
    def wanted(self) -> bool:
        """Whether the command line asks for more than one run."""
        return self.seeds > 1 or self.folds > 0

    @property
    def as_given(self) -> str:
        """These flags as a message names them."""
        given = [f"--seeds {self.seeds}"] * (self.seeds > 1) + [f"--folds {self.folds}"] * (self.folds > 0)
        return " ".join(given)


@dataclass(frozen=True)
class Variant:
    """One of several runs: an ordinary command line with a folder of its own.

    name: its folder below that of all runs, for example "fold-1/seed-0". fold: from 1 on; None without folds.
    fold_flags: those of its flags that say what is held out.
    """

    name: str
    directory: Path
    seed: int
    fold: int | None
    fold_flags: tuple[str, ...]
    argv: tuple[str, ...]


def variants(
    several: SeveralFlags,
    first_seed: int,
    save_dir: Path,
    argv: Sequence[str],
    folds: Sequence[Sequence[str]],
) -> list[Variant]:
    """Every run that is asked for, fold by fold.

    argv: the whole command line; what differs is appended, since of a flag given twice the last one counts. folds: the
    flags that hold out each fold; empty without folds.
    """
    numbered: list[tuple[int | None, Sequence[str]]] = [*enumerate(folds, start=1)]
    found = []
    for fold, fold_flags in numbered or [(None, ())]:
        for seed in range(first_seed, first_seed + several.seeds):
            parts = [f"fold-{fold}"] * (fold is not None) + [f"seed-{seed}"] * (several.seeds > 1)
            name = "/".join(parts)
            own = ["--seeds", "1", "--folds", "0", "--seed", str(seed), "--save-dir", str(save_dir / name)]
            own += [*fold_flags, "--no-test"] if fold is not None else []
            found.append(Variant(name, save_dir / name, seed, fold, tuple(fold_flags), (*argv, *own)))
    return found
