"""From the places of all ranks to a sentence about the one that is missing."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.parallel.heartbeat import Note

GOES_ON = "the same command goes on from the last checkpoint"


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
