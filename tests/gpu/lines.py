"""Which lines of the program run on a GPU alone, and which of them the imagined GPUs reach.

    python -m tests.gpu.lines record cpu      the default tests without those of tests/gpu; takes several times as long
    python -m tests.gpu.lines record cpu tests/tasks -m slow      adds what these tests run
    python -m tests.gpu.lines record gpu      all tests of tests/gpu
    python -m tests.gpu.lines                 the report, from both

Listed apart are lines that only NCCL reaches (those that name it), those that need a mistake or a fault and no GPU, and
those of `without_gpu.txt`, which somebody has read and found to need none. Of the others at least 90 % must be reached,
or the exit status is 1. `--folder` says where the records are.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[2]
RECORDER = Path(__file__).parent / "recorder" / "sitecustomize.py"
READ = Path(__file__).with_name("without_gpu.txt")
TESTS = {
    "cpu": ["tests", "--ignore", "tests/gpu", "-n", "2", "--dist", "loadfile"],
    "gpu": ["tests/gpu", "-m", "slow or not slow"],
}
LEAST_REACHED = 0.9
HOST_ERRORS = ("OSError", "BrokenPipeError", "ValueError", "UnicodeDecodeError", "ARCHIVE_ERRORS", "KeyboardInterrupt")


def record(which: str, folder: Path, tests: list[str]) -> int:
    """Runs tests and keeps which lines ran. tests: instead of the usual ones, to add to what is kept of those."""
    folder.mkdir(parents=True, exist_ok=True)
    if not tests:
        (folder / which).unlink(missing_ok=True)
    path = os.pathsep.join([str(RECORDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "LOCKSTEP_LINES": str(folder / which)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", RECORDER.stem]
    command += tests or TESTS[which]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def recorded(which: str, folder: Path) -> set[tuple[str, int]]:
    """(file, line)."""
    pairs = (line.rsplit(":", 1) for line in (folder / which).read_text().splitlines())
    return {(path, int(number)) for path, number in pairs}


def lines_of_the_program() -> dict[tuple[str, int], str]:
    """The text of every line that can run, by (file, line)."""
    found = {}
    for path, text in _program():
        lines = text.splitlines()
        found |= {(path, number): lines[number - 1].strip() for number in _numbers(compile(text, path, "exec"))}
    return found


def faults() -> set[tuple[str, int]]:
    """Lines that need something to be wrong, and no GPU: by (file, line).

    Those that are run before an error is raised, and at no other time; that collect mistakes of a command line; in
    handlers of errors that files, names and pipes cause; of a method that a subclass has to write. And those that are
    for a checker of types alone.
    """
    return {(path, number) for path, text in _program() for number in _faulty(ast.parse(text))}


def read() -> set[tuple[str, str]]:
    """(file, text) of the lines in `without_gpu.txt`."""
    pairs = (line.split(": ", 1) for line in READ.read_text().splitlines())
    return {(path, text) for path, text in pairs}


def _faulty(tree: ast.Module) -> set[int]:
    nodes = list(ast.walk(tree))
    branches = [node.body for node in nodes if isinstance(node, ast.If | ast.ExceptHandler)]
    branches += [node.orelse for node in nodes if isinstance(node, ast.If) and node.orelse]
    branches = [branch for branch in branches if isinstance(branch[-1], ast.Raise) or _collects_mistake(branch)]
    branches += [[node] for node in nodes if isinstance(node, ast.ExceptHandler) and _is_of_host(node)]
    branches += [[node] for node in nodes if isinstance(node, ast.Raise)]
    branches += [node.body for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {number for branch in branches for number in range(branch[0].lineno, (branch[-1].end_lineno or 0) + 1)}


def _collects_mistake(branch: list[ast.stmt]) -> bool:
    """`found.append("--flag ...")`."""
    return len(branch) == 1 and ast.unparse(branch[0]).startswith(("found.append(", "found +="))


def _is_of_host(handler: ast.ExceptHandler) -> bool:
    return handler.type is not None and any(name in ast.unparse(handler.type) for name in HOST_ERRORS)


def _program() -> Iterator[tuple[str, str]]:
    """Every file from the root, with its text."""
    folders = [path for part in ("trainer", "tasks", "models", "data") for path in (ROOT / part).rglob("*.py")]
    for path in sorted([*folders, ROOT / "profiler.py", ROOT / "main.py", ROOT / "main_multi_gpu.py"]):
        yield str(path.relative_to(ROOT)), path.read_text()


def _numbers(code: CodeType) -> set[int]:
    """Those that tracing reports: where instructions begin."""
    own = {line for *_, line in code.co_lines() if line}
    return own.union(*(_numbers(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def report(folder: Path) -> int:
    run_on_cpu, reached = (recorded(which, folder) for which in ("cpu", "gpu"))
    never = {place: text for place, text in lines_of_the_program().items() if place not in run_on_cpu}
    of_nccl = {place for place, text in never.items() if "nccl" in text.lower()}
    of_faults = (never.keys() - of_nccl) & faults()
    need_none = {place for place, text in never.items() if (place[0], text) in read()} - of_nccl - of_faults
    ours = never.keys() - of_nccl - of_faults - need_none
    for title, chosen in {
        "NCCL's alone": of_nccl,
        "faults": of_faults,
        "read, and found to need no GPU": need_none,
        "reached on imagined GPUs": ours & reached,
        "not reached": ours - reached,
    }.items():
        print(f"{len(chosen)} lines that the CPU never runs, {title}:")
        for path, number in sorted(chosen):
            print(f"  {path}:{number}: {never[path, number]}")
    share = len(ours & reached) / max(1, len(ours))
    print(f"reached: {share:.1%} of {len(ours)}")
    return int(share < LEAST_REACHED)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=["report", "record"], default="report")
    parser.add_argument("which", nargs="?", choices=list(TESTS), default="gpu")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "lockstep_lines")
    options, more = parser.parse_known_args()
    if options.action == "record":
        sys.exit(record(options.which, options.folder, more))
    sys.exit(report(options.folder))
