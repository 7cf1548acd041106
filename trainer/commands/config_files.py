"""Reads settings from TOML files or a run's config.json, and formats settings for `--print-config`."""

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.common.files import MOST_RECORD, read_whole
from trainer.config import FlagGroup, Option, described, hint, options
from trainer.flags import RETIRED, ConfigFlags, MultiDeviceFlags

LINE_LENGTH = 120
OF_COMMAND_LINE = {"--help", "--help-all", *(option.name for option in options(ConfigFlags).values())}
PRESETS = Path(__file__).resolve().parents[2]
"""Folder that contains configs/, so that `--config configs/...` works in any working directory."""


@dataclass(frozen=True)
class ConfigFile:
    """Settings in a TOML or JSON file.

    settings: values by flag, such as "--batch-size". is_record: whether a run wrote the file. Such a file may come
    from somebody else, so it must not name files to execute. flag: the flag that named the file.
    """

    path: Path
    settings: Mapping[str, Any]
    is_record: bool = False
    flag: str = "--config"

    def __str__(self) -> str:
        return f"{self.flag} {self.path}"

    def values(self, known: Mapping[str, Option], all_known: bool) -> tuple[dict[str, Any], list[str]]:
        """Converts and validates the settings; returns the valid values by field, and problems.

        known: flags by field name. all_known: whether a setting that is not in `known` is a problem.
        """
        fields = {option.name: field for field, option in known.items() if not option.is_of_launcher}
        values, problems = {}, []
        for name, value in self.settings.items():
            if name in RETIRED:
                continue
            if name not in fields:
                keys = [_key(option.name) for option in known.values() if not option.hidden]
                why = "is only for the command line" if name in OF_COMMAND_LINE else f"no such flag; {hint(name, keys)}"
                problems += [f"{self}: {_key(name)}: {why}"] if all_known else []
            elif not (self.is_record and known[fields[name]].from_record == "ignored"):
                try:
                    values[fields[name]] = known[fields[name]].from_plain(value)
                except ValueError as error:
                    problems.append(f"{self}: {_key(name)} = {_as_toml(value)}: {error}")
        if self.is_record:
            of_earlier = {field: option.absent for field, option in known.items() if option.name not in self.settings}
            values |= {field: value for field, value in of_earlier.items() if value is not None}
            # a value without effect would be refused where it is not the default, as if a user had given it
            values = {field: value for field, value in values.items() if known[field].has_effect(values, known)}
        return values, problems

    def of_several_devices(self) -> list[str]:
        """Returns the settings in this file that apply only to multi-device runs."""
        known = {option.name: option for option in options(MultiDeviceFlags).values() if not option.hidden}
        return [
            f"{_key(name)} = {_as_toml(value)}"
            for name, value in self.settings.items()
            if name in known and value not in (None, known[name].to_plain(known[name].default))
        ]


def read_config_files(paths: Iterable[Path]) -> tuple[list[ConfigFile], list[str]]:
    """Reads settings files; returns the readable files, and problems with unreadable files."""
    files, problems = [], []
    for path in paths:
        try:
            files.append(ConfigFile(path, _by_flag(_settings_in(path)), is_record=path.suffix == ".json"))
        except ValueError as error:
            problems.append(f"--config {path}: {error}")
    return files, problems


def _settings_in(path: Path) -> Mapping[str, Any]:
    import tomllib  # imported only if a file is given

    path = PRESETS / path if path.parts[:1] == ("configs",) and not path.exists() else path
    try:
        text = read_whole(path, MOST_RECORD).decode("utf-8-sig")  # editors may write a byte order mark
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not text in UTF-8: {error.reason}") from None
    kind, read = ("JSON", json.loads) if path.suffix == ".json" else ("TOML", tomllib.loads)
    try:
        stated = read(text)
        repr(stated)  # raises for huge hexadecimal numbers and deep tables, which no message could show
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid {kind}: {error}") from None
    if kind == "TOML":
        return stated
    settings = stated.get("config") if isinstance(stated, dict) else None
    if not isinstance(settings, dict):
        raise ValueError('has no "config", so it is not the config.json of a run')
    return settings


def _by_flag(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Converts keys to flags, such as batch_size to --batch-size. Raises ValueError for tables and duplicates."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(one, dict) for one in value)):
            raise ValueError(f"{key} is a table; write each setting on its own line, such as batch-size = 64")
        name = "--" + key.removeprefix("--").replace("_", "-")
        if name in found:
            raise ValueError(f"sets {_key(name)} twice")
        found[name] = value
    return found


def with_origins(problem: str, origins: Mapping[str, ConfigFile]) -> str:
    """Appends to a message the origin of each flag that it mentions. origins: files or runs, by flag."""
    words = {word.strip(",.:;()'\"") for word in problem.split()}
    named = [
        f"{name} is {'set in' if file.flag == '--config' else 'of the run in'} {file.path}"
        for name, file in origins.items()
        if name in words
    ]
    return f"{problem} ({', '.join(named)})" if named else problem


def as_toml(groups: Sequence[FlagGroup]) -> str:
    """Formats all settings with their help as TOML for `--config`; settings without a value become comments."""
    lines = ["# For --config; paths are relative to the folder where the command runs."]
    for group in groups:
        lines += ["", "", f"# --- {described(type(group))[0]} ---"]
        for field, option in options(type(group)).items():
            if not option.hidden:
                value = option.to_plain(getattr(group, field))
                comment = textwrap.wrap(option.help, LINE_LENGTH, initial_indent="# ", subsequent_indent="# ")
                setting = f"# {_key(option.name)} =" if value is None else f"{_key(option.name)} = {_as_toml(value)}"
                lines += ["", *comment, setting]
    return "\n".join(lines)


def _key(name: str) -> str:
    return name.removeprefix("--")


def _as_toml(value: Any) -> str:
    """Formats a flag's value as TOML, which for these values is JSON with the DEL character escaped."""
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
