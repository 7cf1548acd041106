"""Runs the same task with each trainer, and reads the results."""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.peers.peer_commands import METRICS, WEIGHTS
from benchmarks.peers.tagging import MOMENTUM, Settings
from benchmarks.peers.watch import VARIABLE, Step, lives

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
MAY_TAKE_S = 300

SIDES = LOCKSTEP, LIGHTNING, ACCELERATE = "lockstep", "lightning", "accelerate"
VARIANTS = {
    LOCKSTEP: (LOCKSTEP, ()),
    LIGHTNING: (LIGHTNING, ()),
    "lightning, plain loader": (LIGHTNING, ("--plain-loader",)),
    ACCELERATE: (ACCELERATE, ()),
    "accelerate, mean of means": (ACCELERATE, ("--mean-of-means",)),
    "accelerate, stateful loader": (ACCELERATE, ("--stateful",)),
}
"""Variants of the task's script: the trainer, and additional flags of the script."""


def command(variant: str, settings: Settings, save_dir: Path) -> list[str]:
    side, switches = VARIANTS[variant]
    arguments = lockstep_arguments(settings) if side == LOCKSTEP else peer_arguments(side, settings)
    return [sys.executable, *arguments, *switches, "--save-dir", str(save_dir)]


def lockstep_arguments(settings: Settings) -> list[str]:
    program = ["main.py"] if settings.world == 1 else ["main_multi_gpu.py", "--multi-gpu=ddp"]
    momentum = [f"--momentum={MOMENTUM}"] if settings.optimizer == "sgd" else []
    return [
        *program, f"--task={HERE / 'lockstep_side.py'}:Tagging", "--device=cpu", "--num-threads=1",
        f"--num-train={settings.num_train}", f"--num-eval={settings.num_eval}", f"--epochs={settings.epochs}",
        f"--batch-size={settings.micro_batch}",
        f"--global-batch-size={settings.micro_batch * settings.accumulate * settings.world}",
        f"--save-every-steps={settings.save_every}", f"--width={settings.width}", f"--dropout={settings.dropout}",
        f"--optimizer={settings.optimizer}", *momentum, f"--lr={settings.lr}", "--weight-decay=0",
        "--schedule=constant", "--warmup-epochs=0", f"--max-grad-norm={settings.max_grad_norm}",
        f"--dtype={settings.dtype}",
    ]  # fmt: skip


def peer_arguments(side: str, settings: Settings) -> list[str]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(settings).items()]
    return [str(HERE / f"{side}_side.py"), *flags]


@dataclass(frozen=True)
class Run:
    """Folder in which a run is started, ended and restarted with the same command."""

    variant: str
    settings: Settings
    folder: Path

    @property
    def notes(self) -> Path:
        return self.folder / "notes"

    @property
    def save_dir(self) -> Path:
        return self.folder / "run"

    def start(self, settings: Settings | None = None, **asked: object) -> list[BaseProcess]:
        """Starts a process per rank like torchrun, by default with `self.settings`. asked: arguments of `watched`."""
        settings = settings or self.settings
        self.notes.mkdir(exist_ok=True)
        notes = self.notes / f"{len(list(self.notes.iterdir())):03}"
        notes.mkdir()
        variables = watched(notes, **asked)
        context = forking(VARIANTS[self.variant][0])
        processes = []
        for variables_of_rank in ranks(settings.world):
            arguments = (self.variant, settings, self.save_dir, self.output_file, variables | variables_of_rank)
            processes.append(context.Process(target=run_forked, args=arguments))
            processes[-1].start()
        return processes

    def finish(self, settings: Settings | None = None, **asked: object) -> bool:
        """Starts the run and waits for its end; returns whether all processes succeeded."""
        processes = self.start(settings, **asked)
        until = time.monotonic() + MAY_TAKE_S
        # If one process fails, other processes may wait for it.
        while any(process.is_alive() for process in processes) and not any(process.exitcode for process in processes):
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        kill(processes)
        return all(process.exitcode == 0 for process in processes)

    def finish_well(self) -> None:
        if not self.finish():
            sys.exit(f"{self.variant} failed:\n{self.output()[-3000:]}")

    def killed(self, when: Callable[[], bool], wait_s: float) -> bool:
        """Starts the run and kills it wait_s seconds after `when` is true; returns False if the run ended before."""
        processes, until = self.start(), time.monotonic() + MAY_TAKE_S
        while processes[0].is_alive() and not when() and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(wait_s)
        lived = processes[0].is_alive()
        kill(processes)
        return lived

    def num_forwards(self) -> int:
        """Returns the number of training forward passes of all starts and processes."""
        return sum(file.read_bytes().count(b"weights") for file in self.notes.glob("*/*"))

    def lives(self) -> list[list[Step]]:
        return lives(self.notes)

    @property
    def output_file(self) -> Path:
        return self.folder / "output.txt"

    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    def weights(self) -> dict[str, Tensor]:
        if self.variant == LOCKSTEP:
            return torch.load(self.save_dir / "final.pth", weights_only=True)["model"]
        return torch.load(self.save_dir / WEIGHTS, weights_only=True)

    def metrics(self) -> dict[str, float]:
        if self.variant == LOCKSTEP:
            metrics = json.loads((self.save_dir / "results.json").read_text())["metrics"]
            return {name.removeprefix("test/"): value for name, value in metrics.items()}
        return json.loads((self.save_dir / METRICS).read_text())


@contextlib.contextmanager
def new_run(variant: str, settings: Settings) -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as folder:
        yield Run(variant, settings, Path(folder))


def watched(notes: Path, **asked: object) -> dict[str, str]:
    """Returns environment variables that make a process record its samples. asked: further entries for watch.py."""
    return {
        VARIABLE: json.dumps({"folder": str(notes), "started": time.time(), **asked}),
        "OMP_NUM_THREADS": "1",
    }


def ranks(world: int) -> list[dict[str, str]]:
    """Returns the environment variables with which torchrun sets each process's rank; none for a single process."""
    if world == 1:
        return [{}]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = {
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def forking(side: str) -> ForkServerContext:
    """Returns a context that forks from a server process with a trainer's imports; use only one trainer per program."""
    os.environ["PYTHONPATH"] = str(ROOT)  # for the server
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"benchmarks.peers.{side}_side", *["trainer.cli"] * (side == LOCKSTEP)])
    return context


def run_forked(variant: str, settings: Settings, save_dir: Path, output: Path, variables: Mapping[str, str]) -> None:
    os.setsid()
    os.chdir(ROOT)
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.update(variables)
    torch.set_num_threads(1)
    side = VARIANTS[variant][0]
    sys.argv = command(variant, settings, save_dir)[1:]
    if side == LOCKSTEP:
        sys.exit(import_module("trainer.cli").main(sys.argv[1:], several_devices=settings.world > 1))
    import_module(f"benchmarks.peers.{side}_side").main()


def kill(processes: Sequence[BaseProcess]) -> None:
    """Kills the processes and all processes that they have started."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def distance(found: dict[str, Tensor], right: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """Returns the distance of the weights `found` from `right`, divided by the distance of `start` from `right`."""
    error = sum(float((found[name] - right[name]).square().sum()) for name in right) ** 0.5
    way = sum(float((right[name] - start[name]).square().sum()) for name in right) ** 0.5
    return error / way


def variants_of(side: str, *names: str) -> list[str]:
    return [name for name in names if VARIANTS[name][0] == side]
