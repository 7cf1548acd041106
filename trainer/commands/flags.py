"""All flags of a command line in one typed object."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from trainer.commands.config_files import ConfigFile, as_toml, with_origins
from trainer.common import forms
from trainer.common.errors import UserError, printable
from trainer.common.validation import absolute
from trainer.config import FlagGroup, Option, flag_name, flag_values, options
from trainer.flags import GROUPS, MultiDeviceFlags, TrainerFlags
from trainer.parallel.devices import usable_gpus
from trainer.task import Task


@dataclass(frozen=True)
class FromRun:
    """Flags that differ from their defaults in the run that a command resumes or uses.

    path: the run's folder or checkpoint.
    """

    path: Path = Path()
    values: Sequence[tuple[Option, Any]] = ()

    @property
    def argv(self) -> list[str]:
        return [word for option, value in self.values for word in option.argument(value)]

    @property
    def remarks(self) -> list[str]:
        flags = ", ".join(option.as_typed(value) for option, value in self.values)
        return [printable(f"From the run in {self.path}: {flags}")] if self.values else []


@dataclass
class Flags(TrainerFlags):
    """The trainer's groups of flags, and the task's own flags."""

    task: Any
    task_type: type[Task] | None
    tool: Any = None
    """Flags of a program other than the trainer, such as the profiler."""
    origins: Mapping[str, ConfigFile] = dataclasses.field(default_factory=dict, compare=False)
    """The file or run that set a value, by flag."""
    given: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
    """Flags given on the command line or in a file, even if given with their default value."""
    from_run: FromRun = dataclasses.field(default_factory=FromRun, compare=False)
    left_out: Sequence[str] = dataclasses.field(default=(), compare=False)
    """A line for each task default or file setting that a later file or the command line makes ineffective."""

    def refusal(self, problem: str) -> UserError:
        """Builds a UserError from a problem; appends the files or runs that set the flags mentioned in the problem."""
        return UserError(with_origins(problem, self.origins))

    @contextmanager
    def telling_origins(self) -> Iterator[None]:
        """Context that appends to a UserError the files or runs that set the flags in its message."""
        try:
            yield
        except UserError as error:
            if (told := with_origins(str(error), self.origins)) == str(error):
                raise
            raise UserError(told) from None

    def values(self) -> dict[str, Any]:
        """Returns the values of all recorded flags, by flag, as JSON types."""
        return flag_values(*self._groups) | (recorded_values(self.task) if self.task is not None else {})

    def values_alike(self) -> dict[str, Any]:
        return flag_values(*self._groups, *([self.task] if self.task is not None else []), with_local=False)

    @property
    def _groups(self) -> list[FlagGroup]:
        groups = [getattr(self, name) for name, group_type in GROUPS.items() if group_type.recorded]
        return [group for group in groups if group is not None]

    def as_toml(self) -> str:
        groups = [getattr(self, name) for name in (*GROUPS, "task") if name != "files"]
        return as_toml([group for group in groups if group is not None])


def recorded_values(of_task: FlagGroup) -> dict[str, Any]:
    """Returns the values of a task's flags, by flag, as JSON types with absolute paths."""
    values = flag_values(of_task)
    for field, option in options(type(of_task)).items():
        value = getattr(of_task, field)
        if option.type is Path and not option.hidden and value not in (None, option.default):
            values[option.name] = option.to_plain(tuple(map(absolute, value)) if option.is_list else absolute(value))
    return values


def contradictions(flags: Flags) -> list[str]:
    """Returns a sentence for each contradiction between flags of different groups."""
    found = []
    warmup, epochs = flags.learning.warmup_epochs, flags.run.epochs
    if warmup is not None and epochs is not None and warmup > epochs:
        found.append(f"--warmup-epochs {warmup:g}: must not exceed --epochs {epochs}")
    if flags.learning.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        found.append(f"--optimizer muon: torch {torch.__version__} has no Muon; use torch>=2.9 or another optimizer")
    if flags.batch.parts and flags.multi is not None:
        parts, multi_gpu = f"--parts {flags.batch.parts}", flags.multi.multi_gpu
        if multi_gpu not in (None, forms.USUAL):
            found.append(f"{parts}: needs --multi-gpu {forms.USUAL}, as {multi_gpu} adds gradients in no fixed order")
        if flags.multi.sync_bn:
            found.append(f"{parts} and --sync-bn: cannot be combined; give only one of them")
    uses = {"--predict": flags.prediction.predict, "--export": flags.exporting.export}
    if flags.multi is not None:
        found += [f"{use}: runs on one device; use main.py" for use, file in uses.items() if file is not None]
        found += _contradictions_of_devices(flags, flags.multi)
    return found + _contradictions_of_several(flags)


def _contradictions_of_devices(flags: Flags, multi: MultiDeviceFlags) -> list[str]:
    found, device = [], flags.devices.device
    if multi.multi_gpu == "dp" and flags.blocks.compile:
        found.append("--compile: a replica of --multi-gpu dp cannot be compiled; use --multi-gpu ddp")
    if ":" in device:
        found.append(f"--device {device}: names one device; to choose GPUs for --multi-gpu, use --gpu-ids")
    if multi.gpu_ids is not None and device == "cpu":
        found.append("--device cpu and --gpu-ids: cannot be combined; give only one of them")
    on_gpus = bool(usable_gpus(device, multi.gpu_ids))
    if multi.backend == "nccl" and not on_gpus:
        found.append("--backend nccl: needs GPUs, but this run is on the CPU; use --backend gloo")
    if multi.sync_bn and not (on_gpus and multi.multi_gpu == forms.USUAL):
        found.append("--sync-bn: needs --multi-gpu ddp on GPUs; leave it out")
    return found


def _contradictions_of_several(flags: Flags) -> list[str]:
    several, given = flags.several, flags.checkpoint
    if not several.wanted:
        return []
    single = {
        "--eval-only": given.eval_only, "--resume-from": given.resume_from, "--predict": flags.prediction.predict,
        "--export": flags.exporting.export,
    }  # fmt: skip
    found = [
        f"{several.as_given} and {name}: cannot be combined; {name} takes the folder of one run as --save-dir"
        for name, value in single.items()
        if value
    ]
    if several.folds and flags.task_type is not None:
        found += [
            f"--folds {several.folds} and {flag_name(field.name)}: cannot be combined; --folds chooses what to hold out"
            for field in fields(flags.task)
            if field.name in flags.task_type.hold_out_flags and getattr(flags.task, field.name) != field.default
        ]
    return found
