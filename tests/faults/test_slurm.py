"""Tests of examples/slurm.sh on a real SLURM cluster of one node, if SLURM is installed."""

import json
import re

import pytest

from tests.conftest import ROOT, WEIGHTED, assert_same_bits, load
from tests.faults.job import Forks
from tests.faults.samples import promised_step
from tests.faults.slurm_cluster import NUM_GPUS, OneNodeCluster, can_run
from tests.helpers.processes import free_port
from trainer.checkpoint.manifest import STATE

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not can_run(), reason="needs SLURM's daemons, and to be root")]

# The steps take a minute and a half, and mostly sleep.
WORK = ["--task", WEIGHTED, "--num-train", 200, "--global-batch-size", 8, "--epochs", 8, "--num-threads", 1,
        "--delay-s", 0.4, "--save-every-steps", 5, "--lr", 0.01, "--dropout", 0.1]  # fmt: skip
NUM_STEPS = 200


@pytest.fixture
def cluster(tmp_path, environment):
    variables = environment | {"CUDA_VISIBLE_DEVICES": "", "MASTER_PORT": str(free_port())}
    with OneNodeCluster(tmp_path / "slurm", variables) as cluster:
        yield cluster


class Submitted:
    """Job of examples/slurm.sh that is submitted to a cluster."""

    def __init__(self, cluster, folder) -> None:
        self._cluster = cluster
        self.directory = folder / "run"
        self._output = folder / "slurm" / "job.log"
        resources = [f"--gpus-per-node={NUM_GPUS}", "--cpus-per-task=1", "--time=30", f"--output={self._output}"]
        said = cluster.ask(
            "sbatch", *resources, f"--chdir={ROOT}", ROOT / "examples" / "slurm.sh", *WORK, "--save-dir", self.directory
        )
        self.id = said.split()[-1]

    @property
    def output(self):
        return self._output.read_text() if self._output.exists() else ""

    def told(self, name):
        """Returns a property of the job, such as its JobState."""
        found = re.search(rf"\b{name}=(\S+)", self._cluster.ask("scontrol", "show", "job", self.id))
        return found[1] if found else ""

    def change(self, *settings):
        self._cluster.ask("scontrol", "update", f"JobId={self.id}", *settings)

    def wait_for_step(self, step):
        self._cluster.wait_for(lambda: promised_step(self.directory) >= step, f"step {step}")

    def wait_for_state(self, state):
        self._cluster.wait_for(lambda: self.told("JobState") == state, state)

    def state(self):
        return json.loads((self.directory / STATE).read_text())["state"]


def assert_as_unbroken(directory, environment, folder):
    """Asserts that the run ends like an uninterrupted run in two forked processes."""
    quickly = [*WORK, "--delay-s", 0, "--save-dir", folder / "unbroken"]
    assert Forks(quickly, NUM_GPUS, folder / "forks", environment).statuses() == [0, 0]
    assert_same_bits(load(folder / "unbroken" / "final.pth"), load(directory / "final.pth"))


def test_a_job_at_its_time_limit_is_requeued_until_it_is_finished(cluster, environment, tmp_path):
    job = Submitted(cluster, tmp_path)
    job.wait_for_step(10)
    # Leaves two minutes, at which SLURM sends the signal that the script requests.
    minutes = int(job.told("RunTime").split(":")[1])
    job.change(f"TimeLimit={minutes + 2}")
    job.wait_for_state("PENDING")
    assert f"Time is up and everything is saved: queueing job {job.id} again." in job.output
    assert job.state() == "preempted" and 10 <= promised_step(job.directory) < NUM_STEPS
    job.change("TimeLimit=30", "StartTime=now")
    job.wait_for_state("COMPLETED")
    assert job.told("Restarts") == "1"
    assert "Resuming after optimizer step" in job.output
    assert job.state() == "finished"
    assert_as_unbroken(job.directory, environment, tmp_path)


def test_a_job_whose_node_fails_resumes_at_once(cluster, environment, tmp_path):
    job = Submitted(cluster, tmp_path)
    job.wait_for_step(10)
    (node,) = cluster.ask("sinfo", "--noheader", "--format=%n").split()
    cluster.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    cluster.wait_for(lambda: job.told("Restarts") == "1", "the job to be queued again")
    cluster.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
    # SLURM requeues after two minutes, because the node still runs and must end the job first.
    job.wait_for_state("COMPLETED")
    assert "Resuming after optimizer step" in job.output
    assert_as_unbroken(job.directory, environment, tmp_path)


def test_a_cancelled_job_saves(cluster, tmp_path):
    job = Submitted(cluster, tmp_path)
    job.wait_for_step(10)
    cluster.ask("scancel", job.id)
    job.wait_for_state("CANCELLED")
    cluster.wait_for(lambda: job.state() == "preempted", "the save")
    assert "queueing job" not in job.output
    assert (job.directory / "lock").read_text() == ""
