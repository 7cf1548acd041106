"""Runs command lines in forked processes, which start fast and otherwise behave like commands typed by a user.

The processes are forked from a server that has imported the program but has run nothing.
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
"""Function that the process calls before its command line. It calls the returned function after the command line."""

_context = multiprocessing.get_context("forkserver")
# Every optimizer imports torch's compiler, so the server imports it once.
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
    """Starts main.py with the given arguments or, if `rank` is given, one process of main_multi_gpu.py.

    variables: all environment variables. out, err: files to which standard output and standard error are appended.
    """
    program = "main.py" if rank is None else "main_multi_gpu.py"
    # When the server imported the program, it computed the default of --cache-dir from its own environment.
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
    """Runs main_multi_gpu.py with the given arguments on `world_size` processes; returns their exit statuses.

    out, err: files to which the processes append, in a folder of this group; without err, out also gets standard error.
    The status of a process is None after a timeout.
    """
    meeting_place = f"file://{out.parent}/meeting-{uuid.uuid4()}"
    ranks = [RankEnvironment(rank, world_size, rank, world_size, meeting_place) for rank in range(world_size)]
    return joined([start(argv, variables, out, err or out, rank, prepare) for rank in ranks], timeout_s)


def call_on_ranks(
    function: Callable[[RankEnvironment], int], world_size: int, folder: Path, timeout_s: float = 120
) -> list[int | None]:
    """Calls a function in `world_size` processes, each with its `RankEnvironment`; returns the results of the ranks.

    function: must be picklable. folder: for the rendezvous, and for one file per process with its output.
    """
    ranks = [
        RankEnvironment(rank, world_size, rank, world_size, f"file://{folder}/meeting") for rank in range(world_size)
    ]
    processes = [_context.Process(target=_call, args=(function, rank, folder)) for rank in ranks]
    for process in processes:
        process.start()
    return joined(processes, timeout_s)


def folder_of_world(function: Callable[..., int], world_size: int, folder: Path) -> Path:
    """Calls a function with the folder on `world_size` ranks by `call_on_ranks`; all ranks must return 0."""
    statuses = call_on_ranks(partial(function, folder=folder), world_size, folder)
    assert statuses == [0] * world_size, (folder / "rank0.txt").read_text()[-3000:]
    return folder


def main_of_rank(environment: RankEnvironment, argv: Sequence[object], place: Path) -> int:
    """Runs a command line in a process of `call_on_ranks`; several processes use ddp unless argv has --multi-gpu.

    place: --save-dir, whose name also identifies the rendezvous.
    """
    words = [*map(str, argv), "--save-dir", str(place)]
    if environment.world_size == 1:
        return main(words, several_devices=False)
    meeting = replace(environment, init_method=f"{environment.init_method}-{place.name.replace(' ', '-')}")
    words += [] if "--multi-gpu" in words else ["--multi-gpu", "ddp"]
    return main(words, several_devices=True, environment=meeting)


def joined(processes: Sequence[BaseProcess], timeout_s: float) -> list[int | None]:
    """Returns the exit statuses of processes, or None after a timeout. Kills processes that are still running."""
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
