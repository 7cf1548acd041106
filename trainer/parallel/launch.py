"""`--multi-gpu ddp` without torchrun: starts one process per device of this machine.

The processes meet through a file and talk over the loopback interface: no port to choose, nothing that listens on a
public address.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType

import torch
import torch.multiprocessing as mp

from trainer.parallel.devices import MultiDeviceFlags
from trainer.parallel.diagnosis import GOES_ON
from trainer.parallel.environment import RankEnvironment
from trainer.parallel.errors import EXIT_AGAIN
from trainer.parallel.signals import STOP_SIGNALS, exit_quickly

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

    run: picklable; returns an exit status. again: the same for all but the first time, of a run that goes on from its
    checkpoints; None for what has none. Returns the first status that is not 0, or 0. A process that dies by a signal
    gives 128 plus its number. Stop signals are passed on; if all processes then end well, or have nothing to save, the
    status is 128 plus the signal's number.
    """
    status = _launch_once(run, world_size, again is not None)
    for _ in range(MOST_STARTS - 1):
        if status != EXIT_AGAIN:
            break
        status = _launch_once(again or run, world_size, again is not None)
    return status


def _launch_once(run: Callable[[RankEnvironment], int], world_size: int, has_checkpoints: bool) -> int:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # Ctrl-C waits in new processes until they can handle it. The tracker is there before: its start unblocks signals.
    resource_tracker.ensure_running()
    processes: list[BaseProcess] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder, _stop_signals_to(processes) as asked:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            context = mp.start_processes(
                _run_rank,
                args=(run, world_size, f"file://{folder}/rendezvous"),
                nprocs=world_size,
                join=False,
                start_method="spawn",
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        assert context is not None
        processes += context.processes
        for signum in tuple(asked):
            _send(signum, processes)
        try:
            while not context.join(grace_period=GRACE_PERIOD_S):
                pass
        except mp.ProcessExitedException as error:
            if asked and (not has_checkpoints or error.exit_code == EXIT_AGAIN):
                return 128 + asked[0]
            if error.exit_code > 0:
                return error.exit_code
            end = f"; {GOES_ON}" if has_checkpoints else ""
            print(f"rank {error.error_index} was killed by signal {-error.exit_code}{end}", file=sys.stderr)
            return 128 - error.exit_code
        except mp.ProcessRaisedException as error:
            print(error.msg, file=sys.stderr)
            return 1
        return 128 + asked[0] if asked else 0


@contextmanager
def _stop_signals_to(processes: Sequence[BaseProcess]) -> Iterator[list[int]]:
    """Passes stop signals on to the processes in this list; yields the numbers of those that have come."""
    asked: list[int] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)
        # A terminal has already sent Ctrl-C to the whole group; a second copy would mean "leave at once".
        if not (signum == signal.SIGINT and sys.stdin is not None and sys.stdin.isatty()):
            _send(signum, processes)

    previous = {signum: signal.signal(signum, pass_on) for signum in STOP_SIGNALS}
    try:
        yield asked
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _send(signum: int, processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive() and process.pid:
            os.kill(process.pid, signum)


def _run_rank(rank: int, run: Callable[[RankEnvironment], int], world_size: int, init_method: str) -> None:
    exit_quickly()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        status = run(RankEnvironment(rank, world_size, rank, world_size, init_method))
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    sys.exit(status)
