"""Measures code size: lines and files per folder, functions that take a `Run`, functions entered by a training step.

`python -m tests.helpers.budget` prints the measurements as JSON.
"""

import ast
import json
import sys
import tempfile
import threading
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ROOT / "trainer"
TRAINER_PREFIX = f"{TRAINER}/"
WORKLOADS = tuple(f"{ROOT}/{folder}/" for folder in ("tasks", "models", "data"))
GLOBAL_BATCH = 32
FIRST_STEP, LAST_STEP = 3, 8
"""Range of optimizer steps that `step_of_har` observes, LAST_STEP excluded; none of them logs."""


def sources(folder: Path) -> list[Path]:
    """Returns the Python files of a folder and its subfolders."""
    return [path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts]


def num_lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def lines_and_files_of_rooms() -> dict[str, tuple[int, int]]:
    """Returns (lines, files) of each folder of trainer/ except profiling. Empty files are not counted."""
    found: dict[str, list[Path]] = {}
    for path in sources(TRAINER):
        inside = path.relative_to(TRAINER)
        room = inside.parts[0] if len(inside.parts) > 1 else "trainer"
        if room != "profiling" and path.read_text().strip():
            found.setdefault(room, []).append(path)
    return {room: (num_lines(paths), len(paths)) for room, paths in sorted(found.items())}


def functions_with_run() -> dict[str, list[str]]:
    """Returns, by folder, the functions of trainer/ that have a parameter annotated as `Run`."""
    found: dict[str, list[str]] = {}
    for path in sources(TRAINER):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and _takes_run(node):
                room = path.relative_to(TRAINER).parts[0]
                found.setdefault(room, []).append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    return found


def _takes_run(function: ast.FunctionDef) -> bool:
    its = function.args
    return any(
        isinstance(part, ast.Name) and part.id == "Run"
        for arg in [*its.posonlyargs, *its.args, *its.kwonlyargs]
        if arg.annotation is not None
        for part in ast.walk(arg.annotation)
    )


class Entered:
    """Records the named functions of trainer/ that any thread enters between two optimizer steps.

    A resumed generator counts as entered. Functions that tasks, models or data call are not recorded.
    """

    def __init__(self) -> None:
        self.functions: set[tuple[str, str, int]] = set()
        self._is_on = False

    def install(self) -> None:
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)

    def remove(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def _enter(self, frame, event, _) -> None:
        if event != "call":
            return
        code, path = frame.f_code, frame.f_code.co_filename
        if not path.startswith(TRAINER_PREFIX) or path.startswith(WORKLOADS):
            return
        if code.co_name == "train_window":
            number = frame.f_locals["window"].step.after.samples // GLOBAL_BATCH
            self._is_on = FIRST_STEP <= number < LAST_STEP
        if self._is_on and not code.co_name.startswith("<") and not _is_within_workload(frame):
            self.functions.add((str(Path(path).relative_to(ROOT)), code.co_qualname, code.co_firstlineno))


def _is_within_workload(frame) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(WORKLOADS):
            return True
        frame = frame.f_back
    return False


def step_of_har() -> set[tuple[str, str, int]]:
    """Returns (file, function, first line) of each function that an optimizer step of har enters on one process."""
    from trainer.cli import main

    entered = Entered()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        argv = ["--task", "har", "--max-steps", LAST_STEP + 4, "--num-workers", 0, "--no-test", "--save-dir", folder]
        argv += ["--batch-size", GLOBAL_BATCH, "--device", "cpu", "--num-threads", 1, "--log-interval", 1000]
        entered.install()
        try:
            status = main([str(argument) for argument in argv], several_devices=False)
        finally:
            entered.remove()
    assert status == 0, status
    return entered.functions


def lengths_of_functions() -> dict[tuple[str, str], int]:
    """Returns the number of lines of each function of trainer/ by (file, name); for equal names, the largest number."""
    found: dict[tuple[str, str], int] = {}
    for path in sources(TRAINER):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                key, length = (str(path.relative_to(ROOT)), node.name), node.end_lineno - node.lineno + 1
                found[key] = max(length, found.get(key, 0))
    return found


def main() -> None:
    rooms, step = lines_and_files_of_rooms(), step_of_har()
    with_run = functions_with_run()
    by_file: dict[str, list[str]] = {}
    for file, name, _ in sorted(step):
        by_file.setdefault(file, []).append(name)
    report = {
        "rooms": rooms,
        "core": tuple(map(sum, zip(*rooms.values(), strict=True))),
        "functions with a Run": {room: len(found) for room, found in with_run.items()},
        "all of them": with_run,
        "files of a step": len(by_file),
        "functions of a step": len(step),
        "step": by_file,
        "benchmarks": num_lines(sources(ROOT / "benchmarks")),
        "tests": num_lines(sources(ROOT / "tests")),
        "longer than 60 lines": [
            f"{file} {name}" for (file, name), length in lengths_of_functions().items() if length > 60
        ],
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
