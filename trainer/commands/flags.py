"""A whole command line as one typed object."""

import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.flags import CheckpointFlags
from trainer.commands.config_files import ConfigFile, ConfigFlags, as_toml, with_origins
from trainer.common.errors import UserError, printable
from trainer.common.files import require_regular
from trainer.common.validation import split_name, whole
from trainer.config import FlagGroup, Option, flag, flag_name, flag_values, options
from trainer.loop.blocks import BlockFlags
from trainer.loop.learning_flags import LearningFlags
from trainer.loop.plan import BatchFlags
from trainer.loop.precision import PrecisionFlags
from trainer.parallel.devices import DeviceFlags, MultiDeviceFlags, usable_gpus
from trainer.registry import workloads
from trainer.task import Task

EXPORTERS: dict[str, tuple[str, ...]] = {".pt2": (), ".onnx": ("onnx", "onnxscript")}
"""Kinds of files that `--export` writes, with the packages that it takes beside torch."""
DEFAULT_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lockstep"


@dataclass
class RunFlags(FlagGroup):
    """What to train"""

    task: str = flag(
        "", lambda: f"{', '.join(workloads())}, or a task of your own: path/to/file.py:ClassName", local=True,
        from_record="refused",
    )  # fmt: skip
    epochs: int | None = flag(None, "passes over the training data (default: 20)", at_least=1)
    max_steps: int | None = flag(
        None, "optimizer steps of the whole run, instead of --epochs; it may end within an epoch", at_least=1
    )
    max_minutes: float = flag(
        0.0, "pause the run, with everything saved, when it has been trained for so long over all its starts; 0 is off",
        at_least=0,
    )  # fmt: skip
    eval_every: int | None = flag(
        None, "score the validation set after every so many epochs, and after the last (default: 1)", metavar="EPOCHS",
        at_least=1,
    )  # fmt: skip
    eval_every_steps: int | None = flag(
        None, "the same in optimizer steps, also within an epoch", metavar="STEPS", at_least=1
    )
    eval_start: bool = flag(
        False, "score the validation set before the first step too: weights that training does not improve are kept",
    )  # fmt: skip
    seed: int = flag(0, "of initial weights, sample order, augmentation and dropout", at_least=0, below=2**63)
    num_workers: int = flag(
        0, "data-loading processes per rank, and as many more for evaluation once it begins; 0 loads in the trainer, "
        "which is fastest where a batch is only gathered from memory", local=True, at_least=0,
    )  # fmt: skip
    cache_dir: Path = flag(DEFAULT_CACHE, "where parsed data sets are kept, shared by all ranks and runs", local=True)
    log_interval: int = flag(50, "optimizer steps between two log lines", metavar="STEPS", at_least=1)
    logger: tuple[str, ...] | None = flag(
        None, "also log to a logger of your own: path/to/file.py:ClassName; several are allowed", metavar="FILE:CLASS",
        local=True, from_record="refused",
    )  # fmt: skip
    no_test: bool = flag(
        False, "leave the test set alone, and score the validation set with the last weights instead: for comparing "
        "settings",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.epochs is None and self.max_steps is None:
            self.epochs = 20
        if self.eval_every is None and self.eval_every_steps is None:
            self.eval_every = 1

    def problems(self) -> list[str]:
        found = []
        if self.epochs is not None and self.max_steps is not None:
            found.append(f"--epochs {self.epochs} and --max-steps {self.max_steps}: exclude each other; give one")
        if self.eval_every is not None and self.eval_every_steps is not None:
            given = f"--eval-every {self.eval_every} and --eval-every-steps {self.eval_every_steps}"
            found.append(f"{given}: exclude each other; give one")
        for logger in self.logger or ():
            try:
                split_name(logger, "--logger")
            except UserError as error:
                found.append(str(error))
        return found

    @property
    def length_flag(self) -> str:
        """What says how long the run is."""
        return "--epochs" if self.max_steps is None else "--max-steps"


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


@dataclass
class PredictFlags(FlagGroup):
    """Labelling new data"""

    predict: Path | None = flag(
        None, "do not train: label this file with the best weights of --save-dir (or --resume-from FILE), by the flags "
        "of that run; what it holds, the task says", metavar="FILE", from_record="refused",
    )  # fmt: skip
    output: Path | None = flag(
        None, "of --predict: the CSV table to write (default: it goes to standard output)", metavar="FILE",
        from_record="refused",
    )  # fmt: skip

    def problems(self) -> list[str]:
        if self.predict is not None and self.predict.exists() and not self.predict.is_dir():
            try:
                require_regular(self.predict)
            except OSError as error:
                return [f"--predict {self.predict}: {error.strerror}; give a file or a folder"]
        if self.output is None:
            return []
        given, target = f"--output {self.output}", self.output.resolve()
        if self.predict is None:
            return [f"{given}: belongs to --predict; leave it out"]
        if target.exists() and not target.is_file():
            return [f"{given}: is not a file; name one, or leave it out to print the table"]
        if target == self.predict.resolve():
            return [f"{given}: would overwrite what is to be labelled; name another file"]
        return _problems_of_folder(given, target)


@dataclass
class ExportFlags(FlagGroup):
    """Taking the model elsewhere"""

    export: Path | None = flag(
        None, "do not train: write the model with the best weights of --save-dir (or --resume-from FILE), by the flags "
        "of that run, as a program that runs without this trainer: a .pt2 of torch.export, or an .onnx", metavar="FILE",
        from_record="refused",
    )  # fmt: skip

    def problems(self) -> list[str]:
        if self.export is None:
            return []
        given, target = f"--export {self.export}", self.export.resolve()
        if target.suffix not in EXPORTERS:
            return [f"{given}: must end in {' or '.join(EXPORTERS)}"]
        missing = [name for name in EXPORTERS[target.suffix] if importlib.util.find_spec(name) is None]
        if missing:
            return [f"{given}: needs {' and '.join(missing)}: pip install {' '.join(missing)}, or name a .pt2"]
        if target.exists() and not target.is_file():
            return [f"{given}: is not a file; name another"]
        return _problems_of_folder(given, target)


def _problems_of_folder(given: str, target: Path) -> list[str]:
    """Of the folder that a file is to be written to."""
    if not target.parent.is_dir():
        return [f"{given}: there is no folder {target.parent}; create it first"]
    if not os.access(target.parent, os.W_OK):
        return [f"{given}: cannot be written: no permission to write into {target.parent}; name another file"]
    return []


TRAINER_GROUPS: tuple[type, ...] = (
    RunFlags, BatchFlags, LearningFlags, PrecisionFlags, BlockFlags, DeviceFlags, CheckpointFlags, SeveralFlags,
    PredictFlags, ExportFlags, ConfigFlags, MultiDeviceFlags,
)  # fmt: skip
"""The flags that every task has, in the order of `Flags`; those of several devices come last."""


@dataclass(frozen=True)
class FromRun:
    """Flags that a command line takes from the run that it resumes or uses, where they are not the defaults.

    path: its folder, or its checkpoint that is named. values: each flag with its value.
    """

    path: Path = Path()
    values: Sequence[tuple[Option, Any]] = ()

    @property
    def argv(self) -> list[str]:
        """The command line that gives them."""
        return [word for option, value in self.values for word in option.argument(value)]

    @property
    def remarks(self) -> list[str]:
        """One line for the user, if there are any."""
        flags = ", ".join(option.as_typed(value) for option, value in self.values)
        return [printable(f"From the run in {self.path}: {flags}")] if self.values else []


@dataclass
class Flags:
    """A whole command line, group by group."""

    run: RunFlags
    batch: BatchFlags
    learning: LearningFlags
    precision: PrecisionFlags
    blocks: BlockFlags
    devices: DeviceFlags
    checkpoint: CheckpointFlags
    several: SeveralFlags
    prediction: PredictFlags
    exporting: ExportFlags
    files: ConfigFlags
    multi: MultiDeviceFlags | None
    task: Any
    task_type: type[Task] | None
    tool: Any = None
    """Of a program that does something else with a training run than train it: its own group."""
    origins: Mapping[str, ConfigFile] = dataclasses.field(default_factory=dict, compare=False)
    """Which file or run a value is from, by the name of the flag."""
    given: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
    """The names of flags that the command line or a file states, were it their default."""
    from_run: FromRun = dataclasses.field(default_factory=FromRun, compare=False)

    def refusal(self, problem: str) -> UserError:
        """Of what only the data show to be wrong."""
        return UserError(with_origins(problem, self.origins))

    @contextmanager
    def telling_origins(self) -> Iterator[None]:
        """Has a UserError say which file or run a flag is from that it names."""
        try:
            yield
        except UserError as error:
            if (told := with_origins(str(error), self.origins)) == str(error):
                raise
            raise UserError(told) from None

    def values(self) -> dict[str, Any]:
        """Every flag of a training run by name, in a form that JSON and a checkpoint can hold."""
        return flag_values(*self._groups) | (recorded_values(self.task) if self.task is not None else {})

    def values_alike(self) -> dict[str, Any]:
        """The flags of a training run, by name, that must have one value on all of its processes."""
        return flag_values(*self._groups, *([self.task] if self.task is not None else []), with_local=False)

    @property
    def _groups(self) -> list[FlagGroup]:
        """Flags of the trainer."""
        groups = [self.run, self.batch, self.learning, self.precision, self.blocks, self.devices, self.checkpoint]
        return groups if self.multi is None else [*groups, self.multi]

    def as_toml(self) -> str:
        """Every setting, as a file for `--config`."""
        groups = (
            self.run, self.batch, self.learning, self.precision, self.blocks, self.devices, self.checkpoint,
            self.several, self.prediction, self.exporting, self.multi, self.task,
        )  # fmt: skip
        return as_toml([group for group in groups if group is not None])


def recorded_values(of_task: FlagGroup) -> dict[str, Any]:
    """`flag_values` of a task's flags, with paths that lead to the same files from any folder."""
    values = flag_values(of_task)
    for field, option in options(type(of_task)).items():
        value = getattr(of_task, field)
        if option.type is Path and not option.hidden and value not in (None, option.default):
            values[option.name] = option.to_plain(tuple(map(whole, value)) if option.is_list else whole(value))
    return values


def contradictions(flags: Flags) -> list[str]:
    """What is wrong with flags of different groups taken together."""
    found = []
    warmup, epochs = flags.learning.warmup_epochs, flags.run.epochs
    if warmup is not None and epochs is not None and warmup > epochs:
        found.append(f"--warmup-epochs {warmup:g}: must not exceed --epochs {epochs}")
    if flags.learning.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        found.append(f"--optimizer muon: torch {torch.__version__} has no Muon; take torch 2.9, or another optimizer")
    if flags.learning.optimizer == "muon" and flags.multi is not None and flags.multi.multi_gpu == "fsdp":
        found.append(
            "--optimizer muon: orthogonalises whole matrices, of which a process of --multi-gpu fsdp has a part; take "
            "--multi-gpu ddp, or another optimizer"
        )
    given = flags.checkpoint
    uses = {"--predict": flags.prediction.predict, "--export": flags.exporting.export}
    asked = [name for name, value in uses.items() if value is not None]
    for use in asked:
        others = {
            "--fresh": given.fresh, "--init-from": given.init_from, "--init-from-partial": given.init_from_partial,
            "--eval-only": given.eval_only,
        }  # fmt: skip
        found += [f"{use} and {name}: exclude each other; give one" for name, value in others.items() if value]
        if flags.multi is not None:
            found.append(f"{use}: runs on one device; use main.py")
    if len(asked) > 1:
        found.append(f"{' and '.join(asked)}: exclude each other; give one")
    if flags.multi is not None:
        found += _contradictions_of_devices(flags, flags.multi)
    return found + _contradictions_of_several(flags)


def _contradictions_of_devices(flags: Flags, multi: MultiDeviceFlags) -> list[str]:
    found, device = [], flags.devices.device
    if multi.multi_gpu == "dp" and flags.blocks.compile:
        found.append("--compile: a replica of --multi-gpu dp cannot be compiled; take --multi-gpu ddp")
    if ":" in device:
        found.append(f"--device {device}: names one device; with --multi-gpu choose GPUs by --gpu-ids")
    if multi.gpu_ids is not None and device == "cpu":
        found.append("--device cpu and --gpu-ids: exclude each other; give one")
    on_gpus = bool(usable_gpus(device, multi.gpu_ids))
    if multi.backend == "nccl" and not on_gpus:
        found.append("--backend nccl: carries nothing between CPUs, and this run is on them; use --backend gloo")
    if multi.sync_bn and (multi.multi_gpu != "ddp" or not on_gpus):
        found.append("--sync-bn: needs --multi-gpu ddp on GPUs; torch has it for nothing else")
    return found


def _contradictions_of_several(flags: Flags) -> list[str]:
    """What does not go with `--seeds` and `--folds`."""
    several, given = flags.several, flags.checkpoint
    if not several.wanted:
        return []
    single = {
        "--eval-only": given.eval_only, "--resume-from": given.resume_from, "--predict": flags.prediction.predict,
        "--export": flags.exporting.export,
    }  # fmt: skip
    found = [
        f"{several.as_given} and {name}: exclude each other; {name} takes the folder of one run as --save-dir"
        for name, value in single.items()
        if value
    ]
    if several.folds and flags.task_type is not None:
        found += [
            f"--folds {several.folds} and {flag_name(field.name)}: exclude each other; a fold says what is held out"
            for field in fields(flags.task)
            if field.name in flags.task_type.hold_out_flags and getattr(flags.task, field.name) != field.default
        ]
    return found
