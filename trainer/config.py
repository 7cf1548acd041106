"""Dataclasses <-> command-line flags, with every mistake of a command line shown together."""

import argparse
import dataclasses
import difflib
import inspect
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from trainer.loading.errors import BadInput

_MISSING_VALUE = "\0"


@dataclasses.dataclass(frozen=True)
class _Flag:
    """What a flag says of itself in `--help`, and the range of its values."""

    help: str
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    metavar: str | None = None
    hidden: bool = False

    def range_problem(self, value: float) -> str | None:
        wanted = []
        if self.at_least is not None:
            wanted.append((value >= self.at_least, f"at least {self.at_least}"))
        if self.above is not None:
            wanted.append((value > self.above, f"above {self.above}"))
        if self.at_most is not None:
            wanted.append((value <= self.at_most, f"at most {self.at_most}"))
        if self.below is not None:
            wanted.append((value < self.below, f"below {self.below}"))
        if all(holds for holds, _ in wanted):
            return None
        return f"must be {' and '.join(text for _, text in wanted)}"


def flag(default: Any, help: str, **limits: Any) -> Any:
    """A dataclass field that is a command-line flag.

    limits: at_least, above, at_most, below (numbers); metavar; hidden (not shown in `--help`).
    """
    return dataclasses.field(default=default, metadata={"flag": _Flag(help, **limits)})


def shown(value: Any) -> str:
    """A flag's value as one would type it."""
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


class FlagGroup:
    """Base of a dataclass whose fields are flags.

    The first line of its docstring heads its part of `--help`; what follows stands below it, line by line.
    """

    def problems(self) -> list[str]:
        """What is wrong with these values taken together; one sentence each."""
        return []


def flag_name(field_name: str) -> str:
    """The flag of a dataclass field: save_dir -> --save-dir."""
    return "--" + field_name.replace("_", "-")


def flag_values(*groups: Any) -> dict[str, Any]:
    """Every flag's value in a form that JSON and a checkpoint can hold."""
    values: dict[str, Any] = {}
    for group in groups:
        for field in dataclasses.fields(group):
            if field.metadata["flag"].hidden:
                continue
            value = getattr(group, field.name)
            if field.default is True:
                values["--no-" + flag_name(field.name)[2:]] = not value
            else:
                values[flag_name(field.name)] = str(value) if isinstance(value, Path) else value
    return values


def group_from_values(group_type: type, values: Mapping[str, Any]) -> Any:
    """The group of which `flag_values` made these values; flags that they lack get their defaults.

    values: of this group and perhaps of others, as a checkpoint or JSON holds them. Raises ValueError for a value that
    the flag would refuse.
    """
    hints = typing.get_type_hints(group_type)
    given: dict[str, Any] = {}
    for field in dataclasses.fields(group_type):
        inverted = field.default is True
        name = "--no-" + flag_name(field.name)[2:] if inverted else flag_name(field.name)
        if name in values:
            is_switch = hints[field.name] is bool
            given[field.name] = (
                bool(values[name]) != inverted if is_switch else _checked(field, hints[field.name], values[name])
            )
    return group_type(**given)


def parse_flags(
    group_types: Sequence[type],
    argv: Sequence[str],
    description: str = "",
    epilog: str = "",
    ignore_unknown: bool = False,
    defaults: Mapping[str, Any] = {},
    command: str = "",
) -> tuple[list[Any], list[str]]:
    """Builds one object per group from the command line.

    command: what stands before the flags, for a program of several commands; `--help` shows it.
    defaults: what replaces the fields' own defaults, by field name; see `checked_defaults`.

    Returns the objects and all problems found. A flag with a problem has its default value in the objects, so that
    whatever else is wrong can still be found. `--help` prints and exits with status 0.
    """
    parser = build_parser(group_types, description, epilog, defaults, command)
    parsed, unknown = parser.parse_known_args(_with_dashes(argv))
    problems = [] if ignore_unknown else _unknown_problems(unknown, parser)
    groups = []
    for group_type in group_types:
        hints = typing.get_type_hints(group_type)
        values = {}
        for field in dataclasses.fields(group_type):
            if field.name in defaults:
                values[field.name] = defaults[field.name]
            given = getattr(parsed, field.name, None)
            if given is not None:
                try:
                    values[field.name] = _convert(field, hints[field.name], given)
                except ValueError as error:
                    problems.append(str(error))
        groups.append(group_type(**values))
    for group in groups:
        problems += group.problems()
    return groups, problems


def checked_defaults(group_types: Sequence[type], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Other defaults for flags of the groups, by field name, as their types and ranges want them.

    Raises TypeError for a name that is no field, or that is a flag without a value: switched on by default, it could
    not be switched off. Raises ValueError for a value that the flag would refuse.
    """
    known = {
        field.name: (field, typing.get_type_hints(group_type)[field.name])
        for group_type in group_types
        for field in dataclasses.fields(group_type)
    }
    checked: dict[str, Any] = {}
    for name, value in defaults.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise TypeError(f"{name} is no flag of the trainer" + (f"; did you mean {close[0]}?" if close else ""))
        field, hint = known[name]
        if hint is bool:
            raise TypeError(f"{name} is a switch, and the command line could not undo it")
        checked[name] = _checked(field, hint, value)
    return checked


def build_parser(
    group_types: Sequence[type],
    description: str,
    epilog: str = "",
    defaults: Mapping[str, Any] = {},
    command: str = "",
) -> argparse.ArgumentParser:
    """An argparse parser of the groups' flags. Values stay text: they are converted and checked together later.

    defaults: what `--help` shows instead of the fields' own, by field name. command: see `parse_flags`.
    """
    parser = argparse.ArgumentParser(
        usage=" ".join(["%(prog)s", *([command] if command else []), "[flags]"]),
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    for group_type in group_types:
        heading, *text = inspect.cleandoc(group_type.__doc__ or group_type.__name__).splitlines()
        section = parser.add_argument_group(heading.rstrip("."), "\n".join(text).strip() or None)
        hints = typing.get_type_hints(group_type)
        for field in dataclasses.fields(group_type):
            _add_flag(section, field, hints[field.name], defaults.get(field.name, field.default))
    return parser


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows a value as required although the parser would do without: see `_add_flag`."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        metavar = str(action.metavar or default_metavar)
        return f"{metavar} ..." if action.nargs == "*" else metavar


def _add_flag(section: Any, field: Any, hint: Any, default: Any) -> None:
    about: _Flag = field.metadata["flag"]
    help_text = argparse.SUPPRESS if about.hidden else _help_text(about.help, default)
    name = flag_name(field.name)
    if hint is bool:
        if field.default:
            section.add_argument(name, action="store_true", default=None, help=argparse.SUPPRESS)
            section.add_argument(
                "--no-" + name[2:], action="store_false", dest=field.name, default=None, help=about.help
            )
        else:
            section.add_argument(name, action="store_true", default=None, help=about.help)
        return
    choices = _choices(hint)
    metavar = about.metavar or ("{" + ",".join(choices) + "}" if choices else name[2:].split("-")[-1].upper())
    # A flag without its value must not end the parsing, or the other mistakes would go unseen.
    nargs: dict[str, Any] = {"nargs": "*"} if _is_tuple(hint) else {"nargs": "?", "const": _MISSING_VALUE}
    section.add_argument(name, dest=field.name, metavar=metavar, default=None, help=help_text, **nargs)


def _help_text(text: str, default: Any) -> str:
    if default is None or default == "":
        shown = ""
    elif isinstance(default, tuple):
        shown = " ".join(map(str, default))
    else:
        shown = str(default)
    text = text.replace("%", "%%")
    # A text that says what happens without a value is overtaken by a value.
    return f"{text.partition(' (default: ')[0]} (default: {shown})" if shown else text


def _with_dashes(argv: Sequence[str]) -> list[str]:
    """--batch_size=4 -> --batch-size=4; values keep their underscores."""
    tokens = []
    for token in argv:
        if token.startswith("--"):
            name, equals, value = token.partition("=")
            token = name.replace("_", "-") + equals + value
        tokens.append(token)
    return tokens


def names_given(argv: Sequence[str]) -> set[str]:
    """The names of the flags on a command line, spelled with dashes."""
    return {token.partition("=")[0] for token in _with_dashes(argv) if token.startswith("--")}


def _unknown_problems(tokens: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    known = [option for action in parser._actions for option in action.option_strings]
    found = []
    previous = ""
    for token in tokens:
        if token.startswith("-"):
            close = difflib.get_close_matches(token.partition("=")[0], known, n=1)
            found.append(f"{token}: no such flag; " + (f"did you mean {close[0]}?" if close else "see --help"))
        elif not previous.startswith("-"):  # otherwise it is the value of the unknown flag
            found.append(f"{token}: not expected here; every setting is a flag, see --help")
        previous = token
    return found


def _checked(field: Any, hint: Any, value: Any) -> Any:
    """A value as its flag's type and range want it. Raises ValueError with the whole message."""
    if value is None and type(None) in typing.get_args(hint):
        return None
    return _convert(field, hint, list(map(str, value)) if _is_tuple(hint) else str(value))


def _convert(field: Any, hint: Any, given: Any) -> Any:
    """Text -> the field's type, within its range. Raises ValueError with the whole message."""
    name = flag_name(field.name)
    about: _Flag = field.metadata["flag"]
    if isinstance(given, bool):
        return given
    if _is_tuple(hint):
        texts = _listed(given)
        if not any(texts):
            raise ValueError(f"{name}: needs at least one value")
        if not all(texts):
            raise ValueError(f"{name} {' '.join(given)}: must have a value before and after each comma")
        return tuple(_convert_one(name, about, typing.get_args(_without_none(hint))[0], text) for text in texts)
    if given == _MISSING_VALUE:
        raise ValueError(f"{name}: needs a value")
    return _convert_one(name, about, _without_none(hint), given)


def _listed(tokens: Sequence[str]) -> list[str]:
    """The values of a list, which commas separate, or spaces, or a comma with a space after it."""
    ends = [token.removesuffix(",") for token in tokens[:-1]]
    return [text for token in (*ends, *tokens[-1:]) for text in token.split(",")]


def _convert_one(name: str, about: _Flag, hint: Any, text: str) -> Any:
    choices = _choices(hint)
    if choices:
        if text not in choices:
            raise ValueError(f"{name} {text}: must be one of {', '.join(choices)}")
        return text
    if hint in (int, float):
        try:
            number = hint(text)
        except ValueError:
            kind = "a whole number" if hint is int else "a number"
            raise ValueError(f"{name} {text}: must be {kind}") from None
        if not math.isfinite(number):
            raise ValueError(f"{name} {text}: must be a finite number")
        problem = about.range_problem(number)
        if problem:
            raise ValueError(f"{name} {text}: {problem}")
        return number
    if not text:
        raise ValueError(f"{name}: must not be empty")
    return hint(text).expanduser() if hint is Path else hint(text)


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def _choices(hint: Any) -> tuple[str, ...]:
    hint = _without_none(hint)
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(_without_none(hint)) is tuple


def refuse(problems: Sequence[str]) -> None:
    """Raises BadInput with all problems, one a line; returns if there are none."""
    if problems:
        raise BadInput("\n".join(problems))
