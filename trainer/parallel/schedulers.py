"""Ranks that srun or mpirun has given out, in the words of torchrun."""

import re
import zlib
from collections.abc import Mapping

RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
BY_HAND = (
    'bash -c \'export RANK={rank} WORLD_SIZE={world_size} LOCAL_RANK={local_rank} MASTER_ADDR="first host" '
    "MASTER_PORT=29500; exec python main_multi_gpu.py --multi-gpu ddp ...'"
)

Variables = Mapping[str, str]


def rank_variables(environ: Variables) -> tuple[dict[str, str], list[str]]:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of one of several processes of srun or mpirun.

    Empty for a process that is not one of several, or to which somebody has said its rank in these words. Beside them
    a sentence for the user where the launcher has not told enough. MASTER_ADDR and MASTER_PORT that are set go first.
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
        ("PMI_SIZE", _of_mpich, ("mpiexec", "$PMI_RANK", "$PMI_SIZE", "$MPI_LOCALRANKID")),
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
            f"{size}={environ[size]}: {launcher} has started several processes, but its variables do not tell "
            f"{', '.join(missing)}; use: {launcher} ... {by_hand}"
        ]
    return {}, []


def _of_srun(environ: Variables) -> dict[str, str]:
    """Its steps count from 0 within a job; the first task is on the first node."""
    found = {
        "RANK": environ.get("SLURM_PROCID", ""),
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", ""),
        "MASTER_ADDR": first_host(environ.get("SLURM_STEP_NODELIST", "")),
    }
    job = environ.get("SLURM_JOB_ID")
    return found | {"MASTER_PORT": _port(f"{job}.{environ.get('SLURM_STEP_ID')}") if job else ""}


def _of_mpich(environ: Variables) -> dict[str, str]:
    """Another number for each kind of it, and no place to meet."""
    return {}


def _of_open_mpi(environ: Variables) -> dict[str, str]:
    """It does not tell where the first process is, unless all are on one machine."""
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
    """Of a list in SLURM's short form: "node[03-07,9],other" is node03 and more."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


def _port(job: str) -> str:
    """From 20000 to 29999, the same for all processes of one start, and mostly another one for the next."""
    return str(20000 + zlib.crc32(job.encode()) % 10000)
