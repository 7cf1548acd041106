"""SLURM cluster of one node in a temporary folder, for tests of examples/slurm.sh.

    python -m tests.faults.slurm_cluster FOLDER COMMAND...

runs a command such as `sinfo` with the cluster, as root. On Debian, `apt-get install slurmctld slurmd slurm-client`
installs SLURM. The cluster does not authenticate users (no munge), so use it only on a machine without other users.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.helpers.processes import free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
NUM_GPUS = 2
"""Number of GPUs in SLURM's configuration. They do not exist, but the script starts one process per GPU."""
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=30
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def can_run() -> bool:
    return os.getuid() == 0 and all(shutil.which(program) for program in PROGRAMS)


class OneNodeCluster:
    """Context manager of a cluster, which SLURM's commands find by the environment `variables`."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self.variables = {**environment, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> "OneNodeCluster":
        for name in ("state", "spool"):
            (self._folder / name).mkdir(parents=True)
        (self._folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname(), controller_port=free_port(), node_port=free_port(), folder=self._folder,
                cpus=os.cpu_count(), gpus=NUM_GPUS,
            )
        )  # fmt: skip
        for number in range(NUM_GPUS):
            (self._folder / f"gpu{number}").touch()
        (self._folder / "gres.conf").write_text(f"Name=gpu File={self._folder}/gpu[0-{NUM_GPUS - 1}]\n")
        for daemon in ("slurmctld", "slurmd"):
            with (self._folder / f"{daemon}.log").open("w") as log:
                self._daemons.append(
                    subprocess.Popen(
                        [daemon, "-D"], env=self.variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                        start_new_session=True,
                    )
                )  # fmt: skip
        try:
            self.wait_for(lambda: "idle" in self.ask("sinfo", "--noheader", "--format=%t"), "an idle node")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.ask("scancel", "--user=root")
            self.wait_for(lambda: not self.ask("squeue", "--noheader"), "the end of all jobs")
        finally:
            self._end()

    def _end(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(30)

    def ask(self, *command: object) -> str:
        """Returns the standard output of a SLURM command."""
        return subprocess.run(
            list(map(str, command)), env=self.variables, capture_output=True, text=True, timeout=60
        ).stdout.strip()

    def wait_for(self, condition, what: str, timeout_s: float = 900) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited in vain for {what}:\n{self.logs()}")
            time.sleep(0.5)

    def logs(self) -> str:
        """Returns the logs of the daemons, and of jobs that write to this folder."""
        return "\n".join(path.read_text() for path in self._folder.glob("*.log"))


if __name__ == "__main__":
    with OneNodeCluster(Path(sys.argv[1]), os.environ) as cluster:
        sys.exit(subprocess.run(sys.argv[2:], env=cluster.variables).returncode)
