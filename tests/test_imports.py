"""Imports run one way, and what belongs to one file stays in it. Read from the source with `ast`; nothing is run."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("trainer", "models", "data")
SCRIPTS = ("main.py", "main_multi_gpu.py", "profiler.py")
THIRD_PARTIES = {"torch", "numpy", "tqdm", "tensorboard", "PIL"}
RANK_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
# What a task's own files may know of the trainer: the contract, the way to declare flags, and to read weights.
TASK_MAY_USE = ("trainer.task", "trainer.config", "trainer.checkpoint.", "trainer.loading.", "trainer.tasks.")


@dataclass(frozen=True)
class Found:
    """Something at a line of a module. name: a dotted name, or the text of a string."""

    module: str
    path: Path
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.name}"

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


@cache
def modules() -> dict[str, Path]:
    """Every module that runs outside the tests, by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    for script in SCRIPTS:
        if (ROOT / script).exists():
            found[script.removesuffix(".py")] = ROOT / script
    return found


@cache
def examples() -> dict[str, Path]:
    return {f"examples.{path.stem}": path for path in sorted((ROOT / "examples").glob("*.py"))}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def imports_of(module: str) -> tuple[Found, ...]:
    """Every import of a module, also those inside functions, under the name of the module that is imported."""
    path = modules().get(module) or examples()[module]
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)}:{node.lineno}: relative import; write the whole name"
            assert node.module is not None
            # `from trainer.loop import plan` imports trainer.loop.plan, as `from trainer.loop.plan import Plan` does.
            names = [
                full if (full := f"{node.module}.{alias.name}") in modules() else node.module for alias in node.names
            ]
        else:
            continue
        found += [Found(module, path, node.lineno, name) for name in dict.fromkeys(names)]
    return tuple(found)


def project_imports(module: str) -> list[Found]:
    return [
        found for found in imports_of(module) if found.top in (*PACKAGES, *(s.removesuffix(".py") for s in SCRIPTS))
    ]


def reached_from(module: str) -> dict[str, str]:
    """Every project module that importing this one brings in -> the way to it, for the message."""
    ways = {module: module}
    queue = [module]
    while queue:
        current = queue.pop(0)
        for found in project_imports(current):
            if found.name not in ways and found.name in modules():
                ways[found.name] = f"{ways[current]} -> {found.name} ({found.path.relative_to(ROOT)}:{found.line})"
                queue.append(found.name)
    return ways


def used_names(path: Path) -> Iterator[tuple[int, str]]:
    """Every dotted name of a file that starts at an import, such as torch.distributed.all_reduce, with its line."""
    aliases = {}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree_of(path)):
        parts = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in aliases:
            yield inner.lineno, ".".join([aliases[inner.id], *reversed(parts)])


def uses_of(prefix: str) -> list[Found]:
    return [
        Found(module, path, line, name)
        for module, path in (modules() | examples()).items()
        for line, name in used_names(path)
        if name == prefix or name.startswith(f"{prefix}.")
    ]


def report(offenders: list[Found]) -> str:
    return "\n".join(sorted({str(found) for found in offenders}))


@pytest.mark.parametrize("package", ["models", "data"])
def test_models_and_data_stand_alone(package):
    allowed = {package, "torch", "numpy", *sys.stdlib_module_names}
    offenders = [
        found
        for module in modules()
        if module.partition(".")[0] == package
        for found in imports_of(module)
        if found.top not in allowed and not found.name.startswith("trainer.loading.")
    ]
    what = "torch, numpy, the standard library, trainer.loading and itself"
    assert not offenders, f"{package}/ imports only {what}:\n{report(offenders)}"


def test_runtime_needs_only_the_declared_third_parties():
    allowed = {*PACKAGES, *THIRD_PARTIES, *sys.stdlib_module_names}
    offenders = [
        found for module in (*modules(), *examples()) for found in imports_of(module) if found.top not in allowed
    ]
    assert not offenders, f"not in requirements.txt:\n{report(offenders)}"


def test_loop_knows_no_task_model_or_data_source():
    offenders = [
        found
        for found in project_imports("trainer.loop.train")
        if found.name.startswith(("trainer.tasks", "models")) or found.top == "data"
    ]
    assert not offenders, f"the loop imports no task, no model and no data source:\n{report(offenders)}"


def test_loop_reaches_no_task_model_or_data_source_by_a_detour():
    ways = reached_from("trainer.loop.train")
    offenders = [way for name, way in ways.items() if name.startswith(("trainer.tasks", "models.", "data."))]
    assert not offenders, "\n".join(offenders)


@pytest.mark.parametrize("module", ["trainer.loop.plan", "trainer.loop.schedule"])
def test_arithmetic_needs_no_torch(module):
    offenders = [
        f"{found}  (by way of {way})"
        for name, way in reached_from(module).items()
        for found in imports_of(name)
        if found.top not in (*PACKAGES, *sys.stdlib_module_names)
    ]
    assert not offenders, f"{module} is pure Python:\n" + "\n".join(offenders)


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("torch.distributed", "trainer.parallel"),
        ("torch.nn.parallel", "trainer.parallel.ddp"),
        ("torch.nn.DataParallel", "trainer.parallel.data_parallel"),
        ("torch.multiprocessing", "trainer.parallel.launch"),
    ],
)
def test_library_stays_at_home(library, home):
    """In a file, or in a package."""
    offenders = [found for found in uses_of(library) if not f"{found.module}.".startswith(f"{home}.")]
    assert not offenders, f"{library} belongs to {home} alone:\n{report(offenders)}"


def test_rank_variables_stay_in_ranks():
    offenders = [
        Found(module, path, node.lineno, node.value)
        for module, path in (modules() | examples()).items()
        if module != "trainer.parallel.environment"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in RANK_VARIABLES
    ]
    assert not offenders, f"only trainer/parallel/environment.py reads rank variables:\n{report(offenders)}"


def test_only_the_scripts_import_the_command_line():
    allowed = {"trainer.cli", *(script.removesuffix(".py") for script in SCRIPTS)}
    offenders = [
        found
        for module in modules()
        if module not in allowed
        for found in project_imports(module)
        if found.name in allowed
    ]
    assert not offenders, f"nothing imports the entry points:\n{report(offenders)}"


def test_training_knows_nothing_of_profiling():
    offenders = [
        found
        for module in modules()
        if module != "profiler" and not module.startswith("trainer.profiling")
        for found in project_imports(module)
        if found.name.startswith("trainer.profiling")
    ]
    assert not offenders, f"only profiler.py imports trainer.profiling:\n{report(offenders)}"


def test_tasks_use_only_the_contract():
    tasks = [module for module in modules() if module.startswith("trainer.tasks.")]
    offenders = [
        found
        for module in (*tasks, *examples())
        for found in project_imports(module)
        if found.top == "trainer" and not found.name.startswith(TASK_MAY_USE)
    ]
    assert not offenders, f"a task sees of the trainer only {', '.join(sorted(TASK_MAY_USE))}:\n{report(offenders)}"


def test_imports_name_modules_that_exist():
    offenders = [
        found
        for module in (*modules(), *examples())
        for found in project_imports(module)
        if found.name not in modules()
    ]
    assert not offenders, f"no such module:\n{report(offenders)}"


def test_no_import_cycle():
    done: set[str] = set()

    def visit(module: str, above: tuple[Found, ...]) -> None:
        for found in project_imports(module):
            chain = (*above, found)
            if any(step.module == found.name for step in chain):
                start = next(i for i, step in enumerate(chain) if step.module == found.name)
                raise AssertionError("import cycle:\n" + "\n".join(map(str, chain[start:])))
            if found.name in modules() and found.name not in done:
                visit(found.name, chain)
        done.add(module)

    for module in modules():
        visit(module, ())
