"""Room for the connections of a process to all others: each is an open file, and the number of those is limited."""

import resource

from trainer.common.errors import UserError

PER_RANK = 3
"""The least that a process opens for each other one: a connection in every group of processes."""
BESIDE = 64
AMPLE_PER_RANK, AMPLE_BESIDE = 16, 1024
"""What the limit is raised to: fsdp and NCCL have groups of their own, loading processes and data take files too."""


def make_room(world_size: int) -> None:
    """Raises this process's soft limit of open files as far as so many processes may need. Raises UserError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = float("inf") if hard == resource.RLIM_INFINITY else hard
    needed, ample = PER_RANK * world_size + BESIDE, AMPLE_PER_RANK * world_size + AMPLE_BESIDE
    if most < needed:
        raise UserError(
            f"{world_size} processes: each has connections to all others and needs at least {needed} open files, but "
            f"`ulimit -Hn` allows {hard}; raise that limit, or start fewer processes"
        )
    if soft != resource.RLIM_INFINITY and soft < ample:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(min(ample, most)), hard))
