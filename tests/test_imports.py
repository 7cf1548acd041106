"""Checks with `ast` which room (a package, or a file of trainer/) may import which, and which library it may use."""

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("trainer", "tasks", "models", "data")
SCRIPTS = ("main", "main_multi_gpu", "profiler")
CLASSIFIER = "tasks.tabular_classifier"
FILES_OF_TRAINER = {"__init__.py", "task.py", "script.py", "config.py", "flags.py", "registry.py", "cli.py", "api.py"}

# --- rooms, and the rooms or modules that each may import ---------------------------------------------------------

CONTRACT = {"trainer.task", "trainer.config", "trainer.loading", "trainer.common"}
BELOW_THE_LOOP = CONTRACT | {
    "trainer.flags",
    "trainer.failure",
    "trainer.parallel",
    "trainer.checkpoint",
    "trainer.logs",
}
ARROWS = {
    "trainer.common": set(),
    "trainer.loading": {"trainer.common"},
    "trainer.config": {"trainer.loading", "trainer.common"},
    "trainer.flags": {"trainer.config", "trainer.common"},
    "trainer.task": {"trainer.config", "trainer.loading", "trainer.common"},
    "models": {"trainer.loading", "trainer.common"},
    "data": {"trainer.loading", "trainer.common"},
    "trainer.registry": CONTRACT,
    "trainer.script": CONTRACT | {"trainer.parallel", "trainer.registry"},
    "trainer.failure": {"trainer.common"},
    "trainer.parallel": CONTRACT | {"trainer.flags", "trainer.failure"},
    "trainer.checkpoint": CONTRACT | {"trainer.flags"},
    "trainer.logs": CONTRACT,
    "trainer.loop": BELOW_THE_LOOP,
    "trainer.commands": BELOW_THE_LOOP | {"trainer.registry", "trainer.loop"},
    "trainer.profiling": BELOW_THE_LOOP | {"trainer.registry", "trainer.loop", "trainer.commands"},
    "trainer.cli": BELOW_THE_LOOP | {"trainer.registry", "trainer.loop", "trainer.commands"},
    "trainer.api": BELOW_THE_LOOP
    | {"trainer.registry", "trainer.script", "trainer.loop", "trainer.commands", "trainer.cli"},
    "tasks": CONTRACT | {"trainer.checkpoint", "models", "data"},
    CLASSIFIER: BELOW_THE_LOOP | {"tasks", "trainer.api", "trainer.commands", "models", "data"},
    "main": {"tasks", "trainer.cli", "trainer.failure.signals"},
    "main_multi_gpu": {"tasks", "trainer.cli", "trainer.failure.signals"},
    "profiler": {"tasks", "trainer.profiling"},
    # trainer/__init__.py exports what a user's task needs; examples and lockstep import it.
    "trainer": CONTRACT | {"trainer.logs.logger", "trainer.api", "trainer.parallel.rows"},
    "examples": {"lockstep", "trainer", "models"},
    "lockstep": {
        "trainer",
        "trainer.cli",
        "trainer.commands",
        "trainer.failure",
        "trainer.profiling",
        "tasks",
        CLASSIFIER,
    },
}

# --- libraries of each room --------------------------------------------------------------------------------------

THIRD_PARTIES = {"torch", "numpy", "tqdm", "tensorboard", "PIL"}
HOMES = {
    "torch.distributed": {"trainer.parallel", "trainer.failure"},
    "torch.nn.parallel": {"trainer.parallel"},
    "torch.nn.DataParallel": {"trainer.parallel"},
    "torch.multiprocessing": {"trainer.parallel"},
    "multiprocessing.get_context": {"trainer.parallel"},
    "multiprocessing": {"trainer.parallel", "trainer.commands", "trainer.loading"},
}
RANK_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
HOME_OF_RANK_VARIABLES = "trainer.parallel"


@dataclass(frozen=True)
class Found:
    """Dotted name, or text of a string, at a line of a module."""

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
    """Returns every module that runs outside the tests, by its dotted name."""
    paths = [path for folder in (*PACKAGES, "lockstep", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    paths += [ROOT / f"{script}.py" for script in SCRIPTS]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def room_of(module: str) -> str:
    """trainer.loop.train -> trainer.loop; data.har.windows -> data"""
    if module == CLASSIFIER:
        return CLASSIFIER  # it calls trainer.fit
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "trainer" else parts[0]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def imports_of(module: str) -> tuple[Found, ...]:
    """Returns every import of a module, under the name of the imported module.

    Imports inside functions count, and so do modules that are named by a string, to be imported later.
    """
    path = modules()[module]
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
        elif isinstance(node, ast.Constant) and node.value in modules() and "." in node.value:
            names = [node.value]
        else:
            continue
        found += [Found(module, path, node.lineno, name) for name in dict.fromkeys(names)]
    return tuple(found)


def project_imports(module: str) -> list[Found]:
    return [found for found in imports_of(module) if found.top in (*PACKAGES, *SCRIPTS, "lockstep", "examples")]


def reached_from(module: str) -> dict[str, str]:
    """Returns every project module that importing this one brings in, and the way to it, for the message."""
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
    """Yields every dotted name that starts at an import, such as torch.distributed.all_reduce, with its line."""
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


def report(offenders: Iterable[Found]) -> str:
    return "\n".join(sorted({str(found) for found in offenders}))


# --- rooms -------------------------------------------------------------------------------------------------------


def test_every_module_belongs_to_a_room():
    """Each module is in a package of trainer/ or one of its few files, and ARROWS lists no other room."""
    astray = {path.name for path in (ROOT / "trainer").glob("*.py")} ^ FILES_OF_TRAINER
    assert not astray, f"trainer/ holds {', '.join(sorted(FILES_OF_TRAINER))} and packages: {astray}"
    without = [folder for folder in (ROOT / "trainer").iterdir() if folder.is_dir() and not is_package(folder)]
    assert not without, f"no __init__.py: {without}"
    assert {room_of(module) for module in modules()} == ARROWS.keys()


def is_package(folder: Path) -> bool:
    return (folder / "__init__.py").exists() or folder.name == "__pycache__"


def test_no_import_cycle_of_rooms():
    rooms = {room: {room_of(name) for name in allowed} for room, allowed in ARROWS.items()}
    TopologicalSorter(rooms).prepare()  # raises CycleError, which names the cycle


def may_import(module: str, name: str) -> bool:
    return room_of(name) == room_of(module) or not ARROWS[room_of(module)].isdisjoint({name, room_of(name)})


def test_imports_follow_the_arrows():
    broken = [
        f"{found}: {room} may import only {', '.join(sorted(ARROWS[room])) or 'itself'}"
        for module in modules()
        for found in project_imports(module)
        if not may_import(module, found.name)
        for room in [room_of(module)]
    ]
    assert not broken, "\n".join(broken)


def test_no_import_cycle_of_modules():
    imports = {module: {found.name for found in project_imports(module)} for module in modules()}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        # Of each two neighbours, the second imports the first.
        pairs = set(zip(error.args[1][1:], error.args[1], strict=False))
        arrows = [found for module in modules() for found in project_imports(module)]
        raise AssertionError("import cycle:\n" + report(f for f in arrows if (f.module, f.name) in pairs)) from None


def test_imports_name_modules_that_exist():
    offenders = [found for module in modules() for found in project_imports(module) if found.name not in modules()]
    assert not offenders, f"no such module:\n{report(offenders)}"


# --- libraries ---------------------------------------------------------------------------------------------------


def test_runtime_needs_only_the_declared_third_parties():
    allowed = {*PACKAGES, *SCRIPTS, "lockstep", "examples", *THIRD_PARTIES, *sys.stdlib_module_names}
    offenders = [found for module in modules() for found in imports_of(module) if found.top not in allowed]
    assert not offenders, f"not in requirements.txt:\n{report(offenders)}"


def test_models_and_data_need_only_torch_and_numpy():
    allowed = {*PACKAGES, "torch", "numpy", *sys.stdlib_module_names}
    offenders = [
        found
        for module in modules()
        if room_of(module) in ("models", "data")
        for found in imports_of(module)
        if found.top not in allowed
    ]
    assert not offenders, f"models/ and data/ need only torch, numpy and the standard library:\n{report(offenders)}"


@pytest.mark.parametrize("module", ["trainer.loop.plan", "trainer.loop.schedule"])
def test_arithmetic_needs_no_torch(module):
    offenders = [
        f"{found}  (by way of {way})"
        for name, way in reached_from(module).items()
        for found in imports_of(name)
        if found.top not in (*PACKAGES, "numpy", *sys.stdlib_module_names)
    ]
    assert not offenders, f"{module} needs numpy at most:\n" + "\n".join(offenders)


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_only_in_its_rooms(library):
    offenders = [
        Found(module, path, line, name)
        for module, path in modules().items()
        if room_of(module) not in HOMES[library]
        for line, name in used_names(path)
        if name == library or name.startswith(f"{library}.")
    ]
    assert not offenders, f"{library} belongs to {', '.join(sorted(HOMES[library]))} alone:\n{report(offenders)}"


PRIVATE_NAMES = "trainer.common.torch_private"
PRIVATE_OF_OTHERS = {"_asdict", "_exit", "_fields", "_format_action_invocation", "_make", "_on_queue_feeder_error"}
PRIVATE_OF_OTHERS |= {"_option_string_actions", "_replace", "_run_exitfuncs"}
"""Private names of the standard library that the project uses."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names_of_torch(path: Path, known: set[str]) -> Iterator[tuple[int, str]]:
    """Yields private names of torch: dotted names, attributes that only torch can have, and overridden methods.

    known: private names that the project defines.
    """
    of_torch = {name for kind in (nn.Module, torch.optim.Optimizer) for name in dir(kind) if is_private(name)}
    of_torch |= {name for name in dir(nn.parallel.DistributedDataParallel) if is_private(name)}
    only_torch = names_in_torch_private() - {"_buffers", "_workers"}  # the project has attributes of these names
    for line, name in used_names(path):
        if name.startswith("torch.") and any(map(is_private, name.split("."))):
            yield line, name
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            allowed = is_own(node.value) or node.attr in (known - of_torch) | PRIVATE_OF_OTHERS
            if node.attr in only_torch or not allowed:
                yield node.lineno, f".{node.attr}"
        elif isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            yield from ((each.lineno, each.name) for each in methods if node.bases and each.name in of_torch)


@cache
def names_in_torch_private() -> set[str]:
    """Returns the private attributes, named directly or in a string, that the file of torch's private names uses."""
    nodes = list(ast.walk(tree_of(modules()[PRIVATE_NAMES])))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {name for name in names if is_private(name)}


def is_own(owner: ast.AST) -> bool:
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls")


def defined_names(tree: ast.Module) -> set[str]:
    """Returns the names of all functions, and of all attributes that are assigned to."""
    nodes = list(ast.walk(tree))
    assigned = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return assigned | {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_private_names_of_torch_stay_in_one_file():
    paths = {module: path for module, path in modules().items() if module != PRIVATE_NAMES}
    known = set[str]().union(*(defined_names(tree_of(path)) for path in paths.values()))
    offenders = [
        Found(module, path, line, name)
        for module, path in paths.items()
        for line, name in private_names_of_torch(path, known)
    ]
    assert not offenders, f"private names of torch belong to {PRIVATE_NAMES} alone:\n{report(offenders)}"


def test_private_names_are_detected(tmp_path):
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch.utils._pytree import tree_map\n"
        "class Model(torch.nn.Module):\n    def _apply(self, fn): return super()._apply(fn)\n"
        "    def own(self, group): return torch._foreach_norm([group._get_backend(), self._kept])\n"
        "class Sgd(torch.optim.SGD):\n    def skip(self): self._step_supports_amp_scaling = True\n"
    )
    known = {"_apply", "_kept", "_step_supports_amp_scaling"}
    found = {name for _, name in private_names_of_torch(tmp_path / "model.py", known)}
    assert found == {
        "torch.utils._pytree.tree_map",
        "_apply",
        "._apply",
        "torch._foreach_norm",
        "._get_backend",
        "._foreach_norm",
        "._step_supports_amp_scaling",
    }


def test_weights_are_loaded_in_one_place():
    """Other callers of `load_state_dict` load states of optimizers or streams, or initialise a part of a new model."""
    strategy = {"trainer.parallel.strategy", "trainer.parallel.ddp", "trainer.parallel.optimizer_states"}
    homes = {
        "load_state_dict": {*strategy, "trainer.loop.checkpointing", "trainer.loading.streams", "tasks.har_objective"},
        "load_weights": {"trainer.commands.weights"},
    }
    callers = {
        name: {
            module
            for module, path in modules().items()
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Attribute)
            and node.attr == name
            and room_of(module).startswith(("trainer", "tasks"))
        }
        for name in homes
    }
    assert callers == homes


def test_rank_variables_are_used_only_in_their_room():
    offenders = [
        Found(module, path, node.lineno, node.value)
        for module, path in modules().items()
        if room_of(module) != HOME_OF_RANK_VARIABLES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in RANK_VARIABLES
    ]
    assert not offenders, f"only {HOME_OF_RANK_VARIABLES} reads rank variables:\n{report(offenders)}"
