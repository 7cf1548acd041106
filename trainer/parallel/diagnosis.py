"""Why a run ends that nobody asked to end: one message about it, which one process prints."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist

from trainer.loading.errors import BadInput
from trainer.parallel.errors import EXIT_AGAIN, EXIT_BAD_INPUT, Failure, RestartNeeded, print_error, reason
from trainer.parallel.heartbeat import Heartbeat, HeartbeatMonitor
from trainer.parallel.phase import CurrentPhase

GOES_ON = "the same command goes on from the last checkpoint"


@dataclass
class Diagnosis:
    """Of a run of one process.

    phase: what this process is doing. has_checkpoints: whether the same command goes on after a process is lost, and
    the user should know.
    """

    phase: CurrentPhase
    has_checkpoints: bool = field(default=True, kw_only=True)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Whatever goes wrong within it is explained to the user, by one process, and ends all of them.

        A BadInput leaves it as it is: on the main process also the one of another. Every other exception becomes a
        Failure.
        """
        try:
            yield
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            explained = error if isinstance(error, Failure) else self.explain(error)
            if explained is error:
                raise
            raise explained from None

    def explain(self, error: BaseException) -> BaseException:
        """What to raise instead of an exception, once the user knows of it; see `explaining`."""
        if isinstance(error, BadInput) or not isinstance(error, Exception):
            return error
        failure = Failure(f"failed in {self.phase}: {reason(error)}")
        print_error(str(failure), error)
        return failure

    def before_forced_end(self, record: Callable[[Failure], None]) -> None:
        """record: called if another process has failed and this one is stuck, just before it is ended."""


@dataclass
class GroupDiagnosis(Diagnosis):
    """Of a run of several processes: one of them reports why it ends, and all end by that report.

    members: a few words about each rank's process. limits_s: how long others are waited for, by the flags that say so.
    reports_lost_store: whether this process speaks for the others when they cannot agree who does. exit_status: of this
    process, once it has failed.
    """

    monitor: HeartbeatMonitor
    rank: int
    members: Sequence[str]
    limits_s: Mapping[str, float]
    reports_lost_store: bool
    exit_status: int | None = None

    def explain(self, error: BaseException) -> BaseException:
        self.monitor.may_force_end = False
        explained = self._explain_broken_exchange(error) if _is_broken_exchange(error) else self._explain_own(error)
        self.exit_status = explained.status if isinstance(explained, Failure) else EXIT_BAD_INPUT
        return explained

    def before_forced_end(self, record: Callable[[Failure], None]) -> None:
        self.monitor.before_forced_end = record

    def _explain_own(self, error: BaseException) -> BaseException:
        """Of an exception of this process, unless another one has failed before."""
        own = self._own_failure(error)
        reported, is_own = self.monitor.report_end(lambda: own) or (own, True)
        if isinstance(error, BadInput) or not isinstance(error, Exception):
            return error
        if is_own:
            print_error(str(own), None if isinstance(error, RestartNeeded) else error)
        return self._end_by(reported)

    def _own_failure(self, error: BaseException) -> Failure:
        if isinstance(error, BadInput):
            return Failure(str(error), EXIT_BAD_INPUT)
        if not isinstance(error, Exception):
            return Failure("")  # the user wants the process to end at once
        name = f"rank {self.rank} of {len(self.members)}"
        if isinstance(error, RestartNeeded):
            return Failure(f"{name} is {error}", EXIT_AGAIN, error.memory_limit)
        return Failure(f"{name} failed in {self.phase}: {reason(error)}")

    def _explain_broken_exchange(self, error: BaseException) -> BaseException:
        """Another process has reported its end, or is missing."""
        timeout = re.search(r"Timed out waiting (\d+)ms", str(error))
        waited_s = int(timeout[1]) / 1000 if timeout else None
        limit = next((f"{flag} {limit_s:g}" for flag, limit_s in self.limits_s.items() if limit_s == waited_s), "")
        found = BrokenExchange(
            self.rank, self.members, str(self.phase), waited_s, limit, reason(error), self.has_checkpoints
        )
        answer = self.monitor.report_end(lambda: Failure(found.diagnose(self.monitor.ping())))
        reported, is_own = answer or (Failure(found.diagnose_lost_store()), self.reports_lost_store)
        if is_own:
            print_error(str(reported))
        return self._end_by(reported)

    def _end_by(self, reported: Failure) -> BaseException:
        """The process that reports has told the user, but of a BadInput the main one does."""
        return BadInput(str(reported)) if reported.status == EXIT_BAD_INPUT and self.rank == 0 else reported


def _is_broken_exchange(error: BaseException) -> bool:
    """Whether a collective raised it because of another process."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


@dataclass(frozen=True)
class BrokenExchange:
    """An exchange between processes that failed, by the account of one of them.

    rank: whose account it is. members: a few words about each rank's process. phase: what this one was doing. waited_s:
    how long it has waited; None if the connection broke. limit: the flag that the wait has exceeded, as on the command
    line. error: what the library said. has_checkpoints: whether the run can go on.
    """

    rank: int
    members: Sequence[str]
    phase: str
    waited_s: float | None
    limit: str
    error: str
    has_checkpoints: bool = True

    def diagnose(self, heartbeats: Mapping[int, Heartbeat]) -> str:
        """One sentence about the ranks that are gone, stopped or late.

        heartbeats: the last ones by rank, once all were pinged.
        """
        answers = {rank: beat for rank, beat in heartbeats.items() if beat.answers_ping}
        silent = [rank for rank in range(len(self.members)) if rank not in answers]
        least = min((beat.number for beat in answers.values()), default=0)
        late = {rank: beat for rank, beat in answers.items() if beat.number == least}
        if silent:
            accounts = [self._account_of_silent(rank, heartbeats.get(rank)) for rank in silent]
        elif self.waited_s is None or len(late) == len(answers):
            what = "lost the connection to another rank" if self.waited_s is None else "waited in vain"
            return f"{self._name(self.rank)} {what} in {self.phase}, and all ranks are alive: {self.error}"
        else:
            accounts = [
                f"{self._name(rank)} is late: in {beat.phase} for {beat.seconds:.0f} s ({self.members[rank]})"
                for rank, beat in late.items()
            ]
        if self.waited_s is None:
            return "; ".join([*accounts, *self._way_on()])
        limit = f" ({self.limit})" if self.limit else ""
        return "; ".join([*accounts, f"rank {self.rank} waited {self.waited_s:.0f} s for it in {self.phase}{limit}"])

    def diagnose_lost_store(self) -> str:
        """The same when the store itself is gone: it was kept by rank 0, unless the launcher keeps it."""
        lost = f"{self._account_of_silent(0)}, and with it the notes about the others"
        return "; ".join([lost, f"rank {self.rank} was in {self.phase}", *self._way_on()])

    def _account_of_silent(self, rank: int, last: Heartbeat | None = None) -> str:
        how = "is gone" if self.waited_s is None else "gives no sign of life"
        seen = f", noted {max(0.0, time.time() - last.sent):.0f} s ago in {last.phase}" if last is not None else ""
        return f"{self._name(rank)} {how} ({self.members[rank]}){seen}"

    def _way_on(self) -> list[str]:
        return [GOES_ON] if self.has_checkpoints else []

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {len(self.members)}"
