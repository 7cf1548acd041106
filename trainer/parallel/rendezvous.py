"""Rendezvous of a run's processes: checks that each rank joins once, and that all ranks have the same flags."""

import itertools
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from trainer.common.errors import UserError, shortened
from trainer.common.process import to_stderr
from trainer.config import shown
from trainer.parallel.environment import RankEnvironment, is_under_torchrun

MOST_NAMED = 8
"""Maximum number of differing values, or of ranks, that a message lists."""
ALIKE = "start all ranks with the same command, and each job with its own MASTER_PORT"
SIZE = "WORLD_SIZE of rank 0"
POLL_S = 0.05
RESOLVE_S = 0.5

_runs = itertools.count()
"""Counts the runs of this process; all processes of a run have the same count."""


def join(environment: RankEnvironment, timeout_s: float) -> dist.Store:
    """Returns the store of a run, once all processes have joined, each with its own rank.

    Raises UserError for a duplicate rank or a WORLD_SIZE other than rank 0's, and RuntimeError if a rank does not join.
    """
    deadline = time.monotonic() + timeout_s
    rank, world_size, timeout = environment.rank, environment.world_size, timedelta(seconds=timeout_s)
    _await_host(environment, deadline)
    store, _, _ = next(dist.rendezvous(environment.init_method, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    # A store may outlive a run's processes; later runs and attempts must not read its old entries.
    store = dist.PrefixStore(f"run {next(_runs)}", store)
    if is_under_torchrun():  # which assigns unique ranks, and may keep the store when it starts the processes again
        return dist.PrefixStore(_name_of_attempt(store, rank, world_size, deadline), store)
    _claim_rank(store, environment, deadline)
    return store


def _await_host(environment: RankEnvironment, deadline: float) -> None:
    """Waits until the host name of rank 0 can be resolved, since some clusters publish it once the host has started."""
    url, is_told = environment.init_method, not environment.tells_user
    host = os.environ.get("MASTER_ADDR") if url == "env://" else urlsplit(url).hostname
    problem = f"MASTER_ADDR={shortened(str(host))}: no address is known for this name"
    while host:
        with suppress(socket.gaierror, UnicodeError):
            socket.getaddrinfo(host, None)
            return
        if time.monotonic() >= deadline:
            raise RuntimeError(f"{problem}; correct this environment variable")
        if not is_told:
            to_stderr(f"{problem} yet; waiting for it; if the name is wrong, correct this environment variable")
            is_told = True
        time.sleep(RESOLVE_S)


def _name_of_attempt(store: dist.Store, rank: int, world_size: int, deadline: float) -> str:
    """Waits for all processes; returns a name that they agree on and that no earlier processes have used.

    The name is the hash of a random number from each rank. It counts once every rank has confirmed it, so the number
    of a dead process, which a restarted process of this rank replaces, is in no name that counts.
    """
    own, numbers = secrets.token_hex(16), [f"number of rank {other}" for other in range(world_size)]
    store.set(numbers[rank], own)
    awaited = numbers
    while time.monotonic() < deadline:
        if store.check(numbers):
            found = store.multi_get(numbers)
            name = blake2b(b"".join(found), digest_size=16).hexdigest()
            awaited = [f"{name} of rank {other}" for other in range(world_size)]
            if found[rank] == own.encode():
                store.set(awaited[rank], "")
                if store.check(awaited):
                    return name
        time.sleep(POLL_S)
    raise RuntimeError(_missing(store, awaited) or f"another process joined as rank {rank}")


def _claim_rank(store: dist.Store, environment: RankEnvironment, deadline: float) -> None:
    rank, world_size = environment.rank, environment.world_size
    if rank == 0:
        store.set(SIZE, str(world_size))
    store.wait([SIZE], _until(deadline))
    size, claims = int(store.get(SIZE)), [f"processes that joined as rank {other}" for other in range(world_size)]
    if size != world_size:
        raise UserError(f"rank {rank} has WORLD_SIZE={world_size}, but rank 0 has WORLD_SIZE={size}; {ALIKE}")
    if store.add(claims[rank], 1) > 1:
        raise UserError(
            f"rank {rank} of {world_size}: another process has already joined {environment.meeting_place} with this "
            "rank; give each process its own RANK, and each job its own MASTER_PORT"
        )
    try:
        store.wait(claims, _until(deadline))
    except RuntimeError:
        missing = _missing(store, claims)
        if not missing:
            raise
        twice = [str(other) for other, claim in enumerate(claims) if store.check([claim]) and store.add(claim, 0) > 1]
        also = f", and several processes joined as rank {listed(twice)}" if twice else ""
        raise RuntimeError(f"{missing}{also}") from None


def _missing(store: dist.Store, claims: Sequence[str]) -> str:
    """Names the ranks whose key is not in the store; returns "" if there are none."""
    missing = [str(rank) for rank, claim in enumerate(claims) if not store.check([claim])]
    return f"rank {listed(missing)} did not join" if missing else ""


def listed(names: Sequence[str]) -> str:
    """Joins at most MOST_NAMED names with commas."""
    return ", ".join([*names[:MOST_NAMED], *["..."] * (len(names) > MOST_NAMED)])


def _until(deadline: float) -> timedelta:
    """Returns the time until the deadline, but at least one second, so that the store's entries can still be read."""
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))


def refuse_differences(stated: Sequence[Mapping[str, Any]], advice: str) -> None:
    """Raises UserError if a rank's value differs from rank 0's value of the same name.

    stated: each rank's values by name. A name that the rank lacks is ignored; one that rank 0 lacks counts as None.
    advice: end of the message.
    """
    first, differing = stated[0], {}
    for rank, own in enumerate(stated):
        names = [name for name in own if own[name] != first.get(name)]
        if names:
            differing[rank] = names
    if not differing:
        return
    rank, names = next(iter(differing.items()))
    own = stated[rank]
    found = [f"{name} is {_short(own[name])} instead of {_short(first.get(name))}" for name in names[:MOST_NAMED]]
    found += [f"and {len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    others = f" ({len(differing)} ranks differ)" if len(differing) > 1 else ""
    raise UserError(f"rank {rank} of {len(stated)} differs from rank 0{others}: {'; '.join(found)}; {advice}")


def _short(value: Any) -> str:
    return shortened(" ".join(shown(value).split()))
