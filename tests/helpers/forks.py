"""Command lines in forked processes: there in a moment, and otherwise like those that a user types.

A fork comes from a server that has imported the program, but run nothing of it.
"""

import gc
import multiprocessing
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from trainer.cli import main
from trainer.parallel.environment import RankEnvironment

ROOT = Path(__file__).resolve().parents[2]

Preparation = Callable[[], Callable[[], None]]
"""Called in the process before its command line; what it returns is called afterwards, if nothing ended it before."""

_context = multiprocessing.get_context("forkserver")
# torch's compiler is of no use here, but every optimizer imports it.
_context.set_forkserver_preload(
    [
        "tests.helpers.forks",
        "trainer.parallel.fsdp",
        "torch.utils.tensorboard",
        "torch._inductor.config",
        "torch.testing",
    ]
)


def start(
    argv: Sequence[object],
    variables: Mapping[str, str],
    out: Path,
    err: Path,
    rank: RankEnvironment | None = None,
    prepare: Preparation | None = None,
) -> BaseProcess:
    """Starts main.py with these arguments; with `rank`, one process of main_multi_gpu.py.

    variables: the whole environment. out, err: files to which standard output and standard error are appended.
    """
    program = "main.py" if rank is None else "main_multi_gpu.py"
    # The server took the default from its own environment, when it imported the program.
    cache = ["--cache-dir", f"{variables['XDG_CACHE_HOME']}/lockstep"]
    arguments = [program, *cache, *map(str, argv)]
    process = _context.Process(target=_run, args=(arguments, dict(variables), out, err, rank, prepare))
    process.start()
    return process


def run_group(
    argv: Sequence[object],
    world_size: int,
    variables: Mapping[str, str],
    out: Path,
    prepare: Preparation | None = None,
    timeout_s: float = 120,
    err: Path | None = None,
) -> list[int | None]:
    """Runs main_multi_gpu.py with these arguments on so many processes; returns their exit statuses.

    out, err: files to which they append, in a folder for this group; without err, out has standard error too. A process
    that takes longer has the status None.
    """
    meeting_place = f"file://{out.parent}/meeting-{uuid.uuid4()}"
    ranks = [RankEnvironment(rank, world_size, rank, world_size, meeting_place) for rank in range(world_size)]
    return joined([start(argv, variables, out, err or out, rank, prepare) for rank in ranks], timeout_s)


def call_on_ranks(
    function: Callable[[RankEnvironment], int], world_size: int, folder: Path, timeout_s: float = 120
) -> list[int | None]:
    """Calls a function in so many processes, each with who it is; returns what it has returned there.

    function: picklable. folder: where they meet, and keep what they print, each in a file of its own.
    """
    ranks = [
        RankEnvironment(rank, world_size, rank, world_size, f"file://{folder}/meeting") for rank in range(world_size)
    ]
    processes = [_context.Process(target=_call, args=(function, rank, folder)) for rank in ranks]
    for process in processes:
        process.start()
    return joined(processes, timeout_s)


def folder_of_world(function: Callable[..., int], world_size: int, folder: Path) -> Path:
    """Calls a function in so many processes, as `call_on_ranks` does, with the folder; none may return but 0."""
    statuses = call_on_ranks(partial(function, folder=folder), world_size, folder)
    assert statuses == [0] * world_size, (folder / "rank0.txt").read_text()[-3000:]
    return folder


def main_of_rank(environment: RankEnvironment, argv: Sequence[object], place: Path) -> int:
    """A command line in a process of `call_on_ranks`, of several under ddp unless it says otherwise.

    place: its --save-dir, by whose name the processes meet.
    """
    words = [*map(str, argv), "--save-dir", str(place)]
    if environment.world_size == 1:
        return main(words, several_devices=False)
    meeting = replace(environment, init_method=f"{environment.init_method}-{place.name.replace(' ', '-')}")
    words += [] if "--multi-gpu" in words else ["--multi-gpu", "ddp"]
    return main(words, several_devices=True, environment=meeting)


def joined(processes: Sequence[BaseProcess], timeout_s: float) -> list[int | None]:
    """The exit statuses of processes; None for one that has not ended within the timeout. None of them is left."""
    try:
        for process in processes:
            process.join(timeout_s)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


def _call(function: Callable[[RankEnvironment], int], rank: RankEnvironment, folder: Path) -> None:
    gc.freeze()
    for stream in (1, 2):
        os.dup2(os.open(folder / f"rank{rank.rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.exit(function(rank))


def _run(
    argv: list[str],
    variables: Mapping[str, str],
    out: Path,
    err: Path,
    rank: RankEnvironment | None,
    prepare: Preparation | None,
) -> None:
    gc.freeze()
    os.setsid()
    os.chdir(ROOT)
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = argv
    finish = prepare() if prepare is not None else None
    status = main(argv[1:], several_devices=rank is not None, environment=rank)
    if finish is not None:
        finish()
    sys.exit(status)
