"""Builds the installed form of the project: the package `lockstep` with all others inside it, and nothing beside it.

A clone's `from trainer.task import Task` becomes `from lockstep.trainer.task import Task`, and what messages call
`python main.py` becomes `lockstep`.
"""

import ast
import re
import shutil
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

PACKAGES = ("trainer", "tasks", "models", "data")
NAMES_IN_TEXT = (
    (r"(torchrun .*?) main_multi_gpu\.py", r"\1 -m lockstep"),
    (r"(torchrun .*?) profiler\.py", r"\1 -m lockstep profile"),
    (r"(python )?\bmain(_multi_gpu)?\.py\b", "lockstep"),
    (r"(python )?\bprofiler\.py\b", "lockstep profile"),
    (r"\bfrom (profiler|trainer) import", "from lockstep import"),
    (r"(?<![\w./])trainer\.(?=(fit|load|gather|Task|Logger|FlagGroup|Objective|SavedRun)\b)", "lockstep."),
)
"""How a clone calls its programs and its public names, and how the package does."""


def installed_form(source: str) -> str:
    """A module of the clone as it stands in the package. Raises ValueError for an import that has no such form."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] in PACKAGES for alias in node.names):
            raise ValueError(f"line {node.lineno}: {ast.unparse(node)}: write from ... import ...")
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").partition(".")[0] in PACKAGES:
            line = lines[node.lineno - 1].encode()
            start, end = line[: node.col_offset].decode(), line[node.col_offset :].decode()
            lines[node.lineno - 1] = start + end.replace("from ", "from lockstep.", 1)
    text = "".join(lines)
    for pattern, replacement in NAMES_IN_TEXT:
        text = re.sub(pattern, replacement, text)
    return text


class BuildPackage(build_py):
    """Copies the modules in their installed form."""

    def run(self) -> None:
        """Builds from nothing, as a module that is gone from the clone must not stay in the package."""
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()

    def build_module(self, module, module_file, package):  # type: ignore[no-untyped-def]
        """Copies one module."""
        built = super().build_module(module, module_file, package)
        Path(built[0]).write_text(installed_form(Path(module_file).read_text(encoding="utf-8")), encoding="utf-8")
        return built


class NoEditable(editable_wheel):
    """Refuses `pip install -e`, which would show the folders of the clone to everything in the environment."""

    def run(self) -> None:
        """Raises SystemExit."""
        raise SystemExit("An editable install is not offered: run the programs in the clone, or `pip install .`.")


if __name__ == "__main__":
    inner = ("configs", *PACKAGES)
    setup(
        packages=[
            "lockstep",
            *(f"lockstep.{name}" for name in find_namespace_packages(include=[f"{i}*" for i in inner])),
        ],
        package_dir={f"lockstep.{name}": name for name in inner},
        package_data={"": ["*.toml", "*.pth"]},
        cmdclass={"build_py": BuildPackage, "editable_wheel": NoEditable},
    )
