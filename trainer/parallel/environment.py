"""Reads a process's rank from the environment variables of torchrun, srun or mpirun."""

import math
import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.common.errors import shortened
from trainer.flags import MultiDeviceFlags

RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
BY_HAND = (
    'bash -c \'export RANK={rank} WORLD_SIZE={world_size} LOCAL_RANK={local_rank} MASTER_ADDR="first host" '
    "MASTER_PORT=29500; exec python main_multi_gpu.py --multi-gpu ddp ...'"
)
MOST = 10**6
"""Largest accepted value of a numeric environment variable."""
_NUMBER = re.compile("[0-9]{1,20}")
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


@dataclass(frozen=True)
class RankEnvironment:
    """Rank of this process, and rendezvous address of the run's processes.

    rank, world_size, local_rank, local_world_size: as defined by torchrun; the local values are None if unknown.
    init_method: URL for `init_process_group`.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    init_method: str = "env://"

    @property
    def is_self_launched(self) -> bool:
        """Returns whether `trainer.parallel.launch` started this process."""
        return self.init_method.startswith("file://")

    @property
    def tells_user(self) -> bool:
        """Returns whether this process prints errors that all processes raise.

        Launched ranks share a console, so only one rank per machine prints. A rank started by hand always prints.
        """
        return self.local_rank in (None, 0)

    @property
    def meeting_place(self) -> str:
        """Returns the address of the rendezvous, for messages."""
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return address if self.init_method == "env://" else self.init_method


def is_launched(environ: Mapping[str, str]) -> bool:
    """Returns whether a launcher or the user set environment variables that give this process a rank."""
    return any(name in environ for name in RANK_NAMES) or any(rank_variables(environ))


def read_rank_environment(
    environ: Mapping[str, str], flags: MultiDeviceFlags | None
) -> tuple[RankEnvironment | None, list[str]]:
    """Reads the environment variables of torchrun, torch.distributed.launch, srun, mpirun or a hand-written script.

    flags: multi-device flags, or None for a run of one process. Returns (environment or None, error messages).
    """
    if flags is None or (flags.form is not None and not flags.form.has_processes):
        return None, one_process_problems(environ)
    scheduled, names, missing = rank_variables(environ)
    if missing:
        return None, missing
    environ = {**environ, **scheduled}
    present = [name for name in RANK_NAMES if name in environ]
    if not present:
        unset = f"--local-rank {flags.local_rank}: RANK and WORLD_SIZE are not set; use torchrun"
        return None, [unset] if flags.local_rank is not None else []
    problems = [
        f"{name} is not set, unlike {', '.join(present)}; set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if not environ.get(name)
    ]
    texts = {name: environ[name] for name in NUMBERS if environ.get(name)}
    told = {name: f"{names.get(name, name)}={shortened(text)}" for name, text in texts.items()}
    told.setdefault("LOCAL_RANK", f"--local-rank {flags.local_rank}")
    numbers = {name: int(text) for name, text in texts.items() if _NUMBER.fullmatch(text)}
    problems += [
        f"{told[name]}: must be a whole number from 0 to {MOST}; correct this environment variable"
        for name in texts
        if name not in numbers or numbers[name] > MOST
    ]
    if flags.local_rank is not None and numbers.setdefault("LOCAL_RANK", flags.local_rank) != flags.local_rank:
        problems.append(f"--local-rank {flags.local_rank} contradicts {told['LOCAL_RANK']}; omit it")
    if flags.nproc is not None:
        problems.append(f"--nproc {flags.nproc}: a launcher has already set RANK and WORLD_SIZE; omit --nproc")
    problems += [
        f"{told[small]}: must be below {told[large]}; correct these environment variables"
        for small, large in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("LOCAL_RANK", "WORLD_SIZE"))
        if small in numbers and large in numbers and numbers[small] >= numbers[large]
    ]
    if numbers.get("LOCAL_WORLD_SIZE", 0) > numbers.get("WORLD_SIZE", math.inf):
        problems.append(f"{told['LOCAL_WORLD_SIZE']} must not exceed {told['WORLD_SIZE']}")
    if not 0 < numbers.get("MASTER_PORT", 1) < 65536:
        problems.append(f"MASTER_PORT={numbers['MASTER_PORT']}: must be from 1 to 65535; change this variable")
    if problems:
        return None, problems
    local = numbers.get("LOCAL_RANK"), numbers.get("LOCAL_WORLD_SIZE")
    meeting_place = "env://"
    if scheduled:
        address = environ["MASTER_ADDR"]
        meeting_place = f"tcp://{f'[{address}]' if ':' in address else address}:{environ['MASTER_PORT']}"
    return RankEnvironment(numbers["RANK"], numbers["WORLD_SIZE"], *local, meeting_place), []


def torchrun_agent() -> str | None:
    """Returns a unique name of the torchrun agent that started this process, or None without torchrun or Linux.

    torchrun's run id is not unique: the default is "none", and users may reuse an id.
    """
    agent = os.getppid()
    try:
        started = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]  # in clock ticks since boot
    except OSError:
        return None
    return f"process {agent} on {socket.gethostname()} since {started}" if is_under_torchrun() else None


def is_under_torchrun() -> bool:
    """Returns whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def one_process_problems(environ: Mapping[str, str]) -> list[str]:
    """Returns [error message] if a launcher started several processes for a single-process run; otherwise []."""
    if "RANK" in environ and environ.get("WORLD_SIZE", "1") != "1":
        return [
            f"WORLD_SIZE={environ['WORLD_SIZE']} is set, so a launcher started several processes, but this run uses "
            "one process; use main_multi_gpu.py --multi-gpu ddp, or start it without the launcher"
        ]
    return []


# --- srun and mpirun ---------------------------------------------------------------------------------------------


LAUNCHERS = {
    "srun": {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"},
    "mpirun": {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    "mpiexec": {"RANK": "PMI_RANK", "WORLD_SIZE": "PMI_SIZE", "LOCAL_RANK": "MPI_LOCALRANKID"},
}
"""Each launcher's name of RANK, WORLD_SIZE and so on. "mpiexec" is MPICH's."""


def rank_variables(environ: Mapping[str, str]) -> tuple[dict[str, str], Mapping[str, str], list[str]]:
    """Derives RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of srun or mpirun.

    Returns (variables by name, the launcher's names of them, error messages); all are empty for a single process, or
    if RANK, WORLD_SIZE or LOCAL_RANK is already set. Existing values of MASTER_ADDR and MASTER_PORT take precedence.
    """
    started = [(name, own) for name, own in LAUNCHERS.items() if environ.get(own["WORLD_SIZE"], "1") != "1"]
    if not started or any(name in environ for name in RANK_NAMES):
        return {}, {}, []
    launcher, names = started[0]
    found = {name: environ.get(own, "") for name, own in names.items()} | _meeting_place(environ, launcher)
    found |= {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if environ.get(name)}
    missing = [name for name in (*RANK_NAMES, "MASTER_ADDR", "MASTER_PORT") if not found.get(name)]
    if not missing:
        return found, names, []
    by_hand = BY_HAND.format(**{name.lower(): f"${names[name]}" for name in RANK_NAMES})
    size = f"{names['WORLD_SIZE']}={found['WORLD_SIZE']}"
    problem = f"{size}: {launcher} has started several processes, but its environment variables lack "
    return {}, {}, [f"{problem}{', '.join(missing)}; use: {launcher} ... {by_hand}"]


def _meeting_place(environ: Mapping[str, str], launcher: str) -> dict[str, str]:
    """Returns MASTER_ADDR, the host of rank 0, and MASTER_PORT, a hash of the job; "" for what is not known."""
    if launcher == "srun":
        address, job = first_host(environ.get("SLURM_STEP_NODELIST", "")), environ.get("SLURM_JOB_ID", "")
        step = f".{environ.get('SLURM_STEP_ID')}"
    else:  # MPI's variables include no address
        on_one_machine = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environ.get("OMPI_COMM_WORLD_SIZE", "")
        address, step = "127.0.0.1" if on_one_machine else "", ""
        job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    return {"MASTER_ADDR": address, "MASTER_PORT": _port(f"{job}{step}") if job else ""}


def first_host(nodes: str) -> str:
    """Returns the first host of a SLURM node list: "rack[1-2]node[03-07,9],other" -> "rack1node03"."""
    first = re.match(r"(\[[^\]]*\]|[^\[,])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else ""


def _port(job: str) -> str:
    """Hashes a job's name to a port from 20000 to 29999, so that two jobs rarely use the same port."""
    return str(20000 + zlib.crc32(job.encode()) % 10000)
