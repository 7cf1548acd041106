"""Why one process of several ends, by itself or because of another: one message, which one of them gives."""

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from trainer.loading.errors import BadInput
from trainer.parallel.errors import EXIT_AGAIN, EXIT_BAD_INPUT, EXIT_FAILED, Failure, StartAgain, reason, tell
from trainer.parallel.heartbeat import Bulletin, LastWords, Note, StoreLost
from trainer.parallel.phase import CurrentPhase

GOES_ON = "the same command goes on from the last checkpoint"


class Explainer:
    """One process's part.

    shard: (rank, world_size). members: a few words about each rank's process. patience_s: the limits of waiting by
    their flags, in seconds. speaks_for_host: whether this process tells the user when nobody can be asked.
    """

    def __init__(
        self,
        bulletin: Bulletin,
        shard: tuple[int, int],
        phase: CurrentPhase,
        members: Sequence[str],
        patience_s: Mapping[str, float],
        speaks_for_host: bool,
    ) -> None:
        self._bulletin = bulletin
        self._rank, self._world_size = shard
        self._phase = phase
        self._members = members
        self._patience_s = patience_s
        self._speaks_for_host = speaks_for_host
        self.has_checkpoints = True
        """Whether the same command goes on after a process is lost, and the user should know."""

    def of_own(self, error: BaseException) -> BaseException:
        """What to raise instead of an exception of this process, which the others are told about."""
        self._bulletin.may_be_ended = False
        words = first_words = self._words_on(error)
        with suppress(StoreLost):
            first_words = self._bulletin.speak(words)
        if isinstance(error, BadInput) or not isinstance(error, Exception):
            return error
        if first_words != words:
            return self._follow(first_words)
        tell(words.message, None if isinstance(error, StartAgain) else error)
        return failure_from(words)

    def _words_on(self, error: BaseException) -> LastWords:
        name = f"rank {self._rank} of {self._world_size}"
        if isinstance(error, BadInput):
            return LastWords(self._rank, EXIT_BAD_INPUT, str(error), refused=True)
        if isinstance(error, StartAgain):
            return LastWords(self._rank, EXIT_AGAIN, f"{name} is {error}", memory_limit=error.memory_limit)
        if isinstance(error, Exception):
            return LastWords(self._rank, EXIT_FAILED, f"{name} failed in {self._phase}: {reason(error)}")
        return LastWords(self._rank, EXIT_FAILED, "")  # the user wants the process to end at once

    def of_broken_exchange(self, error: BaseException) -> BaseException:
        """What to raise where an exchange failed: another process has left its last words, or is missing."""
        self._bulletin.may_be_ended = False
        timeout = re.search(r"Timed out waiting (\d+)ms", str(error))
        waited = int(timeout[1]) / 1000 if timeout else None
        flag = next((f"{name} {limit:g}" for name, limit in self._patience_s.items() if limit == waited), "")
        found = Break(self._rank, str(self._phase), waited, flag, reason(error), self.has_checkpoints)

        def compose(answers: Mapping[int, Note], notes: Mapping[int, Note]) -> LastWords:
            return LastWords(self._rank, EXIT_FAILED, blame(found, answers, notes, self._members))

        try:
            words = self._bulletin.find_out(compose)
        except StoreLost:
            words = LastWords(self._rank, EXIT_FAILED, blame_store_host(found, self._members))
            if not self._speaks_for_host:
                return failure_from(words)
        if words.rank == self._rank:
            tell(words.message)
        return self._follow(words)

    def _follow(self, words: LastWords) -> BaseException:
        """The end of this process because of another one, which has told the user; a BadInput the main one tells."""
        return BadInput(words.message) if words.refused and self._rank == 0 else failure_from(words)


def failure_from(words: LastWords) -> Failure:
    """The end of a process by what one of them said."""
    return Failure(words.message, words.status, words.memory_limit)


# --- from the places of all ranks to a sentence about the one that is missing -------------------------------------


@dataclass(frozen=True)
class Break:
    """An exchange between processes that failed.

    rank: whose account this is. waited_s: how long it has waited; None if the connection broke. waiting: in what.
    flag: which limit the wait has exceeded, as on the command line. error: what the library said. has_checkpoints:
    whether the run can go on.
    """

    rank: int
    waiting: str
    waited_s: float | None
    flag: str
    error: str
    has_checkpoints: bool = True


def blame(found: Break, answers: Mapping[int, Note], notes: Mapping[int, Note], members: Sequence[str]) -> str:
    """One sentence about the ranks that are gone, stopped or late.

    answers: of the ranks that answered just now. notes: what others had noted before. members: a few words about each
    rank's process.
    """
    silent = [rank for rank in range(len(members)) if rank not in answers]
    if silent:
        how = "is gone" if found.waited_s is None else "gives no sign of life"
        seen = {rank: f", {_last_seen(notes[rank])}" if rank in notes else "" for rank in silent}
        accounts = [f"{_name(rank, members)} {how} ({members[rank]}){seen[rank]}" for rank in silent]
    else:
        least = min(note.number for note in answers.values())
        late = [rank for rank, note in answers.items() if note.number == least]
        if found.waited_s is None or len(late) == len(members):
            what = "lost the connection to another rank" if found.waited_s is None else "waited in vain"
            return f"{_name(found.rank, members)} {what} in {found.waiting}, and all ranks are alive: {found.error}"
        accounts = [
            f"{_name(rank, members)} is late: in {answers[rank].where} for {answers[rank].seconds:.0f} s "
            f"({members[rank]})"
            for rank in late
        ]
    if found.waited_s is None:
        end = _way_on(found)
    else:
        flag = f" ({found.flag})" if found.flag else ""
        end = [f"rank {found.rank} waited {found.waited_s:.0f} s for it in {found.waiting}{flag}"]
    return "; ".join([*accounts, *end])


def blame_store_host(found: Break, members: Sequence[str]) -> str:
    """The same when the store itself is gone: it was kept by rank 0, unless the launcher keeps it."""
    how = "is gone" if found.waited_s is None else "gives no sign of life"
    lost = f"{_name(0, members)} {how} ({members[0]}), and with it the notes about the others"
    return "; ".join([lost, f"rank {found.rank} was in {found.waiting}", *_way_on(found)])


def _way_on(found: Break) -> list[str]:
    return [GOES_ON] if found.has_checkpoints else []


def _name(rank: int, members: Sequence[str]) -> str:
    return f"rank {rank} of {len(members)}"


def _last_seen(note: Note) -> str:
    return f"noted {max(0.0, time.time() - note.written):.0f} s ago in {note.where}"
