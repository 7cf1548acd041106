"""Explains why a run failed, in one message that one process prints."""

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
"""gloo's message when a single message timed out."""
_WORKER_KILLED = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: ([^.]+)")
"""torch's error about a killed data-loading worker; it may be raised anywhere in the training thread."""
_WORKER_ENDS_S = 1.0
"""Seconds within which a data-loading worker that broke a connection by exiting is reaped."""


def _killed_worker(error: BaseException) -> re.Match[str] | None:
    """Matches the process id and the signal of a killed data-loading worker, if an exception comes from its death.

    The connection breaks a moment before torch notices the death. Asking torch also keeps its SIGCHLD handler from
    raising in the midst of the report.
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
    """Explains the failures of a run with one process.

    activity: what this process is doing. exit_status: set once it failed among several processes. has_checkpoints:
    whether the same command can resume after a process is lost, which messages then say. prints: print messages here,
    rather than leave them to the caller's exception. flags_signals: whether Ctrl-C only sets a flag by now, so that a
    KeyboardInterrupt comes from the task's code.
    """

    activity: CurrentActivity
    has_checkpoints: bool = field(default=True, kw_only=True)
    prints: bool = field(default=True, kw_only=True)
    flags_signals: bool = field(default=False, init=False)
    exit_status: int | None = field(default=None, init=False)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Explains any exception within to the user, once, and ends all processes.

        UserError (on rank 0 also another rank's) and the user's Ctrl-C pass through. Everything else, including
        SystemExit from the task, becomes a Failure with the exception as its cause.
        """
        try:
            yield
        except Failure:
            raise
        except BaseException as error:
            explained = self.explain(error)
            raise explained from error if explained is not error else None

    def explain(self, error: BaseException) -> BaseException:
        """Prints an explanation and returns the exception to raise instead; see `explaining`."""
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
            return Failure("")  # nothing to print
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
        """Prints this process's failure, with the traceback if it is a defect."""
        is_defect = failure.status == EXIT_FAILED and failure.lost is None
        print_error(str(failure), error if is_defect else None)

    def before_forced_end(self, record: Callable[[Failure], None]) -> None:
        """Sets `record`, called just before this process is killed because it hangs after another one failed."""


@dataclass
class GroupDiagnosis(Diagnosis):
    """Explains the failures of a run with several processes: one reports, and all end with its report.

    members: a description of each rank's process. limit_s: timeout of waiting for others, `--dist-timeout-s`.
    reports_lost_store: whether this process prints when the ranks cannot agree who does. failed_itself: this process
    failed, rather than missed another one.
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
            if failure.status == EXIT_BAD_INPUT and self.rank == 0:  # its training thread would have printed it
                print_refusal(UserError(str(failure)))
            record(failure)

        self.monitor.before_forced_end = conclude

    def explain(self, error: BaseException) -> BaseException:
        self.monitor.may_force_end = False
        # Collectives raise these when another process failed (and reported it) or is missing.
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
        """Reports the next rank after a long silence, and ends this process through the monitor.

        The training thread would not notice while it waits for a GPU whose kernels wait for other ranks.
        """
        if silent_s > self.limit_s + 2 * BEAT_S:
            self._report_missed(lambda: self._loss(silent_s, "silence"))

    def consider_loss(self) -> None:
        """Reports a process of this machine that exited unnoticed by any collective."""
        self._report_missed(lambda: self._loss(None, "a process has ended"))

    def _report_missed(self, compose: Callable[[], Failure]) -> None:
        def report() -> None:
            answer = self.monitor.report_end(compose)
            if answer is not None and answer[1]:
                print_error(str(answer[0]))

        if not self._has_missed:
            self._has_missed = True
            # In a thread of its own, because the monitor's has to answer the ping.
            threading.Thread(target=report, name="missed", daemon=True).start()

    @property
    def _prefix(self) -> str:
        return f"{self._name(self.rank)} "

    def _loss(self, waited_s: float | None, error: str) -> Failure:
        """Describes the loss of other ranks after pinging them all; see `diagnose`."""
        heartbeats = self.monitor.ping()
        return Failure(self.diagnose(waited_s, error, heartbeats), lost=self._silent(heartbeats))

    def _silent(self, heartbeats: Mapping[int, Heartbeat]) -> list[int]:
        answers = [rank for rank, beat in heartbeats.items() if beat.answers_ping]
        return [rank for rank in range(len(self.members)) if rank not in answers]

    def diagnose(self, waited_s: float | None, error: str, heartbeats: Mapping[int, Heartbeat]) -> str:
        """Returns one sentence about ranks that are gone, stopped or late after a failed collective.

        waited_s: how long this process waited for the others; None if the connection broke. error: the library's
        message. heartbeats: the last one of each rank, after a ping.
        """
        answers = {rank: beat for rank, beat in heartbeats.items() if beat.answers_ping}
        silent = self._silent(heartbeats)
        least = min((beat.number for beat in answers.values()), default=0)
        late = {rank: beat for rank, beat in answers.items() if beat.number == least}
        if silent:
            accounts = [self._account_of_silent(rank, waited_s, heartbeats.get(rank)) for rank in silent]
        elif waited_s is None or self.rank in late:  # no other rank is behind: the ranks run different collectives
            what = "lost the connection to another rank" if waited_s is None else "timed out"
            ahead = "".join(
                f", {self._name(rank)} in {beat.activity}" for rank, beat in answers.items() if beat.number > least
            )
            return f"{self._name(self.rank)} {what} in {self.activity}, and all ranks are alive{ahead}: {error}"
        else:
            accounts = [
                f"{self._name(rank)} is late: in {beat.activity} for {beat.seconds:.0f} s ({self.members[rank]})"
                for rank, beat in late.items()
            ]
        if waited_s is None:
            return "; ".join([*accounts, *[RESUMES] * self.has_checkpoints])
        limit = f" (--dist-timeout-s {waited_s:g})" if waited_s == self.limit_s else ""
        return "; ".join([*accounts, f"rank {self.rank} waited {waited_s:.0f} s for it in {self.activity}{limit}"])

    def diagnose_lost_store(self, waited_s: float | None) -> str:
        """Returns one sentence for a lost store, which rank 0 hosted unless the launcher does."""
        lost = f"{self._account_of_silent(0, waited_s)}, and with it the heartbeats of the others"
        return "; ".join([lost, f"rank {self.rank} was in {self.activity}", *[RESUMES] * self.has_checkpoints])

    def _account_of_silent(self, rank: int, waited_s: float | None, last: Heartbeat | None = None) -> str:
        how = "is gone" if waited_s is None else "does not respond"
        seen = ""
        if last is not None:
            seen = f", last seen {max(0.0, time.time() - last.sent):.0f} s ago in {last.activity}"
        return f"{self._name(rank)} {how} ({self.members[rank]}){seen}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {len(self.members)}"
