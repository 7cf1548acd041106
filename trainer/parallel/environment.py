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
    scheduled, missing = rank_variables(environ)
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
    numbers = {name: int(text) for name, text in texts.items() if _NUMBER.fullmatch(text)}
    problems += [
        f"{name}={shortened(texts[name])}: must be a whole number from 0 to {MOST}; correct this environment variable"
        for name in texts
        if name not in numbers or numbers[name] > MOST
    ]
    if flags.local_rank is not None and numbers.setdefault("LOCAL_RANK", flags.local_rank) != flags.local_rank:
        problems.append(f"--local-rank {flags.local_rank} contradicts LOCAL_RANK={numbers['LOCAL_RANK']}; omit it")
    if flags.nproc is not None:
        problems.append(f"--nproc {flags.nproc}: a launcher has already set RANK and WORLD_SIZE; omit --nproc")
    problems += [
        f"{small}={numbers[small]}: must be below {large}={numbers[large]}; correct these environment variables"
        for small, large in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("LOCAL_RANK", "WORLD_SIZE"))
        if small in numbers and large in numbers and numbers[small] >= numbers[large]
    ]
    if numbers.get("LOCAL_WORLD_SIZE", 0) > numbers.get("WORLD_SIZE", math.inf):
        problems.append("LOCAL_WORLD_SIZE={LOCAL_WORLD_SIZE} must not exceed WORLD_SIZE={WORLD_SIZE}".format(**numbers))
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


def rank_variables(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Derives RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of srun or mpirun.

    Returns (variables by name, error messages); both are empty for a single process, or if RANK, WORLD_SIZE or
    LOCAL_RANK is already set. Existing values of MASTER_ADDR and MASTER_PORT take precedence.
    """
    if any(name in environ for name in RANK_NAMES):
        return {}, []
    for size, read, line in (
        ("SLURM_STEP_NUM_TASKS", _of_srun, ("srun", "$SLURM_PROCID", "$SLURM_NTASKS", "$SLURM_LOCALID")),
        (
            "OMPI_COMM_WORLD_SIZE",
            _of_open_mpi,
            ("mpirun", "$OMPI_COMM_WORLD_RANK", "$OMPI_COMM_WORLD_SIZE", "$OMPI_COMM_WORLD_LOCAL_RANK"),
        ),
        # MPICH's variables depend on its launcher, and do not include an address.
        ("PMI_SIZE", lambda _: {}, ("mpiexec", "$PMI_RANK", "$PMI_SIZE", "$MPI_LOCALRANKID")),
    ):
        if environ.get(size, "1") == "1":
            continue
        found = read(environ) | {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if environ.get(name)}
        missing = [name for name in (*RANK_NAMES, "MASTER_ADDR", "MASTER_PORT") if not found.get(name)]
        if not missing:
            return found, []
        launcher, *names = line
        by_hand = BY_HAND.format(**dict(zip(("rank", "world_size", "local_rank"), names, strict=True)))
        return {}, [
            f"{size}={environ[size]}: {launcher} has started several processes, but its environment variables lack "
            f"{', '.join(missing)}; use: {launcher} ... {by_hand}"
        ]
    return {}, []


def _of_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """Reads srun's variables. MASTER_ADDR is the first node, where rank 0 runs; the port is a hash of job and step."""
    found = {
        "RANK": environ.get("SLURM_PROCID", ""),
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", ""),
        "MASTER_ADDR": first_host(environ.get("SLURM_STEP_NODELIST", "")),
    }
    job = environ.get("SLURM_JOB_ID")
    return found | {"MASTER_PORT": _port(f"{job}.{environ.get('SLURM_STEP_ID')}") if job else ""}


def _of_open_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    """Reads Open MPI's variables, which include no address; on a single machine, MASTER_ADDR is 127.0.0.1."""
    found = {
        "RANK": environ.get("OMPI_COMM_WORLD_RANK", ""),
        "WORLD_SIZE": environ["OMPI_COMM_WORLD_SIZE"],
        "LOCAL_RANK": environ.get("OMPI_COMM_WORLD_LOCAL_RANK", ""),
        "LOCAL_WORLD_SIZE": environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", ""),
    }
    on_one_machine = found["LOCAL_WORLD_SIZE"] == found["WORLD_SIZE"]
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    address = {"MASTER_ADDR": "127.0.0.1" if on_one_machine else "", "MASTER_PORT": _port(job) if job else ""}
    return {name: value for name, value in (found | address).items() if value}


def first_host(nodes: str) -> str:
    """Returns the first host of a SLURM node list: "rack[1-2]node[03-07,9],other" -> "rack1node03"."""
    first = re.match(r"(\[[^\]]*\]|[^\[,])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else ""


def _port(job: str) -> str:
    """Hashes a job's name to a port from 20000 to 29999, so that two jobs rarely use the same port."""
    return str(20000 + zlib.crc32(job.encode()) % 10000)
