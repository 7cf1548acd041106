"""Checks the trainer on a single GPU, and measures its speed, in 25 minutes.

    python benchmarks/gpu.py                              runs every part, the most valuable parts first
    python benchmarks/gpu.py --parts exact,poisoned       runs these parts, in this order
    python benchmarks/gpu.py --small                      checks in a few minutes that every part runs
    python benchmarks/gpu.py --device cpu                 runs on the CPU everything that needs no GPU

The script installs nothing and needs no network, because the data are generated. Each part runs in a process of its
own, which is killed at the part's time limit. Every result is printed and written to --json at once, so an interrupted
run leaves its results. The exit status is 0 if every part ends in time and every check succeeds.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MACHINE = "machine"
"""Part that always runs first; describes the machine that produces the results of all parts."""
PARTS = {
    MACHINE: 3.0,
    "exact": 4.0,
    "graphed": 9.0,
    "whole": 10.0,
    "poisoned": 2.5,
    "snapshot": 1.0,
    "resumed": 3.5,
    "scarce": 1.5,
    "ranks": 6.0,
    "profiled": 2.0,
    "loop": 2.0,
    "throughput": 8.0,
    "saving": 1.5,
    "compiled": 5.0,
}
"""Modules of benchmarks/on_gpu, most valuable first, with their time limits in minutes."""
ENDED = "ended"
SHOWN_LINES = 15
"""Number of lines to print from the end of a failed part's log."""


def main() -> int:
    args = read_flags(sys.argv[1:])
    how = ["--device", args.device, *(["--small"] if args.small else [])]
    if args.of_part:
        name, folder = args.of_part
        return be_part(name, args.device, args.small, Path(folder))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    results = Results(args.json)
    commands = {name: [sys.executable, __file__, *how, "--of-part", name] for name in args.names}
    limits_s = {name: 60 * PARTS[name] for name in args.names}
    run_parts(commands, limits_s, 60 * args.minutes, args.logs or args.json.parent / "logs", results)
    return results.conclude()


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the flags; the result also contains `names`, the parts to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only test the script")
    parser.add_argument("--small", action="store_true", help="do little work, only to test the script")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts, separated by commas; default: %(default)s")
    parser.add_argument("--minutes", type=float, default=25.0, help="minutes for all parts; default: %(default)g")
    results = Path("checkpoints/gpu/gpu.json")
    parser.add_argument("--json", type=Path, default=results, help="file to write the results to; default: %(default)s")
    parser.add_argument("--logs", type=Path, help="folder for the parts' output (default: logs, next to the results)")
    parser.add_argument("--of-part", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.small |= args.device == "cpu"
    args.names = list(dict.fromkeys([MACHINE, *args.parts.split(",")]))
    unknown = [name for name in args.names if name not in PARTS]
    if unknown:
        parser.error(f"--parts {args.parts}: no such part: {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes:g}: must be above 0")
    return args


# --- the process that starts the parts ----------------------------------------------------------------------------


class Results:
    """Results so far, in a JSON file that is replaced after each result."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def begin(self, part: str) -> None:
        print(f"--- {part}", flush=True)
        self._parts[part] = {"status": "under way", "figures": {}, "do_not_hold": []}
        self._write()

    def add(self, part: str, found: Mapping[str, Any]) -> None:
        """Adds a result of a part. found: name and value and, for a check, whether it succeeds."""
        name, fails = found["name"], found.get("holds") is False
        self._parts[part]["figures"][name] = found["value"]
        if fails:
            self._parts[part]["do_not_hold"].append(name)
        print(f"{'WRONG ' if fails else ''}{name}: {found['value']}", flush=True)
        self._write()

    def end(self, part: str, status: str, seconds: float) -> None:
        self._parts.setdefault(part, {"figures": {}, "do_not_hold": []})
        self._parts[part] |= {"status": status, "seconds": round(seconds, 1)}
        print(f"--- {part}: {status}, {seconds:.0f} s", flush=True)
        self._write()

    def conclude(self) -> int:
        """Prints failed checks, and returns the exit status."""
        wrong = [f"{part}: {name}" for part, found in self._parts.items() for name in found["do_not_hold"]]
        wrong += [f"{part}: {found['status']}" for part, found in self._parts.items() if found["status"] != ENDED]
        print("\n".join(["Wrong or not settled:", *wrong] if wrong else ["Every check holds."]))
        print(f"Results: {self._path}", json.dumps(self._parts), sep="\n")
        return 1 if wrong else 0

    def _write(self) -> None:
        beside = self._path.with_name(f"{self._path.name}.tmp")
        beside.write_text(json.dumps({"parts": self._parts}, indent=1) + "\n")
        os.replace(beside, self._path)


def run_parts(
    commands: Mapping[str, Sequence[str]], limits_s: Mapping[str, float], limit_s: float, logs: Path, results: Results
) -> None:
    """Runs the parts one after another, each within its own time limit and the remaining time of the run."""
    deadline = time.monotonic() + limit_s
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-") as folder:
        for part, command in commands.items():
            started, log = time.monotonic(), logs / f"{part}.txt"
            if started >= deadline:
                results.end(part, "left out, because the time was up", 0.0)
                continue
            results.begin(part)
            limit = min(limits_s[part], deadline - started)
            status = watch([*command, str(Path(folder) / part)], log, limit, partial(results.add, part))
            results.end(part, status, time.monotonic() - started)
            if status != ENDED:
                print("\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]), flush=True)
            if status != ENDED and part == MACHINE:
                return


def watch(command: Sequence[str], log: Path, limit_s: float, add: Callable[[dict[str, Any]], None]) -> str:
    """Runs a part in a process and records its results; returns ENDED, or how the process failed.

    The process leads a process group, which is killed as a whole. If the parent process ends, the part's standard
    input closes, and the part exits.
    """
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, process_group=0
        )
    is_late = threading.Event()

    def end_it() -> None:
        is_late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, end_it)
    timer.daemon = True
    timer.start()
    try:
        for found in messages(process):
            add(found)
        status = process.wait()
    finally:
        timer.cancel()
        end_group(process)
    if is_late.is_set():
        return f"ended after its {limit_s / 60:.3g} minutes"
    return ENDED if status == 0 else f"failed with status {status}; see {log}"


def messages(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def end_group(process: subprocess.Popen[str]) -> None:
    """Kills the processes that a part left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# --- the process of a part ----------------------------------------------------------------------------------------


def be_part(name: str, device: str, is_small: bool, folder: Path) -> int:
    """Runs a part; writes each result to standard output as a line of JSON, and all printed text to the log."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder.mkdir(parents=True)
    from benchmarks.on_gpu.part import Report, Setting

    def tell(found: dict[str, Any]) -> None:
        channel.write(json.dumps(found) + "\n")
        channel.flush()

    try:
        part = importlib.import_module(f"benchmarks.on_gpu.{name}")
        part.measure(Setting(device, folder, is_small), Report(tell))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def end_with_parent() -> None:
    """Exits when standard input closes, which happens when the parent process ends."""
    os.read(0, 1)  # sys.stdin would hold a lock for which forked workers wait
    os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
