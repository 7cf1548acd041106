"""torchrun restarts a run after a rank is killed, and when the number of nodes changes.

The nodes are torchrun agents on the loopback interface, with one worker each.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch.distributed.run

from tests.conftest import ROOT, load
from tests.faults.lives import DOUBLE, HARD, Life, Recipe, assert_as_unbroken, rescued_steps
from tests.faults.samples import Part, global_batches, promised_step, whole_lines
from tests.helpers.processes import free_port
from trainer.checkpoint.manifest import STATE

# Limits how long an agent waits for more nodes, and for the heartbeats of the others.
IMPATIENT = "--rdzv_conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
REFUSES = """
from trainer.common.errors import UserError
from tests.helpers.weighted_task import Weighted

class Refuses(Weighted):
    def on_epoch_start(self, objective, epoch, progress):
        if epoch == 1:
            raise UserError("the data ran away")
"""
# Without this variable, torch 2.13 cannot change the number of nodes.
CHANGES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

# On Linux, a user can give a process and its children another host name.
ON_ANOTHER_HOST = ["unshare", "--user", "--map-root-user", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']


def can_rename_hosts() -> bool:
    return shutil.which("unshare") is not None and not subprocess.run([*ON_ANOTHER_HOST, "x", "true"]).returncode


class Job:
    """Command line under torchrun on one or several nodes, which are all on this machine."""

    def __init__(self, folder: Path, environment: dict[str, str], recipe: Recipe, *arguments, **variables) -> None:
        self.recipe = recipe
        self.directory = folder / "run"
        self.records = folder / "records"
        self.records.mkdir()
        self._mark = f"LOCKSTEP_RECORD={self.records}"
        self._variables = environment | variables | {"LOCKSTEP_RECORD": str(self.records), "CUDA_VISIBLE_DEVICES": ""}
        self._variables["GLOO_SOCKET_IFNAME"] = "lo"
        arguments = (*recipe.argv, "--save-dir", self.directory, *arguments)
        self._arguments = ["main_multi_gpu.py", "--multi-gpu", "ddp", *arguments]
        self._outputs: list[Path] = []
        self.nodes: list[subprocess.Popen] = []

    def start_node(self, *options, host_name: str | None = None) -> subprocess.Popen:
        """Starts an agent in the background. host_name: host name that the agent and its workers see."""
        self._outputs.append(self.records.parent / f"node{len(self.nodes)}.txt")
        command = [sys.executable, "-m", "torch.distributed.run", *options, *self._arguments]
        if host_name is not None:
            command = [*ON_ANOTHER_HOST, host_name, *command]
        with self._outputs[-1].open("w") as output:
            node = subprocess.Popen(
                [str(part) for part in command], cwd=ROOT, env=self._variables, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.nodes.append(node)
        return node

    @property
    def output(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in self._outputs)

    def processes(self) -> dict[int, dict[str, str]]:
        """Returns the environment of every live process of this job, by process id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # the process has just ended, or belongs to another user
                continue
            if self._mark in variables:
                found[int(folder.name)] = dict(variable.partition("=")[::2] for variable in variables)
        return found

    def workers(self) -> dict[int, tuple[int, int]]:
        """Returns (process id, parent's process id) of each training process, by rank."""
        found = {}
        for pid, variables in self.processes().items():
            try:
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if "RANK" in variables and parent in [node.pid for node in self.nodes]:
                found[int(variables["RANK"])] = pid, parent
        return found

    def wait_for(self, condition, what: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"no {what}\n{self.output}"
            assert self.nodes[0].poll() is None, f"ended before {what}\n{self.output}"
            time.sleep(0.02)

    def has_trained(self, world_size: int, num_forwards: int):
        """Returns a condition: in the latest attempt, all ranks have run more than `num_forwards` forward passes."""

        def condition() -> bool:
            attempts = self.attempts()
            files = attempts[-1] if attempts else []
            return len(files) == world_size and all(len(whole_lines(file)) > num_forwards for file in files)

        return condition

    def kill_node(self, node: subprocess.Popen) -> None:
        """Kills an agent and its workers at once, as a power loss would."""
        pids = [node.pid, *(pid for pid, parent in self.workers().values() if parent == node.pid)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        node.wait()

    def finish(self, *lost: subprocess.Popen, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        for node in self.nodes:
            if node not in lost:
                try:
                    node.wait(deadline - time.monotonic())
                except subprocess.TimeoutExpired:
                    pytest.fail(f"does not end\n{self.output}")
                assert node.returncode == 0, self.output

    def attempts(self) -> list[list[Path]]:
        """Returns the files of each attempt's ranks, which ran at the same time."""
        lived = []
        for file in self.records.glob("*.jsonl"):
            lines = whole_lines(file)
            if lines:
                lived.append((json.loads(lines[0])["time"], json.loads(lines[-1])["time"], file))
        attempts: list[list[Path]] = []
        ends = 0.0
        for first, last, file in sorted(lived):
            if first > ends:
                attempts.append([])
            attempts[-1].append(file)
            ends = max(ends, last)
        return attempts

    def assert_as_unbroken(self, unbroken: Life, same_bits: bool) -> None:
        life = Life(self.directory, self.recipe, self._parts(unbroken), rescued=rescued_steps(self.output))
        assert_as_unbroken(life, unbroken, same_bits)

    def _parts(self, unbroken: Life) -> list[Part]:
        """Returns a part for each attempt that completed a step."""
        found = []
        for number, files in enumerate(self.attempts()):
            folder = self.records / f"attempt{number}"
            folder.mkdir()
            for file in files:
                (folder / file.name).symlink_to(file)
            batches = global_batches(folder, len(files), self.recipe.global_batch_size, self.recipe.num_samples)
            if batches:
                found.append(Part(unbroken.batches.index(batches[0]), batches))
        return found

    def end(self) -> None:
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for node in self.nodes:
            node.wait()


@pytest.fixture
def job(tmp_path, environment):
    """Returns a function that creates a job; kills its processes after the test."""
    made: list[Job] = []

    def make(recipe, *arguments, **variables) -> Job:
        made.append(Job(tmp_path, environment, recipe, *arguments, **variables))
        return made[-1]

    yield make
    for each in made:
        each.end()


def state_of(directory: Path) -> str:
    return json.loads((directory / STATE).read_text())["state"]


# --- one node ----------------------------------------------------------------------------------------------------


def assert_killed_and_back(run: Job, killed: int, unbroken: Life, world_size: int) -> None:
    """Asserts that a job with a killed rank ends with the same bits as an uninterrupted run."""
    run.start_node("--standalone", f"--nproc_per_node={world_size}", "--max-restarts=3")
    run.wait_for(run.has_trained(world_size, 20), "progress")
    os.kill(run.workers()[killed][0], signal.SIGKILL)
    run.finish()
    assert len(run.attempts()) == 2
    run.assert_as_unbroken(unbroken, same_bits=True)
    assert state_of(run.directory) == "finished"
    assert not (run.directory / "previous-1").exists()


@pytest.mark.slow
def test_a_killed_process_is_restarted(job, unbroken):
    """The run resumes although its command line contains `--fresh`."""
    assert_killed_and_back(job(HARD, "--delay-s", 0.005, "--fresh"), 0, unbroken(HARD, 1), 1)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_restarts_the_run(killed, job, unbroken):
    assert_killed_and_back(job(HARD, "--delay-s", 0.02, "--fresh"), killed, unbroken(HARD, 2), 2)


@pytest.mark.slow
def test_repeating_a_refused_command_changes_nothing(job, tmp_path):
    """torchrun repeats the command, because it cannot tell a refusal from a crash."""
    task = tmp_path / "refuses.py"
    task.write_text(REFUSES)
    run = job(HARD, "--task", f"{task}:Refuses")
    node = run.start_node("--standalone", "--nproc_per_node=2", "--max-restarts=2")
    assert node.wait(120) == 1
    assert run.output.count("error: the data ran away") == 3
    # torch prefixes a rank's traceback with "[rank1]: ", and its warnings of a lost store with "[rank1]:[W".
    assert "[rank0]: " not in run.output and "[rank1]: " not in run.output
    state = json.loads((run.directory / STATE).read_text())
    assert (state["state"], state["message"]) == ("refused", "the data ran away")
    steps_per_epoch = HARD.num_steps // HARD.epochs
    assert (state["epoch"], promised_step(run.directory)) == (1, steps_per_epoch)
    assert load(run.directory / "last.pth")["step"] == steps_per_epoch


ALL_SIGNALS = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "options"), [(signal.SIGTERM, []), (signal.SIGUSR1, ALL_SIGNALS)])
def test_a_signal_to_torchrun_saves(number, options, job, unbroken):
    if options and "--signals-to-handle" not in torch.distributed.run.get_args_parser().format_help():
        pytest.skip("this torchrun cannot be told which signals to pass on")
    run = job(HARD, "--delay-s", 0.02)
    node = run.start_node("--standalone", "--nproc_per_node=2", *options)
    run.wait_for(run.has_trained(2, 20), "progress", timeout_s=180)
    node.send_signal(number)
    assert node.wait(180) != 0
    assert state_of(run.directory) == "preempted"
    run.start_node("--standalone", "--nproc_per_node=2")
    run.finish(node, timeout_s=300)
    run.assert_as_unbroken(unbroken(HARD, 2), same_bits=True)


@pytest.mark.slow
def test_ranks_finish_after_an_unhandled_signal_ends_torchrun(job, unbroken):
    run = job(HARD, "--delay-s", 0.02)
    node = run.start_node("--standalone", "--nproc_per_node=2")
    run.wait_for(run.has_trained(2, 20), "progress", timeout_s=180)
    workers = [pid for pid, _ in run.workers().values()]
    node.send_signal(signal.SIGUSR1)
    assert node.wait(180) == -signal.SIGUSR1
    deadline = time.monotonic() + 120
    while any(pid in run.processes() for pid in workers):
        assert time.monotonic() < deadline, run.output
        time.sleep(0.2)
    assert state_of(run.directory) == "finished"
    run.assert_as_unbroken(unbroken(HARD, 2), same_bits=True)


# --- several nodes -----------------------------------------------------------------------------------------------


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start_nodes(run: Job, addresses, *options, minimum=1, maximum=2, port=None, host_names=(None, None)) -> None:
    """Starts nodes. The first node hosts the rendezvous, and the node with the lowest address becomes rank 0."""
    port = port or free_port()
    for address, host_name in zip(addresses, host_names, strict=False):
        run.start_node(
            f"--nnodes={minimum}:{maximum}", "--nproc_per_node=1", "--max-restarts=3", "--rdzv_backend=c10d",
            f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=elastic", f"--local_addr={address}", IMPATIENT,
            *options, host_name=host_name,
        )  # fmt: skip
        if address == addresses[0]:
            run.wait_for(lambda: is_listening(port), "rendezvous")


@pytest.mark.parametrize("rendezvous", ["static", pytest.param("c10d", marks=pytest.mark.slow)])
def test_all_nodes_start_their_ranks_again_after_one_is_killed(rendezvous, unbroken, job):
    """The agents keep their store, which contains the addresses of the killed ranks."""
    run = job(HARD, "--delay-s", 0.02)
    if rendezvous == "static":
        options = "--nnodes=2", "--max-restarts=2", "--master_addr=127.0.0.1", f"--master_port={free_port()}"
        for node in range(2):
            run.start_node(*options, f"--node_rank={node}", "--nproc_per_node=1")
    else:
        start_nodes(run, ["127.0.0.2", "127.0.0.3"], minimum=2)

    def has_trained_in(attempt):
        return len(run.attempts()) == attempt and run.has_trained(2, 10)()

    for attempt, killed in enumerate([1, 0], 1):
        run.wait_for(partial(has_trained_in, attempt), "progress")
        os.kill(run.workers()[killed][0], signal.SIGKILL)
    run.finish()
    assert len(run.attempts()) == 3
    run.assert_as_unbroken(unbroken(HARD, 2), same_bits=True)
    assert state_of(run.directory) == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_the_other_nodes_continue_after_a_node_is_lost(lost, unbroken, job):
    run = job(DOUBLE, "--delay-s", 0.02, **CHANGES)
    hosts = ("here", "there") if can_rename_hosts() else (None, None)
    start_nodes(run, ["127.0.0.2", "127.0.0.1" if lost == 0 else "127.0.0.3"], host_names=hosts)
    run.wait_for(run.has_trained(2, 20), "progress")
    assert run.workers()[lost][1] == run.nodes[1].pid
    run.kill_node(run.nodes[1])
    run.finish(run.nodes[1])
    assert [len(files) for files in run.attempts()][-2:] == [2, 1]  # a slow second node joins later
    run.assert_as_unbroken(unbroken(DOUBLE, 1), same_bits=False)
    results = json.loads((run.directory / "results.json").read_text())
    assert (results["world_size"], results["global_batch_size"]) == (1, 12)
    assert state_of(run.directory) == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_may_join_later(rank, unbroken, job):
    run = job(DOUBLE, "--delay-s", 0.04, "--fresh", **CHANGES)
    port = free_port()
    start_nodes(run, ["127.0.0.2"], port=port)
    run.wait_for(run.has_trained(1, 10), "progress")
    start_nodes(run, ["127.0.0.1" if rank == 0 else "127.0.0.3"], port=port)
    run.wait_for(run.has_trained(2, 4), "two nodes")
    assert run.workers()[rank][1] == run.nodes[1].pid
    run.finish()
    assert [len(files) for files in run.attempts()] == [1, 2]
    run.assert_as_unbroken(unbroken(DOUBLE, 1), same_bits=False)
    results = json.loads((run.directory / "results.json").read_text())
    assert (results["world_size"], results["global_batch_size"]) == (2, 12)
    assert state_of(run.directory) == "finished"
    assert not (run.directory / "previous-1").exists()


@pytest.mark.slow
def test_a_third_node_joins_and_another_is_lost(unbroken, job):
    """The worker of one agent saves and exits before its agent asks it to, which must not count as the end of the job.

    This happens when the other agent sees the third node first. A long monitor interval makes it certain.
    """
    run = job(DOUBLE, "--delay-s", 0.06, **CHANGES)
    port = free_port()
    start_nodes(run, ["127.0.0.2", "127.0.0.3"], "--monitor-interval=2", maximum=3, port=port)
    run.wait_for(run.has_trained(2, 10), "progress")
    start_nodes(run, ["127.0.0.1"], "--monitor-interval=2", maximum=3, port=port)
    run.wait_for(run.has_trained(3, 4), "three nodes")
    run.kill_node(run.nodes[2])
    run.finish(run.nodes[2])
    worlds = [len(files) for files in run.attempts()]
    assert worlds[-3:] == [2, 3, 2]
    run.assert_as_unbroken(unbroken(DOUBLE, 1), same_bits=False)
    assert state_of(run.directory) == "finished"
