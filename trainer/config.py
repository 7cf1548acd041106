"""Converts between dataclasses and command-line flags, and reports all problems of a command line together."""

import argparse
import dataclasses
import difflib
import inspect
import math
import operator
import re
import shlex
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from trainer.common.errors import UserError, shortened
from trainer.common.validation import checked_path, checked_text, expanded

MORE_HELP = "\nDefaults are in brackets; --help-all explains every flag."
LARGEST = 2**63 - 1
"""Largest integer that a flag accepts (int64)."""
_LIMITS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


class FlagGroup:
    """Base class of dataclasses whose fields are command-line flags.

    The first line of a subclass's docstring is the heading in `--help`; `--help-all` prints the other lines below it.
    """

    recorded: ClassVar[bool] = True
    """Whether config.json and checkpoints contain these flags; False for flags that only request an action."""

    def problems(self) -> list[str]:
        """Returns one sentence for each contradiction between the group's values."""
        return []


def flag(
    default: Any,
    help: str,
    *,
    metavar: str | None = None,
    common: bool = False,
    hidden: bool = False,
    local: bool = False,
    from_record: Literal["taken", "ignored", "refused"] = "taken",
    excludes: Sequence[str] = (),
    displaces: Sequence[str] = (),
    needs: Mapping[str, Sequence[str] | None] = {},
    absent: Any = None,
    **limits: float,
) -> Any:
    """Defines a dataclass field that is a command-line flag.

    help: `--help` shows the text up to the first ";", and `--help-all` shows the whole text.
    common: `--help` shows the flag; in a group without common flags `--help` shows every flag.
    hidden: the flag is neither shown in `--help-all` nor recorded.
    local: the flag may differ between the processes of a run, since it does not affect learning; an example is a data
        folder. Other flags must have the same value in all processes.
    from_record: whether a recorded value is taken, ignored or refused when `--config` names a run's config.json. Use
        "ignored" for flags about how a run was started, and "refused" for files that are executed (FILE:CLASS), written
        or loaded, since the config.json may come from somebody else.
    excludes: fields that must not be given together with this flag; a default of None, False or 0 does not count as
        given. A value on the command line overrides an excluded value from a file.
    displaces: fields whose values from a file are dropped when the command line changes this flag, unless their `needs`
        list the new value. Unlike excluded fields, they may be given together with this flag.
    needs: maps another field, such as "model", to the values with which this flag has an effect; None stands for
        every value but the default.
    absent: value of the flag in runs of earlier versions, whose records lack it; None: the default.
    limits: bounds of a number, given as at_least, above, at_most or below.
    """
    assert limits.keys() <= _LIMITS.keys()
    about = {
        "help": help, "metavar": metavar, "common": common, "hidden": hidden, "local": local,
        "from_record": from_record, "excludes": excludes, "displaces": displaces, "needs": needs, "absent": absent,
        "limits": limits,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=about)


def flag_name(field_name: str) -> str:
    """Returns the flag of a field: save_dir -> --save-dir."""
    return "--" + field_name.replace("_", "-")


def hint(name: str, known: Iterable[str]) -> str:
    """Suggests one or two known names that contain an unknown name as a word, or else the most similar known name."""
    core, by_core = name.lstrip("-"), {other.lstrip("-"): other for other in known}
    found = [other for other in by_core if core in re.split("[-_]", other)]
    if len(found) not in (1, 2):
        found = difflib.get_close_matches(core, by_core, n=1)
    return f"did you mean {' or '.join(by_core[other] for other in found)}?" if found else "see --help"


def shown(value: Any) -> str:
    """Formats a flag's value as it is typed on a command line."""
    if value is None:
        return "(none)"
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def flags_without(group: FlagGroup, needed: str, fields: Iterable[str]) -> list[str]:
    """Returns a sentence for each given field that has no effect without the flag `needed`."""
    unused = given_flags(group, fields)
    return [f"{given}: does nothing without {needed}; add {needed}, or leave this flag out" for given in unused]


def given_flags(group: FlagGroup, fields: Iterable[str]) -> list[str]:
    """Returns the flags whose values differ from their defaults, as typed on a command line."""
    values = {name: getattr(group, name) for name in fields}
    return [
        flag_name(name) if value is True else f"{flag_name(name)} {shown(value)}"
        for name, value in values.items()
        if value != getattr(type(group), name)
    ]


class Option:
    """A command-line flag made from a dataclass field.

    name: the flag; a switch that is on by default is called --no-NAME. type: type of the value, or of a list's items.
    words: strings accepted in place of a number, such as "auto".
    """

    help: str
    metavar: str | None
    common: bool
    hidden: bool
    local: bool
    from_record: str
    excludes: Sequence[str]
    displaces: Sequence[str]
    needs: Mapping[str, Sequence[str] | None]
    absent: Any
    limits: Mapping[str, float]

    def __init__(self, field: Any, hint: Any) -> None:
        self.default, self.is_switch = field.default, hint is bool
        self.name = flag_name(f"no_{field.name}" if self.default is True else field.name)
        parts = typing.get_args(hint)
        self.is_optional = type(None) in parts
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        self.type = next(part for part in parts if part is not type(None)) if is_union else hint
        self.words = [word for part in parts[1:] for word in typing.get_args(part)] if is_union else []
        self.is_list = typing.get_origin(self.type) is tuple
        if self.is_list:
            self.type = typing.get_args(self.type)[0]
        self.choices: tuple[str, ...] = typing.get_args(self.type)
        if "help" not in field.metadata:
            raise TypeError(f"{field.name}: must be defined with flag()")
        if self.type not in (int, float, str, bool, Path) and typing.get_origin(self.type) is not typing.Literal:
            raise TypeError(f"{field.name}: a flag cannot have the type {hint}; for several values use tuple[int, ...]")
        vars(self).update(field.metadata)

    def has_effect(self, values: Mapping[str, Any], known: Mapping[str, "Option"]) -> bool:
        """Returns whether `values` let this flag have an effect. values, known: given values and options, by field."""
        return all(
            owners is None or choice not in known or values.get(choice, known[choice].default) in (None, *owners)
            for choice, owners in self.needs.items()
        )

    @property
    def text(self) -> str:
        """Help text without its final "(default: ...)"."""
        return self.help.partition(" (default: ")[0]

    @property
    def without_value(self) -> str:
        """Returns what the flag does without a value, from the help's final "(default: ...)", or an empty string."""
        return self.help.partition(" (default: ")[2].removesuffix(")")

    @property
    def is_of_launcher(self) -> bool:
        """Whether a launcher alone sets this flag, once per process; config files and `fit` do not accept it."""
        return self.hidden and self.local

    @property
    def adds_up(self) -> bool:
        """Whether repeating the flag adds values instead of replacing them, as for lists of files or strings."""
        return self.is_list and self.type in (Path, str)

    def to_plain(self, value: Any) -> Any:
        """Converts a value for JSON, TOML and checkpoints; for a switch, returns whether it was given."""
        if self.is_switch:
            return value != self.default
        if isinstance(value, tuple):
            return tuple(map(self.to_plain, value))
        return str(value) if isinstance(value, Path) else value

    def from_plain(self, value: Any) -> Any:
        return self.checked(value) != self.default if self.is_switch else self.checked(value)

    def checked(self, value: Any) -> Any:
        """Validates a value from a file or from Python. Raises ValueError, without the flag's name in the message."""
        if self.is_switch:
            if not isinstance(value, bool):
                raise ValueError("must be true or false")
            return value
        if value is None and self.is_optional:
            return None
        if not self.is_list:
            return self._checked_one(value)
        if not isinstance(value, tuple | list):
            raise ValueError("must be a list")
        if not value and self.default != ():
            raise ValueError("must have at least one value")
        if self.type is str:  # accepts names that are written as numbers
            value = [str(part) if type(part) is int else part for part in value]
        return tuple(map(self._checked_one, value))

    def _checked_one(self, value: Any) -> Any:
        kind = {int: int, float: int | float, Path: str | Path}.get(self.type, str)
        if value not in self.words and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ValueError(f"must be {self._kind}")
        if value == "" != self.default:
            raise ValueError("must not be empty")
        return self._parse_one(str(value))

    def is_for_users_alone(self, value: Any) -> bool:
        """Returns whether this value names a file or class that only the user, not a run's config.json, may choose."""
        texts = value if isinstance(value, tuple) else (value,)
        named = any(isinstance(text, Path) or (isinstance(text, str) and ":" in text) for text in texts)
        return self.from_record == "refused" and named

    def as_typed(self, value: Any) -> str:
        """Formats a value that differs from the default as it is typed in a shell."""
        if self.is_switch:
            return self.name
        return f"{self.name} {shlex.join(self._words(value))}"

    def argument(self, value: Any) -> list[str]:
        if self.is_switch:
            if not isinstance(value, bool):
                raise ValueError(f"{self.name} {value!r}: must be True or False")
            return [self.name if value != self.default else f"{self.name}=false"]
        values = self._words(value)
        return [f"{self.name}={text}" for text in (values if self.adds_up else [",".join(values)])]

    def _words(self, value: Any) -> list[str]:
        """Writes a value as the words that `parse` reads."""
        if not (self.is_list and isinstance(value, tuple | list | range)):
            return [str(value)]
        return [str(part).replace(",", r"\,") if self.type is str else str(part) for part in value]

    def parse(self, given: Any) -> Any:
        """Parses the flag's words on a command line. Raises ValueError, with the flag's name in the message."""
        # values are separated by commas (but not by "\,"), spaces or both; files by spaces, as names may have commas
        texts = [given]
        if self.is_list:
            texts = given if self.type is Path else re.split(r"(?:(?<!\\),)?\n|(?<!\\),", "\n".join(given))
        if not any(texts):
            raise ValueError(f"{self.name}: needs {'at least one' if self.is_list else 'a'} value")
        if not all(texts):
            raise ValueError(f"{self.name} {' '.join(given)}: must have a value before and after each comma")
        values = []
        for text in texts:
            try:
                values.append(self._parse_one(text.replace(r"\,", ",") if self.is_list and self.type is str else text))
            except ValueError as error:
                raise ValueError(f"{self.name} {shortened(text)}: {error}") from None
        return tuple(values) if self.is_list else values[0]

    def _parse_one(self, text: str) -> Any:
        if self.is_switch:
            if text not in ("true", "false"):
                raise ValueError("must be true or false")
            return (text == "true") != self.default
        if self.choices and text not in self.choices:
            raise ValueError(f"must be {self._kind}")
        if self.type is Path:
            path = checked_path(text)
            return path if path == self.default else expanded(path)  # a default path keeps its ~ in records
        if self.type not in (int, float):
            return checked_text(text)
        if text in self.words:
            return text
        try:
            number = self.type(text)
        except ValueError:
            raise ValueError(f"must be {self._kind}") from None
        if self.type is float and not math.isfinite(number):
            raise ValueError("must be a finite number")
        if not all(_LIMITS[name](number, limit) for name, limit in self.limits.items()):
            limits = (f"{name.replace('_', ' ')} {limit}" for name, limit in self.limits.items())
            raise ValueError(f"must be {' and '.join(limits)}")
        if self.type is int and abs(number) > LARGEST:
            raise ValueError(f"must be between {-LARGEST} and {LARGEST}")
        return number

    @property
    def _kind(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return " or ".join([*self.words, {int: "a whole number", float: "a number"}.get(self.type, "text")])


def options(*group_types: type) -> dict[str, Option]:
    """Returns an `Option` for each field of flag groups, by field name."""
    return {field: option for group_type in group_types for field, option in _options_of(group_type).items()}


@cache
def _options_of(group_type: type) -> dict[str, Option]:
    hints = typing.get_type_hints(group_type)
    return {field.name: Option(field, hints[field.name]) for field in dataclasses.fields(group_type)}


def flag_values(*groups: Any, with_local: bool = True) -> dict[str, Any]:
    """Returns the values of flags that are not hidden, as JSON types, by flag. with_local: include local flags."""
    return {
        option.name: option.to_plain(getattr(group, field))
        for group in groups
        for field, option in options(type(group)).items()
        if not option.hidden and (with_local or not option.local)
    }


def group_from_values(group_type: type, values: Mapping[str, Any]) -> Any:
    """Builds a flag group from the result of `flag_values`; missing flags get their defaults.

    values: values by flag; flags of other groups are ignored. Raises ValueError for a value that its flag rejects.
    """
    given = {field: option for field, option in options(group_type).items() if option.name in values}
    return group_type(
        **{field: _stated(option, values[option.name], option.from_plain) for field, option in given.items()}
    )


def checked_defaults(group_types: Sequence[type], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Validates values, by field name, that are to replace the default values of flags.

    Raises TypeError for an unknown field and ValueError for a value that its flag rejects.
    """
    known = options(*group_types)
    defaults = with_new_names(defaults, known)
    for field in defaults:
        if field not in known:
            raise TypeError(f"{field} is not a flag of the trainer; {hint(field, known)}")
    return {field: _stated(known[field], value, known[field].checked) for field, value in defaults.items()}


def with_new_names(settings: Mapping[str, Any], known: Mapping[str, Option]) -> dict[str, Any]:
    """Returns settings by field name, with the older names of switches replaced: `test=False` -> `no_test=True`."""
    renamed = {}
    for name, value in settings.items():
        is_old = name not in known and f"no_{name}" in known and isinstance(value, bool)
        renamed[f"no_{name}" if is_old else name] = not value if is_old else value
    return renamed


def _stated(option: Option, value: Any, convert: Callable[[Any], Any]) -> Any:
    try:
        return convert(value)
    except ValueError as error:
        raise ValueError(f"{option.name} {shown(value)}: {error}") from None


def arguments_of(
    group_types: Sequence[type], settings: Mapping[str, Any], elsewhere: Mapping[str, str] = {}
) -> tuple[list[str], list[str]]:
    """Converts settings by field name to a command line; returns the command line and the problems found.

    A switch takes True or False; a list may also be a tuple or range; None leaves the flag out. elsewhere: maps
    flags of other programs to error messages.
    """
    known = options(*group_types)
    settings = with_new_names(settings, known)
    argv, problems = [], []
    for field, value in settings.items():
        if field not in known or known[field].is_of_launcher:
            visible = [name for name, option in known.items() if not option.hidden]
            unknown = f"no such setting; {hint(field, visible)}"
            problems.append(f"{field}: {elsewhere.get(flag_name(field), unknown)}")
        elif value is not None:
            try:
                argv += known[field].argument(value)
            except ValueError as error:
                problems.append(str(error))
    return argv, problems


def parse_flags(
    group_types: Sequence[type],
    argv: Sequence[str],
    description: str = "",
    epilog: str = "",
    defaults: Mapping[str, Any] = {},
    command: str = "",
    elsewhere: Mapping[str, str] | None = {},
    stated: Collection[str] = (),
) -> tuple[list[Any], list[str]]:
    """Parses a command line into one object per group, and returns the objects and all problems.

    command: name of the command that precedes the flags, for a program with several commands; `--help` shows it.
    defaults: values by field name that replace the fields' own defaults. elsewhere: messages by flag, for flags that
    only another program or task accepts; None: unknown flags are not problems. stated: fields of `defaults` whose
    values come from the user, even if a value equals the field's own default.

    A flag with a problem keeps its default in the objects, so that further problems can be found. `--help` and
    `--help-all` print the help and exit with status 0.
    """
    shows_all = "--help-all" in names_given(argv)
    parser = build_parser(group_types, description, epilog, defaults, command, shows_all)
    given, problems, unknown = values_given(group_types, argv, parser)
    if elsewhere is not None:
        problems += _unknown_problems(unknown, parser, elsewhere)
    values = {**defaults, **given}
    groups = [
        group_type(**{field: values[field] for field in options(group_type) if field in values})
        for group_type in group_types
    ]
    for field, option in options(*group_types).items():
        # A run could record an invalid default but not read it back. Paths are checked when they are opened.
        if field not in values and option.type is not Path:
            try:
                option.from_plain(option.to_plain(option.default))
            except ValueError as error:
                problems.append(f"{option.name} {shown(option.default)}, its default: {error}")
    problems += [problem for group in groups for problem in _own_problems(group)]
    return groups, problems + _conflicts(groups, values, {*stated, *given})


def _conflicts(groups: Sequence[FlagGroup], values: Mapping[str, Any], stated: Collection[str]) -> list[str]:
    known = options(*map(type, groups))
    others = {field for field, option in known.items() if values.get(field, option.default) != option.default}
    given = {
        field: option.name if isinstance(values[field], bool | Path) else f"{option.name} {shown(values[field])}"
        for field, option in known.items()
        if field in others or (field in stated and values[field])
    }
    found = []
    for field, words in given.items():
        excluded = [other for other in known[field].excludes if other in given]
        found += [f"{words} and {given[other]}: cannot be combined; give only one of them" for other in excluded]
        for choice, owners in known[field].needs.items() if field in others else ():
            chosen = next(getattr(group, choice) for group in groups if choice in options(type(group)))
            if owners is None and choice not in others:
                found.append(f"{words}: does nothing without {known[choice].name}; add it, or leave this flag out")
            elif owners is not None and chosen not in (None, *owners):
                advice = f"leave it out, or choose {' or '.join(owners)}"
                found.append(f"{words}: {known[choice].name} {chosen} does not use it; {advice}")
    return found


def _own_problems(group: Any) -> Sequence[str]:
    found = group.problems()
    if isinstance(found, str) or not isinstance(found, Sequence):
        return [f"{type(group).__name__}.problems: must return a list of sentences, not {found!r}"]
    return found


def values_given(
    group_types: Sequence[type], argv: Sequence[str], parser: argparse.ArgumentParser | None = None
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Returns the given values by field name, the problems, and the words that no flag accepts."""
    parser = parser or build_parser(group_types, "")
    parsed, unknown = parser.parse_known_args(_with_dashes(argv))
    values, problems = {}, []
    for field, option in options(*group_types).items():
        if field in parsed:
            try:
                values[field] = option.parse(getattr(parsed, field))
            except ValueError as error:
                problems.append(str(error))
    return values, problems, unknown


def build_parser(
    group_types: Sequence[type],
    description: str,
    epilog: str = "",
    defaults: Mapping[str, Any] = {},
    command: str = "",
    shows_all: bool = True,
) -> argparse.ArgumentParser:
    """Builds an argparse parser for the groups' flags; it returns values as strings and does not validate them.

    Groups with the same heading share a section of the help.

    defaults: values by field name that `--help` shows instead of the fields' own defaults.
    shows_all: whether the help shows every flag with its whole text; if not, only one line for each common flag.
    """
    parser = argparse.ArgumentParser(
        usage=f"%(prog)s {command} [flags]" if command else "%(prog)s [flags]",
        description=description + ("" if shows_all else MORE_HELP),
        epilog=epilog,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_HelpFormatter,
    )
    sections: dict[str, Any] = {}
    for group_type in group_types:
        heading, text = described(group_type)
        if heading not in sections:
            sections[heading] = parser.add_argument_group(heading, (shows_all and text) or None)
        known = options(group_type)
        has_common = any(option.common for option in known.values())
        for field, option in known.items():
            # a flag without its value must not stop parsing, which would hide other problems
            how: dict[str, Any] = {"nargs": "?", "const": "true" if option.is_switch else ""}
            if option.is_list:
                how = {"nargs": "*", "action": "extend" if option.adds_up else "store"}
            help_text = _help_text(option, defaults.get(field, option.default), shows_all).replace("%", "%%")
            is_shown = not option.hidden and (shows_all or option.common or not has_common)
            how |= {"metavar": _metavar(option, shows_all), "help": help_text if is_shown else argparse.SUPPRESS}
            sections[heading].add_argument(option.name, dest=field, **how)
    parser.add_argument("-h", "--help", "--help-all", action="help", help=argparse.SUPPRESS)
    return parser


def described(group_type: type) -> tuple[str, str]:
    """Returns a group's heading in the help, and the text below the heading."""
    heading, _, text = inspect.cleandoc(group_type.__doc__ or group_type.__name__).partition("\n")
    return heading.rstrip("."), text.strip()


def _metavar(option: Option, shows_choices: bool) -> str:
    if option.is_switch:
        return ""
    if option.metavar or not option.choices:
        return option.metavar or option.name.rpartition("-")[2].upper()
    return "{" + ",".join(option.choices) + "}" if shows_choices else "NAME"


def _help_text(option: Option, default: Any, is_whole: bool) -> str:
    text, without = option.text, option.without_value
    if option.is_switch:
        without = "true" if default != option.default else ""
    elif default is not None and default != "":  # the help shows a default value instead of the description
        without = shown(default)
    if is_whole:
        return f"{text} (default: {without})" if without else text
    text = text.partition(";")[0] + (f": {', '.join(option.choices)}" if option.choices else "")
    return f"{text} [{without.partition(';')[0]}]" if without and default != 0 else text


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help formatter that shows values without brackets, although argparse treats these values as optional."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return super()._format_action_invocation(action).rstrip()

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return f"{action.metavar} ..." if action.nargs == "*" else str(action.metavar)


def _with_dashes(argv: Sequence[str]) -> list[str]:
    """Replaces underscores in flag names: --batch_size=4 -> --batch-size=4."""
    return [re.sub("^--[^=]*", lambda name: name[0].replace("_", "-"), token) for token in argv]


def names_given(argv: Sequence[str]) -> set[str]:
    """Returns the names of the flags on a command line, with dashes instead of underscores."""
    return {token.partition("=")[0] for token in _with_dashes(argv) if token.startswith("--")}


def _unknown_problems(
    tokens: Sequence[str], parser: argparse.ArgumentParser, elsewhere: Mapping[str, str]
) -> list[str]:
    found = []
    for previous, token in zip(["", *tokens], tokens, strict=False):
        if token.startswith("-"):
            name = token.partition("=")[0]
            unknown = f"no such flag; {hint(name, parser._option_string_actions)}"
            found.append(f"{token}: {elsewhere.get(name, unknown)}")
        elif not previous.startswith("-"):  # otherwise the token is the value of an unknown flag
            found.append(f"{token}: unexpected argument; pass settings as flags, see --help")
    return found


def refuse(problems: Sequence[str]) -> None:
    """Raises UserError with all problems, one per line, if there are any."""
    if problems:
        raise UserError("\n".join(problems))
