"""Why one process of several ends, by itself or because of another: one message, which one of them gives."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from trainer.loading.errors import BadInput
from trainer.parallel.diagnosis import Break, blame, blame_store_host
from trainer.parallel.errors import EXIT_AGAIN, EXIT_BAD_INPUT, EXIT_FAILED, Failure, StartAgain, reason, tell
from trainer.parallel.heartbeat import Bulletin, LastWords, Note, StoreLost
from trainer.parallel.phase import Whereabouts


class Explainer:
    """One process's part.

    shard: (rank, world_size). members: a few words about each rank's process. patience_s: the limits of waiting by
    their flags, in seconds. speaks_for_host: whether this process tells the user when nobody can be asked.
    """

    def __init__(
        self,
        bulletin: Bulletin,
        shard: tuple[int, int],
        whereabouts: Whereabouts,
        members: Sequence[str],
        patience_s: Mapping[str, float],
        speaks_for_host: bool,
    ) -> None:
        self._bulletin = bulletin
        self._rank, self._world_size = shard
        self._whereabouts = whereabouts
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
            return LastWords(self._rank, EXIT_FAILED, f"{name} failed in {self._whereabouts}: {reason(error)}")
        return LastWords(self._rank, EXIT_FAILED, "")  # the user wants the process to end at once

    def of_broken_exchange(self, error: BaseException) -> BaseException:
        """What to raise where an exchange failed: another process has left its last words, or is missing."""
        self._bulletin.may_be_ended = False
        timeout = re.search(r"Timed out waiting (\d+)ms", str(error))
        waited = int(timeout[1]) / 1000 if timeout else None
        flag = next((f"{name} {limit:g}" for name, limit in self._patience_s.items() if limit == waited), "")
        found = Break(self._rank, str(self._whereabouts), waited, flag, reason(error), self.has_checkpoints)

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
