"""What the processes of a run tell each other when one of them fails, or does not come.

It goes through the store at which they met, which works when their collectives do not.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from trainer.parallel.phase import CurrentPhase

T = TypeVar("T")

TICK_S = 0.5
SLOW_S = 1.0
"""A phase that lasts so long is noted at once."""
NOTE_EVERY_S = 5.0
ANSWER_WITHIN_S = 3.0
WORDS_WITHIN_S = 15.0
LEAVE_WITHIN_S = 5.0

ROLL_CALL, REPORTER, LAST_WORDS = "roll call", "reporter", "last words"


class Store(Protocol):
    """What is needed of the store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


@dataclass(frozen=True)
class LastWords:
    """Why the run ends, by the process that said so first.

    rank: its own. status: the exit status of all. message: empty if there is nothing to be said. refused: it is
    something for the user to change (a BadInput). memory_limit: see `Failure`.
    """

    rank: int
    status: int
    message: str
    refused: bool = False
    memory_limit: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Note:
    """Where a rank was. number: see `CurrentPhase`. seconds: for how long then. written: in seconds since 1970."""

    where: str
    number: int
    seconds: float
    written: float


class StoreLost(Exception):
    """The process that keeps the store is gone, or does not answer."""


class Bulletin:
    """One process's part. A thread of its own notes now and then where the training thread is, and answers roll calls.

    It also ends the process when the run has failed elsewhere and the training thread does not notice: nobody could
    end a process that somebody started by hand.
    """

    def __init__(self, store: Store, shard: tuple[int, int], phase: CurrentPhase) -> None:
        self._store = store
        self._rank, self._world_size = shard
        self._phase = phase
        self._seen = (-1, time.monotonic())
        """Number of the phase at the last look, and when it was first seen."""
        self._noted = (-1, -1.0)
        self._answered = False
        self._words_seen = 0.0
        self._closed = threading.Event()
        self.may_be_ended = True
        """Whether the training thread may be given up on: not while it does what all wait for, nor when it leaves."""
        self.before_the_end: Callable[[LastWords], None] = lambda words: None
        """Called when this process is ended because its training thread does not notice."""
        self._thread = threading.Thread(target=self._keep, name="bulletin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, so that nothing uses the store any more."""
        self._closed.set()
        self._thread.join(ANSWER_WITHIN_S)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        with suppress(Exception):  # a store that is gone says nothing, and its process is missed elsewhere
            while not self._closed.wait(TICK_S):
                self._look()
                self._note()
                self._answer()
                self._end_if_overdue()

    def _look(self) -> None:
        if self._phase.number != self._seen[0]:
            self._seen = (self._phase.number, time.monotonic())

    def _note(self) -> None:
        (number, since), (noted, when), now = self._seen, self._noted, time.monotonic()
        if number != noted and (now - since >= SLOW_S or when < 0 or now - when >= NOTE_EVERY_S):
            self._noted = (number, now)
            self._store.set(f"note {self._rank}", self._own_note())

    def _own_note(self) -> str:
        number, since = self._seen
        return json.dumps([str(self._phase), number, time.monotonic() - since, time.time()])

    def _answer(self) -> None:
        if not self._answered and self._store.check([ROLL_CALL]):
            self._answered = True
            self._store.set(f"answer {self._rank}", self._own_note())

    def _end_if_overdue(self) -> None:
        if not self.may_be_ended or not self._store.check([LAST_WORDS]):
            self._words_seen = 0.0
        elif not self._words_seen:
            self._words_seen = time.monotonic()
        elif time.monotonic() - self._words_seen > LEAVE_WITHIN_S:
            words = LastWords(**json.loads(self._store.get(LAST_WORDS)))
            with suppress(Exception):
                self.before_the_end(words)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(words.status)

    # --- when something is wrong ---------------------------------------------------------------------------------

    def speak(self, words: LastWords) -> LastWords:
        """Makes these the last words, unless another process was first; returns those that count. Raises StoreLost."""
        return self._within(lambda: self._speak(lambda: words))

    def find_out(self, compose: Callable[[Mapping[int, Note], Mapping[int, Note]], LastWords]) -> LastWords:
        """The last words of another process; without any, those that `compose` finds. Raises StoreLost.

        compose: called on one process with the answers to a roll call and with the older notes of the others, by rank.
        """
        return self._within(lambda: self._speak(lambda: compose(*self._call_the_roll())))

    def _speak(self, words: Callable[[], LastWords]) -> LastWords:
        own = str(self._rank)
        if not self._store.check([LAST_WORDS]) and self._store.compare_set(REPORTER, "", own).decode() == own:
            found = words()
            self._store.set(LAST_WORDS, json.dumps(asdict(found)))
            return found
        deadline = time.monotonic() + WORDS_WITHIN_S
        while not self._store.check([LAST_WORDS]):
            if time.monotonic() > deadline:
                raise StoreLost
            time.sleep(0.05)
        return LastWords(**json.loads(self._store.get(LAST_WORDS)))

    def _call_the_roll(self) -> tuple[dict[int, Note], dict[int, Note]]:
        self._store.set(ROLL_CALL, "now")
        missing = set(range(self._world_size))
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while missing and time.monotonic() < deadline:
            time.sleep(0.05)
            missing -= {rank for rank in missing if self._store.check([f"answer {rank}"])}
        answers = self._read("answer", [rank for rank in range(self._world_size) if rank not in missing])
        return answers, self._read("note", [rank for rank in missing if self._store.check([f"note {rank}"])])

    def _read(self, kind: str, ranks: Sequence[int]) -> dict[int, Note]:
        return {rank: Note(*json.loads(self._store.get(f"{kind} {rank}"))) for rank in ranks}

    def _within(self, function: Callable[[], T]) -> T:
        """A store whose host is stopped never answers, so the wait is not left to it."""
        results: list[T] = []

        def call() -> None:
            with suppress(Exception):
                results.append(function())

        thread = threading.Thread(target=call, name="report", daemon=True)
        thread.start()
        thread.join(WORDS_WITHIN_S + ANSWER_WITHIN_S)
        if not results:
            raise StoreLost
        return results[0]
