"""How the processes of a run meet: one for each rank, and all started alike."""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from trainer.common.errors import UserError, shortened
from trainer.config import shown
from trainer.parallel.environment import RankEnvironment, is_under_torchrun

T = TypeVar("T")

MOST_NAMED = 8
"""Facts or ranks in one message."""
ALIKE = "start all ranks by the same command, and each job at a MASTER_PORT of its own"
SIZE = "WORLD_SIZE of rank 0"

_runs = itertools.count()
"""Counts the runs of this process; processes that meet have had equally many."""


def join(environment: RankEnvironment, timeout_s: float) -> dist.Store:
    """The store at which all processes of a run have met, each with a rank of its own.

    Raises UserError for a process whose rank another one has, or that counts other ranks than rank 0; RuntimeError when
    not all come within the time.
    """
    deadline = time.monotonic() + timeout_s
    rank, world_size, timeout = environment.rank, environment.world_size, timedelta(seconds=timeout_s)
    store, _, _ = next(dist.rendezvous(environment.init_method, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    # A store may outlive the processes that met at it, and must not confuse those that a launcher starts again, nor
    # the next run of the same ones.
    store = dist.PrefixStore(f"attempt {environment.attempt} run {next(_runs)}", store)
    # torchrun gives each rank once, and to what several agents start again the notes of an earlier start.
    if not is_under_torchrun():
        _claim_rank(store, environment, deadline)
    return store


def _claim_rank(store: dist.Store, environment: RankEnvironment, deadline: float) -> None:
    rank, world_size = environment.rank, environment.world_size
    if rank == 0:
        store.set(SIZE, str(world_size))
    store.wait([SIZE], _until(deadline))
    size, claims = int(store.get(SIZE)), [f"processes that came as rank {other}" for other in range(world_size)]
    if size != world_size:
        raise UserError(f"rank {rank} has WORLD_SIZE={world_size}, and rank 0 WORLD_SIZE={size}; {ALIKE}")
    if store.add(claims[rank], 1) > 1:
        raise UserError(
            f"rank {rank} of {world_size}: another process has come to {environment.meeting_place} with this rank "
            "before; give each process a RANK of its own, and each job a MASTER_PORT of its own"
        )
    try:
        store.wait(claims, _until(deadline))
    except RuntimeError:
        missing = [str(other) for other, claim in enumerate(claims) if not store.check([claim])]
        if not missing:
            raise
        named = ", ".join(missing[:MOST_NAMED] + ["..."] * (len(missing) > MOST_NAMED))
        twice = [str(other) for other, claim in enumerate(claims) if store.check([claim]) and store.add(claim, 0) > 1]
        also = f", and several processes came as rank {', '.join(twice[:MOST_NAMED])}" if twice else ""
        raise RuntimeError(f"rank {named} did not come{also}") from None


def _until(deadline: float) -> timedelta:
    """At least a moment, for what is there already."""
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))


def within(limit_s: float, function: Callable[[], T]) -> T:
    """The result of a function, or what it raises; RuntimeError when it takes longer.

    It then stays behind in a thread: not all waits of torch keep to the limit that they are given.
    """
    done: list[tuple[T | None, BaseException | None]] = []

    def call() -> None:
        try:
            done.append((function(), None))
        except BaseException as error:  # raised again where somebody waits for it
            done.append((None, error))

    thread = threading.Thread(target=call, name="meeting", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not done:
        raise RuntimeError("nobody answered")
    result, error = done[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def refuse_differences(stated: Sequence[Mapping[str, Any]], advice: str) -> None:
    """Raises UserError where a rank states another value than rank 0 for a name that both state.

    stated: by rank, plain values by name. advice: what the user is to do.
    """
    first, differing = stated[0], {}
    for rank, own in enumerate(stated):
        names = [name for name in first if name in own and own[name] != first[name]]
        if names:
            differing[rank] = names
    if not differing:
        return
    rank, names = next(iter(differing.items()))
    found = [f"{name} {_short(stated[rank][name])}, not {_short(first[name])}" for name in names[:MOST_NAMED]]
    found += [f"and {len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    others = f" (as do {len(differing) - 1} more ranks)" if len(differing) > 1 else ""
    raise UserError(f"rank {rank} of {len(stated)} differs from rank 0{others}: {'; '.join(found)}; {advice}")


def _short(value: Any) -> str:
    return shortened(" ".join(shown(value).split()))
