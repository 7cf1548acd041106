"""Explains why a run failed, in a message that a single process prints."""

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist

from trainer.common.errors import UserError, message, reason
from trainer.common.torch_private import raise_for_ended_worker
from trainer.failure.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_RESTART,
    Failure,
    RestartNeeded,
    print_error,
    print_refusal,
)
from trainer.failure.heartbeat import BEAT_S, CurrentActivity, Heartbeat, HeartbeatMonitor
from trainer.failure.signals import LeftAtOnce

RESUMES = "the same command resumes from the last checkpoint"
GAVE_UP = "Application timeout caused pair closure"
"""Part of gloo's error after a timeout."""
_WORKER_KILLED = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: ([^.]+)")
"""Matches torch's error about a killed DataLoader worker, which a signal handler may raise at any time."""
_WORKER_ENDS_S = 1.0
"""Seconds to wait for torch to notice that a DataLoader worker exited, after the connection to it broke."""


def _killed_worker(error: BaseException) -> re.Match[str] | None:
    """Returns the regex match of a killed DataLoader worker's id and signal; None if `error` has another cause.

    The connection to a worker breaks shortly before torch notices that the worker died, so this function asks torch
    repeatedly. If it did not ask, torch's SIGCHLD handler could raise while the failure is reported.
    """
    told = f"{message(error)} {message(error.__cause__)}"
    is_broken = isinstance(error, ConnectionError | EOFError | FileNotFoundError)
    until = time.monotonic() + (_WORKER_ENDS_S if is_broken else 0)
    try:
        raise_for_ended_worker()
        while time.monotonic() < until:
            time.sleep(0.01)
            raise_for_ended_worker()
    except RuntimeError as of_worker:
        told += f" {of_worker}"
    return _WORKER_KILLED.search(told)


@dataclass
class Diagnosis:
    """Explains the failures of a run with a single process.

    exit_status: exit status after a failure of a multi-process run. has_checkpoints: whether messages say that the same
    command resumes the run. prints: whether to print messages; the exceptions contain them in any case. flags_signals:
    whether Ctrl-C only sets a flag, so that a KeyboardInterrupt comes from the task's code.
    """

    activity: CurrentActivity
    has_checkpoints: bool = field(default=True, kw_only=True)
    prints: bool = field(default=True, kw_only=True)
    flags_signals: bool = field(default=False, init=False)
    exit_status: int | None = field(default=None, init=False)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Context that explains an exception: one process prints the explanation; every process raises an exception.

        A UserError or the user's Ctrl-C is raised unchanged; rank 0 also raises another rank's UserError. Any other
        exception, including SystemExit from the task, becomes a Failure with the exception as its cause.
        """
        try:
            yield
        except Failure:
            raise
        except BaseException as error:
            explained = self.explain(error)
            raise explained from error if explained is not error else None

    def explain(self, error: BaseException) -> BaseException:
        """Prints an explanation of an exception and returns the exception to raise in its place."""
        if isinstance(error, UserError) or self._is_of_user(error):
            return error
        failure = self._own_failure(error)
        if self.prints:
            self._print(failure, error)
        return failure

    def _is_of_user(self, error: BaseException) -> bool:
        return isinstance(error, LeftAtOnce) or (isinstance(error, KeyboardInterrupt) and not self.flags_signals)

    def _own_failure(self, error: BaseException) -> Failure:
        if isinstance(error, UserError):
            return Failure(str(error), EXIT_BAD_INPUT)
        if self._is_of_user(error):
            return Failure("")  # the user knows the reason
        if isinstance(error, RestartNeeded):
            return Failure(f"{self._prefix}is {error}", EXIT_RESTART, error.memory_limit)
        if isinstance(error, KeyboardInterrupt):
            how = f"{self._prefix}stopped in {self.activity}: the task's code raised KeyboardInterrupt"
            return Failure(how, EXIT_INTERRUPTED)
        killed = _killed_worker(error)
        if killed is not None:
            what = f"lost data-loading worker {killed[1]} in {self.activity} to a signal: {killed[2]}"
            return Failure("; ".join([self._prefix + what, *[RESUMES] * self.has_checkpoints]), lost=[])
        return Failure(f"{self._prefix}failed in {self.activity}: {reason(error)}")

    @property
    def _prefix(self) -> str:
        return ""

    def _print(self, failure: Failure, error: BaseException) -> None:
        """Prints a failure; adds the traceback only if the cause is an unexpected exception in this process."""
        is_defect = failure.status == EXIT_FAILED and failure.lost is None
        print_error(str(failure), error if is_defect else None)

    def before_forced_end(self, record: Callable[[Failure], None]) -> None:
        """Sets a function to call before this process is killed for hanging after another process's failure."""


@dataclass
class GroupDiagnosis(Diagnosis):
    """Explains the failures of a run with several processes: one process reports a failure, and all processes then end.

    members: a description of each rank's process. limit_s: `--dist-timeout-s`, seconds to wait for another rank.
    reports_lost_store: whether this process prints the failure if the store, which selects the printing rank, is lost.
    failed_itself: whether the failure began in this process.
    """

    monitor: HeartbeatMonitor
    rank: int
    members: Sequence[str]
    limit_s: float
    reports_lost_store: bool
    failed_itself: bool = field(default=False, init=False)
    _has_missed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.before_forced_end(lambda failure: None)

    def before_forced_end(self, record: Callable[[Failure], None]) -> None:
        def conclude(failure: Failure) -> None:
            if failure.status == EXIT_BAD_INPUT and self.rank == 0:  # the hanging main thread cannot print it
                print_refusal(UserError(str(failure)))
            record(failure)

        self.monitor.before_forced_end = conclude

    def explain(self, error: BaseException) -> BaseException:
        self.monitor.may_force_end = False
        # Collectives raise these errors if another process is lost, or has failed and reported its failure.
        is_of_gloo = isinstance(error, RuntimeError) and ("/gloo/" in str(error) or GAVE_UP in str(error))
        is_of_another = isinstance(error, dist.DistError) or is_of_gloo
        if is_of_another:
            timeout = re.search(r"Timed out waiting (\d+)ms", str(error))
            waited_s = int(timeout[1]) / 1000 if timeout else self.limit_s if GAVE_UP in str(error) else None
            answer = self.monitor.report_end(lambda: self._loss(waited_s, reason(error)))
            lost_store = Failure(self.diagnose_lost_store(waited_s), lost=[])
            reported, is_own = answer or (lost_store, self.reports_lost_store)
        else:
            self.failed_itself = True
            own = self._own_failure(error)
            reported, is_own = self.monitor.report_end(lambda: own) or (own, True)
        if isinstance(error, UserError) or self._is_of_user(error):
            self.exit_status = EXIT_BAD_INPUT
            return error
        if is_own:
            self._print(reported, error)
        self.exit_status = reported.status
        # The reporting process has printed the message, except a UserError, which rank 0 prints.
        return UserError(str(reported)) if reported.status == EXIT_BAD_INPUT and self.rank == 0 else reported

    def consider_others(self, silent_s: float) -> None:
        """Reports the next rank as lost if it has sent no heartbeat for too long.

        The monitor then ends this process: its training thread may wait for a GPU whose kernels wait for the lost rank.
        """
        if silent_s > self.limit_s + 2 * BEAT_S:
            self._report_missed(lambda: self._loss(silent_s, "silence"))

    def consider_loss(self) -> None:
        """Reports that a process on this machine has exited, unless a rank has already reported the failure."""
        self._report_missed(lambda: self._loss(None, "a process has ended"))

    def _report_missed(self, compose: Callable[[], Failure]) -> None:
        def report() -> None:
            answer = self.monitor.report_end(compose)
            if answer is not None and answer[1]:
                print_error(str(answer[0]))

        if not self._has_missed:
            self._has_missed = True
            # Report in another thread, because the monitor's thread must answer pings.
            threading.Thread(target=report, name="missed", daemon=True).start()

    @property
    def _prefix(self) -> str:
        return f"{self._name(self.rank)} "

    def _loss(self, waited_s: float | None, error: str) -> Failure:
        heartbeats = self.monitor.ping()
        return Failure(self.diagnose(waited_s, error, heartbeats), lost=self._silent(heartbeats))

    def _silent(self, heartbeats: Mapping[int, Heartbeat]) -> list[int]:
        answers = [rank for rank, beat in heartbeats.items() if beat.answers_ping]
        return [rank for rank in range(len(self.members)) if rank not in answers]

    def diagnose(self, waited_s: float | None, error: str, heartbeats: Mapping[int, Heartbeat]) -> str:
        """Returns a sentence that names the ranks that are lost, stopped or late after a failed collective.

        waited_s: seconds that this process waited for other ranks; None if the connection broke. error: message of
        the exception. heartbeats: each rank's last heartbeat, after a ping.
        """
        answers = {rank: beat for rank, beat in heartbeats.items() if beat.answers_ping}
        silent = self._silent(heartbeats)
        least = min((beat.number for beat in answers.values()), default=0)
        late = {rank: beat for rank, beat in answers.items() if beat.number == least}
        if silent:
            accounts = [self._account_of_silent(rank, waited_s, heartbeats.get(rank)) for rank in silent]
        elif waited_s is None or self.rank in late:  # no rank is behind: the ranks run different collectives
            what = "lost the connection to another rank" if waited_s is None else "timed out"
            ahead = "".join(
                f", {self._name(rank)} in {beat.activity}" for rank, beat in answers.items() if beat.number > least
            )
            return f"{self._name(self.rank)} {what} in {self.activity}, although all ranks are alive{ahead}: {error}"
        else:
            accounts = [
                f"{self._name(rank)} is late: it spent {beat.seconds:.0f} s in {beat.activity} ({self.members[rank]})"
                for rank, beat in late.items()
            ]
        if waited_s is None:
            return "; ".join([*accounts, *[RESUMES] * self.has_checkpoints])
        limit = f" (--dist-timeout-s {waited_s:g})" if waited_s == self.limit_s else ""
        return "; ".join([*accounts, f"rank {self.rank} waited {waited_s:.0f} s for it in {self.activity}{limit}"])

    def diagnose_lost_store(self, waited_s: float | None) -> str:
        """Returns a sentence about the lost rendezvous store, which rank 0 hosts if there is no launcher."""
        lost = f"{self._account_of_silent(0, waited_s)}, so the other ranks' heartbeats are unknown"
        return "; ".join([lost, f"rank {self.rank} was in {self.activity}", *[RESUMES] * self.has_checkpoints])

    def _account_of_silent(self, rank: int, waited_s: float | None, last: Heartbeat | None = None) -> str:
        how = "is gone" if waited_s is None else "does not respond"
        seen = ""
        if last is not None:
            seen = f", last seen {max(0.0, time.time() - last.sent):.0f} s ago in {last.activity}"
        return f"{self._name(rank)} {how} ({self.members[rank]}){seen}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {len(self.members)}"
