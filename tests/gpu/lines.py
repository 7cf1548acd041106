"""Which lines of the program run on a GPU alone, and which of them the imagined GPUs reach.

    python -m tests.gpu.lines record cpu      the default tests without those of tests/gpu; takes several times as long
    python -m tests.gpu.lines record gpu      all tests of tests/gpu
    python -m tests.gpu.lines                 the report, from both

Lines that only NCCL reaches (those that name it) are listed apart. Of the others at least 90 % must be reached, or the
exit status is 1. `--folder` says where the records are.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[2]
RECORDER = Path(__file__).with_name("recorder")
TESTS = {
    "cpu": ["tests", "--ignore", "tests/gpu", "-n", "2", "--dist", "loadfile"],
    "gpu": ["tests/gpu", "-m", "slow or not slow"],
}
LEAST_REACHED = 0.9


def record(which: str, folder: Path, tests: list[str]) -> int:
    """Runs tests and keeps which lines ran. tests: instead of the usual ones."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / which).unlink(missing_ok=True)
    path = os.pathsep.join([str(RECORDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "LOCKSTEP_LINES": str(folder / which)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(tests or TESTS[which])]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def recorded(which: str, folder: Path) -> set[tuple[str, int]]:
    """(file, line)."""
    pairs = (line.rsplit(":", 1) for line in (folder / which).read_text().splitlines())
    return {(path, int(number)) for path, number in pairs}


def lines_of_the_program() -> dict[tuple[str, int], str]:
    """The text of every line that can run, by (file, line)."""
    folders = [path for part in ("trainer", "models", "data") for path in (ROOT / part).rglob("*.py")]
    found = {}
    for path in sorted([*folders, ROOT / "profiler.py", ROOT / "main.py", ROOT / "main_multi_gpu.py"]):
        text = path.read_text()
        for number in _numbers(compile(text, str(path), "exec")):
            found[str(path.relative_to(ROOT)), number] = text.splitlines()[number - 1].strip()
    return found


def _numbers(code: CodeType) -> set[int]:
    """Those that tracing reports: where instructions begin."""
    own = {line for *_, line in code.co_lines() if line}
    return own.union(*(_numbers(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def report(folder: Path) -> int:
    run_on_cpu, reached = (recorded(which, folder) for which in ("cpu", "gpu"))
    never = {place: text for place, text in lines_of_the_program().items() if place not in run_on_cpu}
    of_nccl = {place: text for place, text in never.items() if "nccl" in text.lower()}
    ours = {place: text for place, text in never.items() if place not in of_nccl}
    for title, chosen in {
        "NCCL's alone": of_nccl,
        "reached on imagined GPUs": {place: text for place, text in ours.items() if place in reached},
        "not reached": {place: text for place, text in ours.items() if place not in reached},
    }.items():
        print(f"{len(chosen)} lines that the CPU never runs, {title}:")
        for (path, number), text in chosen.items():
            print(f"  {path}:{number}: {text}")
    share = len(ours.keys() & reached) / max(1, len(ours))
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
