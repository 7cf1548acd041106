"""Why a run ends that nobody asked to end: one message about it, which one process prints."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from trainer.loading.errors import BadInput
from trainer.parallel.errors import EXIT_AGAIN, EXIT_BAD_INPUT, EXIT_FAILED, Failure, RestartNeeded, print_error, reason
from trainer.parallel.heartbeat import EndReport, Heartbeat, HeartbeatMonitor
from trainer.parallel.phase import CurrentPhase

GOES_ON = "the same command goes on from the last checkpoint"


class Diagnosis:
    """Of a run of one process.

    has_checkpoints: whether the same command goes on after a process is lost, and the user should know.
    """

    def __init__(self, phase: CurrentPhase) -> None:
        self._phase = phase
        self.has_checkpoints = True

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Whatever goes wrong within it is explained to the user, by one process, and ends all of them.

        A BadInput leaves it as it is: on the main process also the one of another. Every other exception becomes a
        Failure.
        """
        try:
            yield
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            explained = self.explain(error)
            if explained is error:
                raise
            raise explained from None

    def explain(self, error: BaseException) -> BaseException:
        """What to raise instead of an exception, once the user knows of it; see `explaining`."""
        if isinstance(error, BadInput | Failure) or not isinstance(error, Exception):
            return error
        message = f"failed in {self._phase}: {reason(error)}"
        print_error(message, error)
        return Failure(message)

    def before_forced_end(self, record: Callable[[Failure], None]) -> None:
        """record: called if another process has failed and this one is stuck, just before it is ended."""


class GroupDiagnosis(Diagnosis):
    """Of a run of several processes: one of them reports why it ends, and all end by that report.

    members: a few words about each rank's process. limits_s: how long others are waited for, by the flags that say so.
    reports_lost_store: whether this process speaks for the others when they cannot agree who does.
    exit_status: of this process, once it has failed.
    """

    def __init__(
        self,
        monitor: HeartbeatMonitor,
        phase: CurrentPhase,
        rank: int,
        members: Sequence[str],
        limits_s: Mapping[str, float],
        reports_lost_store: bool,
    ) -> None:
        super().__init__(phase)
        self._monitor = monitor
        self._rank = rank
        self._members = members
        self._limits_s = limits_s
        self._reports_lost_store = reports_lost_store
        self.exit_status: int | None = None

    def explain(self, error: BaseException) -> BaseException:
        if isinstance(error, Failure):
            return error
        self._monitor.may_force_end = False
        explained = self._explain_broken_exchange(error) if _is_broken_exchange(error) else self._explain_own(error)
        self.exit_status = explained.status if isinstance(explained, Failure) else EXIT_BAD_INPUT
        return explained

    def before_forced_end(self, record: Callable[[Failure], None]) -> None:
        self._monitor.before_forced_end = record

    def _explain_own(self, error: BaseException) -> BaseException:
        """Of an exception of this process, unless another one has failed before."""
        own = self._report_on(error)
        report = self._monitor.report_end(lambda: own) or own
        if isinstance(error, BadInput) or not isinstance(error, Exception):
            return error
        if report == own:
            print_error(own.message, None if isinstance(error, RestartNeeded) else error)
        return self._end_by(report)

    def _report_on(self, error: BaseException) -> EndReport:
        name = _name(self._rank, self._members)
        if isinstance(error, BadInput):
            return EndReport(self._rank, EXIT_BAD_INPUT, str(error))
        if isinstance(error, RestartNeeded):
            return EndReport(self._rank, EXIT_AGAIN, f"{name} is {error}", error.memory_limit)
        if isinstance(error, Exception):
            return EndReport(self._rank, EXIT_FAILED, f"{name} failed in {self._phase}: {reason(error)}")
        return EndReport(self._rank, EXIT_FAILED, "")  # the user wants the process to end at once

    def _explain_broken_exchange(self, error: BaseException) -> BaseException:
        """Another process has reported its end, or is missing."""
        timeout = re.search(r"Timed out waiting (\d+)ms", str(error))
        waited_s = int(timeout[1]) / 1000 if timeout else None
        limit = next((f"{flag} {limit_s:g}" for flag, limit_s in self._limits_s.items() if limit_s == waited_s), "")
        found = BrokenExchange(self._rank, str(self._phase), waited_s, limit, reason(error), self.has_checkpoints)

        def compose() -> EndReport:
            return EndReport(self._rank, EXIT_FAILED, diagnose(found, self._monitor.ping(), self._members))

        report = self._monitor.report_end(compose)
        if report is None:
            report = EndReport(self._rank, EXIT_FAILED, diagnose_lost_store(found, self._members))
            if not self._reports_lost_store:
                return report.failure
        if report.rank == self._rank:
            print_error(report.message)
        return self._end_by(report)

    def _end_by(self, report: EndReport) -> BaseException:
        """The process that reports has told the user, but of a BadInput the main one does."""
        return BadInput(report.message) if report.status == EXIT_BAD_INPUT and self._rank == 0 else report.failure


def _is_broken_exchange(error: BaseException) -> bool:
    """Whether a collective raised it because of another process."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


# --- which rank is missing ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BrokenExchange:
    """An exchange between processes that failed.

    rank: whose account this is. phase: what it was doing. waited_s: how long it has waited; None if the connection
    broke. limit: the flag that the wait has exceeded, as on the command line. error: what the library said.
    has_checkpoints: whether the run can go on.
    """

    rank: int
    phase: str
    waited_s: float | None
    limit: str
    error: str
    has_checkpoints: bool = True

    @property
    def silence(self) -> str:
        """What is to be said of a process that does not answer."""
        return "is gone" if self.waited_s is None else "gives no sign of life"

    @property
    def way_on(self) -> list[str]:
        """What is left to be done."""
        return [GOES_ON] if self.has_checkpoints else []


def diagnose(found: BrokenExchange, heartbeats: Mapping[int, Heartbeat], members: Sequence[str]) -> str:
    """One sentence about the ranks that are gone, stopped or late.

    heartbeats: the last ones by rank, once all were pinged. members: a few words about each rank's process.
    """
    answers = {rank: beat for rank, beat in heartbeats.items() if beat.answers_ping}
    silent = [rank for rank in range(len(members)) if rank not in answers]
    least = min((beat.number for beat in answers.values()), default=0)
    late = [rank for rank, beat in answers.items() if beat.number == least]
    if silent:
        accounts = [
            f"{_name(rank, members)} {found.silence} ({members[rank]}){_last_seen(heartbeats.get(rank))}"
            for rank in silent
        ]
    elif found.waited_s is None or len(late) == len(members):
        what = "lost the connection to another rank" if found.waited_s is None else "waited in vain"
        return f"{_name(found.rank, members)} {what} in {found.phase}, and all ranks are alive: {found.error}"
    else:
        accounts = [
            f"{_name(rank, members)} is late: in {answers[rank].phase} for {answers[rank].seconds:.0f} s "
            f"({members[rank]})"
            for rank in late
        ]
    if found.waited_s is None:
        return "; ".join([*accounts, *found.way_on])
    limit = f" ({found.limit})" if found.limit else ""
    return "; ".join([*accounts, f"rank {found.rank} waited {found.waited_s:.0f} s for it in {found.phase}{limit}"])


def diagnose_lost_store(found: BrokenExchange, members: Sequence[str]) -> str:
    """The same when the store itself is gone: it was kept by rank 0, unless the launcher keeps it."""
    lost = f"{_name(0, members)} {found.silence} ({members[0]}), and with it the notes about the others"
    return "; ".join([lost, f"rank {found.rank} was in {found.phase}", *found.way_on])


def _name(rank: int, members: Sequence[str]) -> str:
    return f"rank {rank} of {len(members)}"


def _last_seen(beat: Heartbeat | None) -> str:
    return f", noted {max(0.0, time.time() - beat.sent):.0f} s ago in {beat.phase}" if beat is not None else ""
