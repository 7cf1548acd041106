import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers import forks
from tests.helpers.forks import ROOT
from trainer.cli import main
from trainer.failure.signals import STOP_SIGNALS

WEIGHTED = f"{ROOT / 'tests' / 'helpers' / 'weighted_task.py'}:Weighted"
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TINY = ["--task", WEIGHTED, "--epochs", 1, "--num-train", 24, "--batch-size", 8, "--lr", 0.01, "--num-threads", 1]
STEPS_PER_EPOCH = 3


def pytest_configure(config):
    """Hides GPUs unless -m asks for tests that need one, so that the other tests mean the same on every machine."""
    if torch.backends.cuda.is_built() and "cuda" not in config.option.markexpr.replace("not cuda", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish():
    """Freezes what pytest collected, because each garbage collection would traverse it for half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_stop_signal_is_ignored():
    """Handles stop signals that nohup or `&` had pytest ignore, so that programs started by tests receive them.

    A child process inherits that a signal is ignored, but not a handler. A handler that does nothing therefore protects
    pytest alone. SIGINT gets Python's own handler, which tests rely on.
    """
    ignored = [number for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(autouse=True)
def same_numbers_in_every_run():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    """Fails a test that changes the environment, or leaves threads or a process group."""
    environment = dict(os.environ)
    threads = set(threading.enumerate())
    yield
    assert not torch.distributed.is_initialized()
    changed = {name for name in os.environ.keys() | environment.keys() if os.environ.get(name) != environment.get(name)}
    by_torch = {name for name in changed if name.lstrip("_").startswith("TORCHINDUCTOR")}
    assert changed - by_torch <= {"PYTEST_CURRENT_TEST"}
    assert not [thread for thread in set(threading.enumerate()) - threads if not thread.daemon]


@pytest.fixture
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def environment(cache_dir):
    """Returns the environment of a user's shell, with the cache in a temporary folder."""
    variables = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return variables | {"XDG_CACHE_HOME": str(cache_dir), "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="session")
def command(environment, tmp_path_factory):
    """Runs a command line; returns the finished process with its output as text.

    main.py, and the ranks of main_multi_gpu.py --nproc N, run in forks, which start faster. launched: the program's own
    launcher starts the ranks.
    """

    def run(*args, status=0, timeout=180, launched=False, **variables):
        arguments = list(map(str, args))
        folder = tmp_path_factory.mktemp("command")
        program, *words = arguments
        if program == "main.py" or (program == "main_multi_gpu.py" and "--nproc" in words and not launched):
            done = run_forks(words, environment | variables, folder / "out.txt", folder / "err.txt", timeout)
        else:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=environment | variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        assert done.returncode == status, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


def run_forks(arguments, variables, out, err, timeout_s) -> subprocess.CompletedProcess:
    if "--nproc" in arguments:
        world_size = int(arguments[arguments.index("--nproc") + 1])
        statuses = forks.run_group(arguments, world_size, variables, out, timeout_s=timeout_s, err=err)
    else:
        statuses = forks.joined([forks.start(arguments, variables, out, err)], timeout_s)
    if None in statuses:
        raise subprocess.TimeoutExpired(arguments, timeout_s, out.read_text(), err.read_text())
    return subprocess.CompletedProcess(arguments, next(filter(None, statuses), 0), out.read_text(), err.read_text())


@pytest.fixture
def signals_restored():
    """Restores the signal handlers that `main` replaces in this process."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def run_here(cache_dir, signals_restored, capsys):
    """Runs main.py in this process, which starts faster; returns (stdout, stderr)."""

    def run(*argv, status=0):
        arguments = [*map(str, argv), "--cache-dir", str(cache_dir / "lockstep")]
        assert main(arguments, several_devices=False) == status
        return capsys.readouterr()

    return run


@pytest.fixture
def no_rank_variables(monkeypatch):
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cli(capsys, monkeypatch, no_rank_variables, signals_restored):
    """Runs a command line in this process: (exit status, stdout, lines of stderr)."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # loading a task's file adds its folder

    def run(*args, several_devices=False):
        capsys.readouterr()
        status = main([str(arg) for arg in args], several_devices)
        out, err = capsys.readouterr()
        return status, out, err.splitlines()

    return run


@pytest.fixture
def train(cli):
    """Trains a tiny run in a directory, which must succeed; returns what it printed."""

    def run(directory, *more):
        status, out, err = cli(*TINY, "--save-dir", directory, *more)
        assert (status, err) == (0, [])
        return out

    return run


@pytest.fixture
def refused(cli):
    """Checks that a command line is refused with one message for each part."""

    def run(parts, *args, **options):
        status, out, err = cli(*args, **options)
        assert status == 2
        assert_messages(err, *parts)
        return out

    return run


def assert_messages(lines, *parts):
    """Checks that there are as many lines as parts, and that each part is in a line that begins with `error: `."""
    assert len(lines) == len(parts), lines
    for part in parts:
        assert any(line.startswith("error: ") and part in line for line in lines), (part, lines)


def launcher(num_processes: int) -> list[str]:
    """Returns the program and flags that start a run on a number of CPU processes."""
    if num_processes == 1:
        return ["main.py"]
    return ["main_multi_gpu.py", "--multi-gpu", "ddp", "--nproc", str(num_processes)]


def load(path: Path) -> dict:
    state: dict = torch.load(path, weights_only=True)
    return state


def flatten(state, prefix=""):
    """Returns every tensor and number of a nested checkpoint, by path."""
    if isinstance(state, dict):
        items = state.items()
    elif isinstance(state, list | tuple):
        items = enumerate(state)
    else:
        return {prefix: state}
    found = {}
    for key, value in items:
        found |= flatten(value, f"{prefix}/{key}")
    return found


TIMES = ("train_seconds", "samples_per_second", "epoch_seconds")


def assert_same_bits(a: dict, b: dict) -> None:
    """Checks that two checkpoints differ at most in wall times, the command line, the code and the name of the run."""
    own = ("config", "code", "run_id")
    flat_a, flat_b = (flatten({name: part for name, part in state.items() if name not in own}) for state in (a, b))
    assert flat_a.keys() == flat_b.keys()
    for name, value in flat_a.items():
        if name.endswith(TIMES):
            continue
        other = flat_b[name]
        same = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
        assert same, f"{name}: {value} != {other}"


def largest_difference(a: dict, b: dict) -> float:
    """Returns the largest difference of the weights of two checkpoints, relative to each tensor's largest value."""
    assert a["model"].keys() == b["model"].keys()
    return max(float((x - b["model"][k]).abs().max() / x.abs().max()) for k, x in a["model"].items())


LOCKS = ("lock", "lock.held")
REFUSAL = (*LOCKS, "state.json")
"""Files that a refused command may change: the lock names the last process, and state.json its outcome."""


def contents(directory: Path, leave_out: tuple[str, ...] = LOCKS) -> dict[str, bytes]:
    """Returns the bytes of every file. The lock is left out by default, because it names the last process."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files if path.name not in leave_out}


def cut_back(directory: Path, entries: list[dict], copy: Path) -> None:
    """Copies what a run directory held when the last of these manifest entries had just been saved."""
    copy.mkdir()
    for name in ("manifest.json", "metrics.jsonl", *(entry["file"] for entry in entries)):
        shutil.copy(directory / name, copy)


def cut_back_to(directory: Path, step: int, copy: Path) -> None:
    """Copies what a run directory held when its only checkpoint of a step had just been saved."""
    entries = json.loads((directory / "manifest.json").read_text())["checkpoints"]
    (last,) = [i for i, entry in enumerate(entries) if entry["step"] == step]
    cut_back(directory, entries[: last + 1], copy)


def read_metrics(directory: Path, event: str) -> list[dict]:
    """Returns the records of an event in metrics.jsonl, without wall times."""
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k not in TIMES} for r in records if r["event"] == event]


def results_of(directory: Path) -> dict:
    return json.loads((directory / "results.json").read_text())
