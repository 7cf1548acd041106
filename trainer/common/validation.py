"""Validates strings, paths and classes that the user gives."""

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
"""Strings that `find_class` has inserted at the front of `sys.path`, which may contain equal ones of its own."""


def checked_path(text: str) -> Path:
    """Converts a string to a path, which need not exist. Raises ValueError for a path that cannot be accessed."""
    if any(not character.isprintable() and character != "\t" for character in checked_text(text)):
        raise ValueError("must not have control characters in its name")
    try:
        os.stat(expanded(Path(text)))
    except (FileNotFoundError, NotADirectoryError):
        pass  # callers check existence
    except OSError as error:
        raise ValueError(f"cannot be accessed: {error.strerror}") from None
    return Path(text)


def expanded(path: Path) -> Path:
    """Expands a leading ~. Raises ValueError for a user without a home folder."""
    try:
        return path.expanduser()
    except RuntimeError:
        name = path.parts[0].removeprefix("~")
        raise ValueError(f"user {name} has no home folder" if name else "the current user has no home folder") from None


def absolute(path: Path) -> Path:
    """Makes a path absolute; removes `..` only if the result names the same file."""
    plain = os.path.abspath(path)  # may name another file if `..` follows a symbolic link
    return Path(plain) if os.path.realpath(plain) == os.path.realpath(path) else path.absolute()


def checked_text(text: str) -> str:
    """Returns the text. Raises ValueError for text that is not valid UTF-8 or contains a NUL byte."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("is not text in UTF-8") from None
    if "\0" in text:
        raise ValueError("must not contain a NUL byte")
    return text


def find_class(value: str, flag: str, base: type, comes_first: bool) -> type[Any]:
    """Imports a subclass of `base` from path/to/file.py:ClassName. Raises UserError.

    comes_first: insert the file's folder, and the folder of its package, at the front of sys.path, before the trainer's
    packages; otherwise append them.
    """
    path, class_name = split_name(value, flag)
    found = getattr(_import_file(path, f"{flag} {value}", comes_first), class_name, None)
    if found is None:
        raise UserError(f"{flag} {value}: {path} defines no {class_name}; name a class that the file defines")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{flag} {value}: {class_name} must be a subclass of trainer.{base.__name__}")
    return found


def split_name(value: str, flag: str) -> tuple[Path, str]:
    """Splits path/to/file.py:ClassName without importing the file. Raises UserError if the file does not exist."""
    file, colon, class_name = value.rpartition(":")
    if not colon or not class_name.isidentifier():  # nested classes are not supported
        raise UserError(f"{flag} {value}: must be path/to/file.py:ClassName")
    path = Path(file)
    with refusing_disk_errors(f"{flag} {value}"):
        if not path.is_file():
            raise UserError(f"{flag} {value}: there is no file {path}; correct the path")
        path.open("rb").close()
    return path, class_name


def _import_file(path: Path, given: str, comes_first: bool) -> ModuleType:
    """Imports a file as a module, or as a module of its package; does not replace another module of the same name."""
    path = path.resolve()
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    folders = [*dict.fromkeys((str(path.parent), str(root)))]
    if comes_first and sys.path[: len(folders)] != folders:
        sys.path[:0] = folders
        _put_first.extend(folders)
    sys.path += [folder for folder in folders if folder not in sys.path]
    parts = path.relative_to(root).with_suffix("").parts
    name, hint = ".".join(parts), ""
    if not _is_found(parts[0], root / parts[0] / "__init__.py" if parts[1:] else path):
        name = "file" + re.sub(r"\W", "_", str(path))
        hint = f"; another package has the name {parts[0]}; rename this package to import from it" if parts[1:] else ""
    try:
        if "." in name:
            return importlib.import_module(name)
        return sys.modules[name] if name in sys.modules else _execute(path, name)
    except (ImportError, SyntaxError, SystemExit) as error:
        package, dot, _ = (getattr(error, "name", None) or "").partition(".")
        beside = path.parent / package
        if dot and beside.with_suffix(".py").is_file():
            hint = f"; rename {beside}.py, which hides the package {package}"
        elif (dot or "relative import" in str(error)) and beside.is_dir() and not (beside / "__init__.py").exists():
            hint = f"; create an empty {beside / '__init__.py'}, so that {beside} is a package"
        raise UserError(f"{given}: cannot import {path}: {type(error).__name__}: {error}{hint}") from None


def _is_found(name: str, path: Path) -> bool:
    """Returns whether importing `name`, which has no dots, would find the file `path`."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path
    return False


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
    """Temporarily removes from `sys.path` the folders that `find_class` inserted at its front.

    In processes started in this context, the user's files cannot shadow modules of the trainer and its libraries.
    """
    path = list(sys.path)
    sys.path[:] = [folder for folder in path if not any(folder is own for own in _put_first)]
    try:
        yield
    finally:
        sys.path[:] = path
