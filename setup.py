"""Builds the installed form of the project: a single package `lockstep` that contains all other packages.

A clone's `from trainer.task import Task` becomes `from lockstep.trainer.task import Task`, and `python main.py` in
messages becomes `lockstep`.
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
    (r"(?<![\w./])trainer\.(?=(fit|load|gather|from_\w+|[A-Z]\w+)\b)", "lockstep."),
)
"""Patterns for names of programs and public names in a clone, and their replacements in the package."""


def installed_form(source: str) -> str:
    """Returns a module's source with the imports and names of the installed package.

    Raises ValueError for an import that cannot be converted.
    """
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
    """Copies modules into the package and adapts their imports (`installed_form`)."""

    def run(self) -> None:
        """Builds after deleting the previous build, whose modules may have been deleted in the clone."""
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()

    def build_module(self, module, module_file, package):  # type: ignore[no-untyped-def]
        built = super().build_module(module, module_file, package)
        Path(built[0]).write_text(installed_form(Path(module_file).read_text(encoding="utf-8")), encoding="utf-8")
        return built


class NoEditable(editable_wheel):
    """Refuses `pip install -e`, which would make all folders of the clone importable in the whole environment."""

    def run(self) -> None:
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
