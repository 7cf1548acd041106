"""Which rank the environment gives this process."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.parallel.devices import MultiDeviceFlags


@dataclass(frozen=True)
class RankEnvironment:
    """Who this process is among several.

    local_rank, local_world_size: among the processes of this machine; None where the launcher did not say.
    init_method: where the processes meet; "env://" or a file. attempt: how often the same launcher has started all of
    them again, with the addresses of the attempt before left where they meet.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    init_method: str = "env://"
    attempt: int = 0

    @property
    def meeting_place(self) -> str:
        """Where the processes meet, as a message names it."""
        if self.init_method != "env://":
            return self.init_method
        return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def read_rank_environment(
    environ: Mapping[str, str], flags: MultiDeviceFlags
) -> tuple[RankEnvironment | None, list[str]]:
    """The rank variables that torchrun, torch.distributed.launch or a hand-written script sets.

    Returns None if there are none, and one sentence for each contradiction.
    """
    local_rank_flag = flags.local_rank
    if flags.multi_gpu == "dp":
        return None, one_process_problems(environ)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if not any(name in environ for name in (*names[:2], "LOCAL_RANK")):
        if local_rank_flag is not None:
            return None, [f"--local-rank {local_rank_flag}: RANK and WORLD_SIZE are not set; use torchrun"]
        return None, []
    problems = [
        f"{name} is not set but {_set_names(environ)} is; set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if not environ.get(name)
    ]
    numbers: dict[str, int] = {}
    for name in (*names, "MASTER_PORT"):
        text = environ.get(name)
        if text:
            if text.isdigit():
                numbers[name] = int(text)
            else:
                problems.append(f"{name}={text}: must be a whole number, 0 or more")
    if local_rank_flag is not None and numbers.setdefault("LOCAL_RANK", local_rank_flag) != local_rank_flag:
        problems.append(f"--local-rank {local_rank_flag} contradicts LOCAL_RANK={numbers['LOCAL_RANK']}")
    for small, large in (
        ("RANK", "WORLD_SIZE"),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("LOCAL_RANK", "WORLD_SIZE"),
    ):
        if small in numbers and large in numbers and numbers[small] >= numbers[large]:
            problems.append(f"{small}={numbers[small]} must be below {large}={numbers[large]}")
    if numbers.get("LOCAL_WORLD_SIZE", 0) > numbers.get("WORLD_SIZE", 1 << 30):
        problems.append(
            f"LOCAL_WORLD_SIZE={numbers['LOCAL_WORLD_SIZE']} must not exceed WORLD_SIZE={numbers['WORLD_SIZE']}"
        )
    if not 0 < numbers.get("MASTER_PORT", 1) < 65536:
        problems.append(f"MASTER_PORT={numbers['MASTER_PORT']}: must be between 1 and 65535")
    if flags.nproc is not None:
        problems.append(f"--nproc {flags.nproc}: RANK and WORLD_SIZE are set already, by a launcher; leave it out")
    if problems:
        return None, problems
    # Several torchrun agents meet at a new store each time, and do not count their restarts alike.
    is_one_agent = numbers.get("LOCAL_WORLD_SIZE") == numbers["WORLD_SIZE"]
    attempt = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)) if is_one_agent else 0
    return RankEnvironment(
        numbers["RANK"], numbers["WORLD_SIZE"], numbers.get("LOCAL_RANK"), numbers.get("LOCAL_WORLD_SIZE"),
        attempt=attempt,
    ), []  # fmt: skip


def torchrun_agent() -> str | None:
    """Names the torchrun agent that started this process, like no other one; None without torchrun, or off Linux.

    Its run id would not do: it is "none" unless somebody chose one, and may be used again.
    """
    agent = os.getppid()
    try:
        started = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]  # in clock ticks since boot
    except OSError:
        return None
    is_under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    return f"process {agent} on {socket.gethostname()} since {started}" if is_under_torchrun else None


def one_process_problems(environ: Mapping[str, str]) -> list[str]:
    """What is wrong with starting a run of one process several times over."""
    if "RANK" in environ and environ.get("WORLD_SIZE", "1") != "1":
        return [
            f"WORLD_SIZE={environ['WORLD_SIZE']} is set, so a launcher started several processes, but this run is "
            "a single one; use main_multi_gpu.py --multi-gpu ddp, or start it without the launcher"
        ]
    return []


def _set_names(environ: Mapping[str, str]) -> str:
    return ", ".join(name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environ)
