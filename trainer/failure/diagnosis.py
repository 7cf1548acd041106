"""Why a run ends that nobody asked to end: one message about it, which one process prints."""

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

GOES_ON = "the same command goes on from the last checkpoint"
GAVE_UP = "Application timeout caused pair closure"
"""What gloo says when a single message has not come in time."""
_WORKER_KILLED = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: ([^.]+)")
"""Words of torch's error about a lost data-loading process, which may interrupt the training thread anywhere."""
_WORKER_ENDS_S = 1.0
"""Within which a data-loading process that breaks a connection by its end has ended."""


def _killed_worker(error: BaseException) -> re.Match[str] | None:
    """The process id and the signal of a data-loading process that was killed, where an exception is from its end.

    A connection to it breaks a moment before torch knows of its end. Asking torch also keeps its handler of SIGCHLD
    from raising an exception of its own in the midst of what is then reported.
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
    """Of a run of one process.

    activity: what this process is doing. exit_status: of this process, once it has failed among others.
    has_checkpoints: whether the same command goes on after a process is lost, and the user should know. prints: whether
    the user learns of it here, and not by an exception from whoever called. flags_signals: whether a Ctrl-C only sets a
    flag by now, so that a KeyboardInterrupt comes from the task's code.
    """

    activity: CurrentActivity
    has_checkpoints: bool = field(default=True, kw_only=True)
    prints: bool = field(default=True, kw_only=True)
    flags_signals: bool = field(default=False, init=False)
    exit_status: int | None = field(default=None, init=False)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Whatever goes wrong within it is explained to the user, by one process, and ends all of them.

        A UserError leaves it as it is: on the main process also the one of another. So does what the user asked for by
        Ctrl-C. Everything else, a SystemExit of the task's code too, becomes a Failure, whose cause it is.
        """
        try:
            yield
        except Failure:
            raise
        except BaseException as error:
            explained = self.explain(error)
            raise explained from error if explained is not error else None

    def explain(self, error: BaseException) -> BaseException:
        """What to raise instead of an exception, once the user knows of it; see `explaining`."""
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
            return Failure("")  # of which there is nothing to tell
        if isinstance(error, RestartNeeded):
            return Failure(f"{self._prefix}is {error}", EXIT_RESTART, error.memory_limit)
        if isinstance(error, KeyboardInterrupt):
            how = f"{self._prefix}stopped in {self.activity}: the task's code raised KeyboardInterrupt"
            return Failure(how, EXIT_INTERRUPTED)
        killed = _killed_worker(error)
        if killed is not None:
            what = f"lost its data-loading process {killed[1]} in {self.activity} by a signal: {killed[2]}"
            return Failure("; ".join([self._prefix + what, *[GOES_ON] * self.has_checkpoints]), lost=[])
        return Failure(f"{self._prefix}failed in {self.activity}: {reason(error)}")

    @property
    def _prefix(self) -> str:
        return ""

    def _print(self, failure: Failure, error: BaseException) -> None:
        """Tells the user of what this process failed with, after its traceback where that is a defect."""
        is_defect = failure.status == EXIT_FAILED and failure.lost is None
        print_error(str(failure), error if is_defect else None)

    def before_forced_end(self, record: Callable[[Failure], None]) -> None:
        """record: called if another process has failed and this one is stuck, just before it is ended."""


@dataclass
class GroupDiagnosis(Diagnosis):
    """Of a run of several processes: one of them reports why it ends, and all end by that report.

    members: a few words about each rank's process. limit_s: how long others are waited for; `--dist-timeout-s`.
    reports_lost_store: whether this process speaks for the others when they cannot agree who does. failed_itself:
    whether this process has failed, and not missed another one.
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
            if failure.status == EXIT_BAD_INPUT and self.rank == 0:  # whose training thread would have told the user
                print_refusal(UserError(str(failure)))
            record(failure)

        self.monitor.before_forced_end = conclude

    def explain(self, error: BaseException) -> BaseException:
        self.monitor.may_force_end = False
        # A collective raises it because of another process, which has reported its end, or is missing.
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
        # The process that reports has told the user, but of a UserError the main one does.
        return UserError(str(reported)) if reported.status == EXIT_BAD_INPUT and self.rank == 0 else reported

    def consider_others(self, silent_s: float) -> None:
        """Reports a next rank that has been silent for too long, and ends this process through the monitor.

        A training thread that waits for its GPU, whose kernels wait for others, would not notice.
        """
        if silent_s > self.limit_s + 2 * BEAT_S:
            self._report_missed(lambda: self._loss(silent_s, "silence"))

    def consider_loss(self) -> None:
        """Reports a process of this machine that has ended while no exchange has missed it."""
        self._report_missed(lambda: self._loss(None, "a process has ended"))

    def _report_missed(self, compose: Callable[[], Failure]) -> None:
        def report() -> None:
            answer = self.monitor.report_end(compose)
            if answer is not None and answer[1]:
                print_error(str(answer[0]))

        if not self._has_missed:
            self._has_missed = True
            # Not by the monitor's own thread, which has to answer the ping.
            threading.Thread(target=report, name="missed", daemon=True).start()

    @property
    def _prefix(self) -> str:
        return f"{self._name(self.rank)} "

    def _loss(self, waited_s: float | None, error: str) -> Failure:
        """Of other ranks, which all are asked first; see `diagnose`."""
        heartbeats = self.monitor.ping()
        return Failure(self.diagnose(waited_s, error, heartbeats), lost=self._silent(heartbeats))

    def _silent(self, heartbeats: Mapping[int, Heartbeat]) -> list[int]:
        answers = [rank for rank, beat in heartbeats.items() if beat.answers_ping]
        return [rank for rank in range(len(self.members)) if rank not in answers]

    def diagnose(self, waited_s: float | None, error: str, heartbeats: Mapping[int, Heartbeat]) -> str:
        """One sentence about the ranks that are gone, stopped or late, after an exchange that failed.

        waited_s: how long this process has waited for the others; None if the connection broke. error: what the library
        said. heartbeats: the last ones by rank, once all were pinged.
        """
        answers = {rank: beat for rank, beat in heartbeats.items() if beat.answers_ping}
        silent = self._silent(heartbeats)
        least = min((beat.number for beat in answers.values()), default=0)
        late = {rank: beat for rank, beat in answers.items() if beat.number == least}
        if silent:
            accounts = [self._account_of_silent(rank, waited_s, heartbeats.get(rank)) for rank in silent]
        elif waited_s is None or self.rank in late:  # no other is behind it: they do not make the same exchanges
            what = "lost the connection to another rank" if waited_s is None else "waited in vain"
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
            return "; ".join([*accounts, *[GOES_ON] * self.has_checkpoints])
        limit = f" (--dist-timeout-s {waited_s:g})" if waited_s == self.limit_s else ""
        return "; ".join([*accounts, f"rank {self.rank} waited {waited_s:.0f} s for it in {self.activity}{limit}"])

    def diagnose_lost_store(self, waited_s: float | None) -> str:
        """One sentence where the store itself is gone: rank 0 kept it, unless the launcher does."""
        lost = f"{self._account_of_silent(0, waited_s)}, and with it the notes about the others"
        return "; ".join([lost, f"rank {self.rank} was in {self.activity}", *[GOES_ON] * self.has_checkpoints])

    def _account_of_silent(self, rank: int, waited_s: float | None, last: Heartbeat | None = None) -> str:
        how = "is gone" if waited_s is None else "gives no sign of life"
        seen = f", noted {max(0.0, time.time() - last.sent):.0f} s ago in {last.activity}" if last is not None else ""
        return f"{self._name(rank)} {how} ({self.members[rank]}){seen}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {len(self.members)}"
