"""Texts, paths and classes that a user gives."""

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.common.errors import UserError
from trainer.common.files import refusing_disk_errors

_put_first: list[str] = []
"""Folders of classes at the beginning of `sys.path`."""


def checked_path(text: str) -> Path:
    """The path, whether or not something is there. Raises ValueError for one that the system cannot look at."""
    if any(not character.isprintable() and character != "\t" for character in checked_text(text)):
        raise ValueError("must not have control characters in its name")
    try:
        os.stat(expanded(Path(text)))
    except (FileNotFoundError, NotADirectoryError):
        pass  # whether it has to be there is for others to say
    except OSError as error:
        raise ValueError(f"cannot be looked at: {error.strerror}") from None
    return Path(text)


def expanded(path: Path) -> Path:
    """Without ~ at its beginning. Raises ValueError for a user that is not there."""
    try:
        return path.expanduser()
    except RuntimeError:
        name = path.parts[0].removeprefix("~")
        raise ValueError(f"there is no user {name} with a home" if name else "this user has no home") from None


def whole(path: Path) -> Path:
    """The path from the root on, which leads to the same place from any folder."""
    plain = os.path.abspath(path)
    return Path(plain) if os.path.realpath(plain) == os.path.realpath(path) else path.absolute()  # `..` beyond a link


def checked_text(text: str) -> str:
    """The text. Raises ValueError for what is none in UTF-8, or holds a NUL byte."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("is not text in UTF-8") from None
    if "\0" in text:
        raise ValueError("must not hold a NUL byte")
    return text


def find_class(value: str, flag: str, base: type, comes_first: bool) -> type[Any]:
    """The class, a subclass of `base`. Raises UserError.

    comes_first: what stands beside the file goes before all other packages, also of the trainer; else after them.
    """
    path, class_name = split_name(value, flag)
    found = getattr(_import_file(path, f"{flag} {value}", comes_first), class_name, None)
    if found is None:
        raise UserError(f"{flag} {value}: {path} defines no {class_name}")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{flag} {value}: {class_name} is not a subclass of trainer.{base.__name__}")
    return found


def split_name(value: str, flag: str) -> tuple[Path, str]:
    """The file, which is there, and the name of the class; nothing is imported. Raises UserError."""
    file, colon, class_name = value.rpartition(":")
    if not colon or not class_name.isidentifier():  # a class within another, or within a function
        raise UserError(f"{flag} {value}: must be path/to/file.py:ClassName")
    path = Path(file)
    with refusing_disk_errors(f"{flag} {value}"):
        if not path.is_file():
            raise UserError(f"{flag} {value}: there is no file {path}")
        path.open("rb").close()
    return path, class_name


def _import_file(path: Path, given: str, comes_first: bool) -> ModuleType:
    """The file as a module; where another one has its name already, that one stays what others import."""
    path = path.resolve()
    folder = str(path.parent)
    if comes_first and sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
        _put_first.append(folder)
    elif folder not in sys.path:
        sys.path.append(folder)
    try:
        name = _module_name(path)
        return sys.modules[name] if name in sys.modules else _execute(path, name)
    except (ImportError, SyntaxError, SystemExit) as error:
        raise UserError(f"{given}: cannot import {path}: {type(error).__name__}: {error}") from None


def _module_name(path: Path) -> str:
    """The name by which Python finds the file, if it does; otherwise one made of its whole path."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(path.stem)
        if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path:
            return path.stem
    return "file" + re.sub(r"\W", "_", str(path))


def _execute(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_loader(name, SourceFileLoader(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def without_folders_of_classes() -> Iterator[None]:
    """Within it the folders that `find_class` has put first are not on Python's path.

    A process that starts then imports the trainer and its libraries before anything of the user can hide them.
    """
    path = list(sys.path)
    for folder in _put_first:
        with suppress(ValueError):  # someone has taken it off
            sys.path.remove(folder)
    try:
        yield
    finally:
        sys.path[:] = path
