"""`--multi-gpu ddp` without torchrun: starts one process per device of this machine.

The processes meet through a file and talk over the loopback interface: no port to choose, nothing that listens on a
public address.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from types import FrameType

import torch
import torch.multiprocessing as mp

from trainer.failure import EXIT_AGAIN
from trainer.ranks import MultiDeviceFlags, RankEnvironment
from trainer.stop import STOP_SIGNALS, exit_quickly

GRACE_PERIOD_S = 10
MOST_STARTS = 32
"""More than a batch size can be halved."""


def num_processes(flags: MultiDeviceFlags, device: str) -> int:
    """One per chosen GPU, or `--nproc`; on the CPU 1 unless told."""
    if flags.nproc is not None:
        return flags.nproc
    if device == "cpu" or not torch.cuda.is_available():
        return 1
    return len(flags.gpu_ids) if flags.gpu_ids is not None else torch.cuda.device_count()


def launch(
    run: Callable[[RankEnvironment], int], world_size: int, again: Callable[[RankEnvironment], int] | None = None
) -> int:
    """Calls `run` in `world_size` new processes and waits for them; after the status EXIT_AGAIN once more.

    run: picklable; returns an exit status. again: the same for all but the first time. Returns the first status that is
    not 0, or 0. A process that dies by a signal gives 128 plus its number. Stop signals are passed on; if all processes
    then end well, the status is 128 plus the signal's number.
    """
    status = _launch_once(run, world_size)
    for _ in range(MOST_STARTS - 1):
        if status != EXIT_AGAIN:
            break
        status = _launch_once(again or run, world_size)
    return status


def _launch_once(run: Callable[[RankEnvironment], int], world_size: int) -> int:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        context = mp.start_processes(
            _run_rank,
            args=(run, world_size, f"file://{folder}/rendezvous"),
            nprocs=world_size,
            join=False,
            start_method="spawn",
        )
        assert context is not None

        passed_on: list[int] = []

        def pass_on(signum: int, frame: FrameType | None) -> None:
            passed_on.append(signum)
            # A terminal has already sent Ctrl-C to the whole group; a second copy would mean "leave at once".
            if not (signum == signal.SIGINT and sys.stdin is not None and sys.stdin.isatty()):
                for process in context.processes:
                    if process.is_alive() and process.pid:
                        os.kill(process.pid, signum)

        previous = {signum: signal.signal(signum, pass_on) for signum in STOP_SIGNALS}
        try:
            while not context.join(grace_period=GRACE_PERIOD_S):
                pass
        except mp.ProcessExitedException as error:
            if error.exit_code > 0:
                return 128 + passed_on[0] if passed_on and error.exit_code == EXIT_AGAIN else error.exit_code
            print(
                f"rank {error.error_index} was killed by signal {-error.exit_code}; the same command goes on from the "
                "last checkpoint",
                file=sys.stderr,
            )
            return 128 - error.exit_code
        except mp.ProcessRaisedException as error:
            print(error.msg, file=sys.stderr)
            return 1
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)
    return 128 + passed_on[0] if passed_on else 0


def _run_rank(rank: int, run: Callable[[RankEnvironment], int], world_size: int, init_method: str) -> None:
    exit_quickly()
    sys.exit(run(RankEnvironment(rank, world_size, rank, world_size, init_method)))
