"""Parses a command line and its config files into `Flags`."""

import dataclasses
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.commands.config_files import ConfigFile, read_config_files, with_origins
from trainer.commands.flags import Flags, FromRun, contradictions
from trainer.commands.weights import find_record, ships_weights
from trainer.common.errors import UserError
from trainer.config import FlagGroup, checked_defaults, flag_name, names_given, options, parse_flags, values_given
from trainer.flags import GROUPS, RETIRED, TRAINER_GROUPS, CheckpointFlags, ConfigFlags, MultiDeviceFlags, RunFlags
from trainer.parallel.environment import one_process_problems
from trainer.registry import SCRIPT, default_task, find_task, is_same_task, known_task, workloads
from trainer.task import Task

DESCRIPTION = {
    False: "Trains on one device. Repeating the command resumes an unfinished run.",
    True: "Trains on several devices. Repeating the command resumes an unfinished run, on any number of devices.",
}

LAUNCHES = (
    "python main_multi_gpu.py --multi-gpu ddp",
    "python main_multi_gpu.py --multi-gpu ddp --nproc 2 --device cpu",
    "torchrun --nproc_per_node=2 main_multi_gpu.py --multi-gpu ddp",
)

HELP = {"-h", "--help", "--help-all"}
OF_SEVERAL_DEVICES = "is for several devices; use main_multi_gpu.py"


def parse(
    argv: Sequence[str],
    several_devices: bool,
    tool: type[FlagGroup] | None = None,
    about: tuple[str, str] | None = None,
    command: str = "",
    task_type: type[Task] | None = None,
) -> tuple[Flags, list[str]]:
    """Parses a command line, and returns the flags and all problems.

    tool: flags of a program other than the trainer; `--help` shows them first. about: description and examples of that
    program for `--help`. command: command that precedes the flags, if any. task_type: class of `--task`; None: find the
    class by name.
    """
    words = [word for word in argv if word not in HELP]  # otherwise `values_given` would print the help and exit
    given, _, _ = values_given(TRAINER_GROUPS, words)
    files, problems = read_config_files(given.get("config") or ())
    asked = Layers(TRAINER_GROUPS)
    for file in files:
        asked.add_file(file, all_known=False)
    asked.add(given)
    record = find_record(asked.values) if tool is None else None
    task_name, task_type, of_task = _choose_task(asked, record, task_type)
    group_types = [*([tool] if tool is not None else []), *TRAINER_GROUPS[: None if several_devices else -1]]
    defaults: dict[str, Any] = {"task": default_task()}
    if task_type is not None:
        defaults |= _defaults_of(task_type, task_name, group_types)
        group_types.append(task_type.Config)
        if record is None and tool is None and not ships_weights(task_type):
            record = find_record({**defaults, **asked.values})
    layers = Layers(group_types)
    layers.add(defaults)
    stated = names_given(argv).union(*(file.settings for file in files))
    from_run = _take_from_run(record, layers, asked.values, stated, task_name, task_type) if record else FromRun()
    for file in files:
        problems += layers.add_file(file, all_known=task_type is not None)
    layers.make_room_for(values_given(group_types, words)[0])
    problems += layers.take_out_what_users_alone_name({*given, "task"} if task_type or of_task else given)
    description, examples = about or (DESCRIPTION[several_devices], examples_of(task_name, task_type, several_devices))
    description = f"{description}\nBuilt-in tasks: {', '.join(workloads())}."
    texts = {"description": description, "epilog": examples, "command": command}
    elsewhere = _flags_of_others(argv, group_types, task_name) if task_type is not None else None
    flags, found = _typed(argv, group_types, layers, task_type, elsewhere, texts)
    flags.from_run = from_run
    return flags, problems + [with_origins(problem, flags.origins) for problem in [*of_task, *found]]


def _typed(
    argv: Sequence[str],
    group_types: Sequence[type],
    layers: "Layers",
    task_type: type[Task] | None,
    elsewhere: Mapping[str, str] | None,
    texts: Mapping[str, str],
) -> tuple[Flags, list[str]]:
    """Parses a command line on top of `layers`; returns the flags and problems.

    elsewhere, texts: arguments of `parse_flags`.
    """
    by_user = [field for field, file in layers.origins.items() if file is not None and not file.is_record]
    groups, problems = parse_flags(
        group_types, argv, **texts, defaults=layers.values, elsewhere=elsewhere, stated=by_user
    )
    by_type: dict[type, Any] = {type(group): group for group in groups}
    flags_given = names_given(argv)
    origin_of = {option.name: layers.origins.get(field) for field, option in options(*group_types).items()}
    origins = {name: file for name, file in origin_of.items() if file is not None and name not in flags_given}
    of_trainer: dict[str, Any] = {name: by_type.pop(group_type, None) for name, group_type in GROUPS.items()}
    flags = Flags(
        **of_trainer,
        task=by_type.pop(task_type.Config) if task_type is not None else None,
        task_type=task_type,
        tool=next(iter(by_type.values()), None),
        origins=origins,
        given=frozenset(flags_given | {name for name, file in origins.items() if file.flag == "--config"}),
        left_out=layers.left_out,
    )
    return flags, problems + contradictions(flags)


def examples_of(task_name: str, task_type: type[Task] | None, several_devices: bool) -> str:
    """Returns the example commands at the end of `--help`, one per line."""
    task = [] if task_name == default_task() else [f"--task {task_name}"]
    flags_of_task = () if task_type is None else task_type.examples
    commands = (
        [[start, *task] for start in LAUNCHES]
        if several_devices
        else [["python main.py", *task, flags] for flags in ("", *flags_of_task)]
    )
    return "\n  ".join(["examples:", *(" ".join(command).strip() for command in commands)])


def _flags_of_others(argv: Sequence[str], group_types: Sequence[type], task_name: str) -> dict[str, str]:
    """Returns messages by flag, for flags that are retired or belong to main_multi_gpu.py or other workloads.

    Imports other workloads only if the command line has an unknown flag.
    """
    said = dict(RETIRED)
    if MultiDeviceFlags not in group_types:
        said |= {option.name: OF_SEVERAL_DEVICES for option in options(MultiDeviceFlags).values()}
    strange = names_given(argv) - {option.name for option in options(*group_types).values()} - said.keys() - HELP
    owners: dict[str, list[str]] = {}
    for task in workloads() if strange and task_name in workloads() else ():
        for option in options(find_task(task).Config).values():
            owners.setdefault(option.name, []).append(task)
    return said | {name: f"needs --task {' or '.join(owners[name])}; add it" for name in strange & owners.keys()}


def _choose_task(
    asked: "Layers", record: ConfigFile | None, task_type: type[Task] | None
) -> tuple[str, type[Task] | None, list[str]]:
    """Returns the task's name, its class if it is found, and problems. task_type: the class, if the caller knows it.

    Does not import a file whose name comes from a run's record.
    """
    name, source = asked.values.get("task"), asked.origins.get("task")
    if name is None and record is not None:
        name, source = record.settings["--task"], record
    name = name or default_task()
    try:
        of_record = source is not None and source.is_record and ":" in name
        return name, task_type or (known_task(name) if of_record else find_task(name)), []
    except UserError as error:
        return name, None, [str(error)]


def _take_from_run(
    record: ConfigFile,
    layers: "Layers",
    asked: Mapping[str, Any],
    stated: Collection[str],
    task_name: str,
    task_type: type[Task] | None,
) -> FromRun:
    """Adds to `layers` the flags taken from the run to resume or use, and returns these flags.

    These flags choose data and model: `--task`, the task's flags and `--seed`, unless the command gives them. With
    `--predict` or `--export`, `recorded_task` reads the task's flags later, from the checkpoint in use. Invalid
    values are skipped; a damaged checkpoint is reported later, when it is loaded.
    """
    if not is_same_task(task_name, record.settings["--task"]):
        return FromRun()  # a later check refuses to resume another task's run
    known = {"task": options(RunFlags)["task"]}
    taken = {} if "task" in asked or task_name == default_task() else {"task": task_name}
    several = asked.get("seeds", 1) > 1 or asked.get("folds", 0) > 0
    if task_type is not None:
        own = {**options(task_type.Config), **({} if several else {"seed": options(RunFlags)["seed"]})}
        held_out = task_type.hold_out_flags if asked.get("folds") else ()
        known |= {field: option for field, option in own.items() if field not in held_out}
    wanted = {option.name for field, option in known.items() if field != "task"} - set(stated)
    taken |= {
        field: value
        for field, value in record.values(known, all_known=False)[0].items()
        if known[field].name in wanted and value != layers.values.get(field, known[field].default)
    }
    is_used = asked.get("predict") is not None or asked.get("export") is not None
    layers.add({field: value for field, value in taken.items() if field == "task" or not is_used}, record)
    return FromRun(record.path, tuple((known[field], value) for field, value in taken.items()))


def _defaults_of(task_type: type[Task], task_name: str, group_types: Sequence[type]) -> dict[str, Any]:
    """Returns a task's defaults for the trainer's flags, by field. Raises UserError for errors in the task's class."""
    name = task_type.__name__
    if not (dataclasses.is_dataclass(task_type.Config) and issubclass(task_type.Config, FlagGroup)):
        raise UserError(f"--task {task_name}: {name}.Config must be a dataclass and inherit from lockstep.FlagGroup")
    try:
        own = options(task_type.Config)
    except TypeError as error:
        raise UserError(f"--task {task_name}: {task_type.Config.__name__}.{error}") from None
    known = options(*group_types)
    if taken := ", ".join(sorted(map(flag_name, known.keys() & own.keys()))):
        raise UserError(f"--task {task_name}: the trainer already has flags named {taken}; rename the task's flags")
    num_named = Counter(option.name for option in [*known.values(), *own.values()])
    if twice := ", ".join(flag for flag, number in num_named.items() if number > 1):
        raise UserError(f"--task {task_name}: two fields give the flag {twice}; rename one of the task's fields")
    if missing := ", ".join(sorted(task_type.__abstractmethods__)):
        raise UserError(f"--task {task_name}: {name} must define {missing}; see Task in trainer/task.py")
    # one folder per task, since a task cannot resume another task's run
    file = task_name.rpartition(":")[0]
    own_name = Path(file).stem.strip("_") if name == SCRIPT else name
    folder = CheckpointFlags.save_dir / (task_name if task_name in workloads() else own_name)
    try:
        if not isinstance(task_type.defaults, Mapping):
            raise TypeError("must be a mapping from field names to values")
        if "task" in task_type.defaults:
            raise TypeError("must not contain 'task'")
        settable = [group for group in TRAINER_GROUPS if group is not ConfigFlags]
        return {"save_dir": folder, **checked_defaults(settable, task_type.defaults)}
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}.defaults: {error}") from None


class Layers:
    """Default values of flags: a task's defaults, then settings of runs and files. Later values override earlier ones.

    values: by field. origins: by field, the file or run that set the value; None for a task's default.
    left_out: lines about values that a later value of another flag makes ineffective.
    """

    def __init__(self, group_types: Sequence[type]) -> None:
        self._known, self._on_one_device = options(*group_types), MultiDeviceFlags not in group_types
        self.values: dict[str, Any] = {}
        self.origins: dict[str, ConfigFile | None] = {}
        self.left_out: list[str] = []

    def add(self, values: Mapping[str, Any], origin: ConfigFile | None = None) -> None:
        self.make_room_for(values)
        self.values.update(values)
        self.origins.update(dict.fromkeys(values, origin))

    def add_file(self, file: ConfigFile, all_known: bool) -> list[str]:
        """Adds a file's settings, and returns problems. all_known: whether unknown settings are problems."""
        known = {**options(MultiDeviceFlags), **self._known}
        settable = {field: option for field, option in known.items() if field not in options(ConfigFlags)}
        values, problems = file.values(settable, all_known)
        self.add(values, file)
        if self._on_one_device and (elsewhere := file.of_several_devices()):
            problems.append(f"{file}: {', '.join(elsewhere)}: {OF_SEVERAL_DEVICES}")
        return problems

    def make_room_for(self, values: Mapping[str, Any]) -> None:
        """Removes values that higher values replace, exclude or displace, and notes those left without effect."""
        for field in values.keys() & self._known.keys():
            value, option = values[field], self._known[field]
            if value is None or value is False:
                continue
            displaced = {*option.excludes, *(name for name, other in self._known.items() if field in other.excludes)}
            if value != self.values.get(field, option.default):
                displaced.update(
                    other for other in option.displaces if value not in (self._known[other].needs.get(field) or ())
                )
            for other in displaced - values.keys():
                lower, without = self.values.pop(other, None), self._known[other]
                self.origins.pop(other, None)
                if field in without.needs and lower is not None and lower != without.default:
                    choice = option.as_typed(value)
                    self.left_out.append(f"Left out: {without.as_typed(lower)}, which {choice} does not use.")

    def take_out_what_users_alone_name(self, but_for: Collection[str]) -> list[str]:
        """Drops files and classes that a run's record names; returns messages about them. but_for: fields to keep."""
        found = []
        for field, option in self._known.items():
            origin = self.origins.get(field)
            if origin is None or not origin.is_record or field in but_for:
                continue
            value = self.values[field]
            if option.is_for_users_alone(value):
                what = "a file; to use it" if option.type is Path else "code; to run it"
                words = option.as_typed(value)
                found.append(f"{origin}: must not set {words}, which names {what}, add the flag to the command")
                del self.values[field], self.origins[field]
        return found


def names_several_devices(argv: Sequence[str]) -> bool:
    """Returns whether a command line, its config files or a launcher request several devices; True for `--help`."""
    own = {flag_name(field) for field in options(MultiDeviceFlags)} | HELP
    if own & {*names_given(argv), *argv} or one_process_problems(os.environ):
        return True
    files, _ = read_config_files(values_given([ConfigFlags], argv)[0].get("config") or ())
    return any(file.of_several_devices() for file in files)
