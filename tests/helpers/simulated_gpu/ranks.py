"""Starts several processes with simulated GPUs, which exchange tensors by gloo."""

import os
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.simulated_gpu.machine import GPUS
from tests.helpers.simulated_gpu.server import TIMEOUT_S
from trainer.cli import main
from trainer.parallel.environment import RankEnvironment

MISTAKES = 70
"""Exit status of a process that made mistakes or raised an exception; EX_SOFTWARE of sysexits.h."""


def run_ranks(argv: Sequence[object], world_size: int, meeting_place: Path) -> list[int]:
    """Runs a command line of main_multi_gpu.py on `world_size` forked processes; returns their exit statuses.

    Call before this process computes anything. meeting_place: a file that does not exist yet.
    """
    started = []
    for rank in range(world_size):
        process = os.fork()
        if process == 0:
            _be_rank(
                list(map(str, argv)), RankEnvironment(rank, world_size, rank, world_size, f"file://{meeting_place}")
            )
        started.append(process)
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in started]


def _be_rank(argv: list[str], environment: RankEnvironment) -> None:
    signal.alarm(TIMEOUT_S)
    status = MISTAKES
    try:
        status = main(argv, several_devices=True, environment=environment)
        if mistakes := GPUS.mistakes():
            print(f"rank {environment.rank}:", *mistakes, sep="\n")
            status = MISTAKES
    except BaseException:
        traceback.print_exc()
    finally:
        GPUS.printed()
        os._exit(status)
