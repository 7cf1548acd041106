"""The variables of torchrun, srun and mpirun are read, and contradictions among them are refused."""

import json
import socket
import subprocess
import sys

import pytest

from tests.conftest import ROOT, TINY, contents
from tests.helpers.processes import free_port
from trainer.flags import MultiDeviceFlags
from trainer.parallel.environment import (
    RankEnvironment,
    first_host,
    is_launched,
    one_process_problems,
    read_rank_environment,
)

GOOD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
# SLURM 22.05 and Open MPI 4 set these variables for two tasks on one node.
SRUN = {
    "SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2",
    "SLURM_STEP_NODELIST": "localhost", "SLURM_PROCID": "{rank}", "SLURM_LOCALID": "{rank}",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "3029401601",
}  # fmt: skip
# SLURM sets these variables in the batch script itself, a single process that starts the others.
BATCH = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def ddp(**flags):
    return MultiDeviceFlags(multi_gpu="ddp", **flags)


def test_several_processes_of_a_launcher_need_ddp_without_nproc():
    assert "omit --nproc" in read_rank_environment(GOOD, ddp(nproc=2))[1][0]
    assert (
        "use main_multi_gpu.py --multi-gpu ddp" in read_rank_environment(GOOD, MultiDeviceFlags(multi_gpu="dp"))[1][0]
    )
    assert one_process_problems({}) == one_process_problems(GOOD | {"WORLD_SIZE": "1"}) == []
    assert "use main_multi_gpu.py --multi-gpu ddp" in one_process_problems(GOOD)[0]


def test_rank_variables_are_read():
    assert read_rank_environment({}, ddp()) == (None, [])
    assert read_rank_environment(GOOD, ddp()) == (RankEnvironment(1, 2), [])
    local = GOOD | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read_rank_environment(local, ddp()) == (RankEnvironment(1, 2, 1, 2), [])
    assert read_rank_environment(GOOD, ddp(local_rank=1)) == (RankEnvironment(1, 2, 1), [])


@pytest.mark.parametrize(
    ("changes", "local_rank", "message"),
    [
        ({"RANK": "2"}, None, "RANK=2: must be below WORLD_SIZE=2"),
        ({"RANK": "one"}, None, "RANK=one"),
        ({"WORLD_SIZE": ""}, None, "WORLD_SIZE is not set"),
        ({"MASTER_PORT": ""}, None, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "70000"}, None, "MASTER_PORT=70000"),
        ({"LOCAL_RANK": "0"}, 1, "--local-rank 1 contradicts LOCAL_RANK=0"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, None, "LOCAL_RANK=1: must be below LOCAL_WORLD_SIZE=1"),
        ({"LOCAL_WORLD_SIZE": "3"}, None, "LOCAL_WORLD_SIZE=3 must not exceed WORLD_SIZE=2"),
    ],
)
def test_contradicting_rank_variables_are_named(changes, local_rank, message):
    environment, problems = read_rank_environment(GOOD | changes, ddp(local_rank=local_rank))
    assert environment is None
    assert any(message in problem for problem in problems), problems


# --- as a command line -------------------------------------------------------------------------------------------


def test_a_launcher_of_several_processes_is_refused_for_one_process(refused, tmp_path, monkeypatch):
    """`torchrun --nproc_per_node=2 main.py` sets these variables."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    refused(["WORLD_SIZE=2 is set"], *TINY, "--save-dir", tmp_path / "run")
    refused(["WORLD_SIZE=2 is set"], *TINY, "--multi-gpu", "dp", "--save-dir", tmp_path / "run", several_devices=True)
    assert not contents(tmp_path)


def test_a_launcher_is_refused_for_several_runs(refused, tmp_path, monkeypatch):
    """`torchrun main_multi_gpu.py --seeds 2` sets these variables."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    args = [*TINY, "--multi-gpu", "ddp", "--seeds", 2, "--save-dir", tmp_path / "run"]
    refused(["--seeds 2: starts its own processes; run it without torchrun or srun"], *args, several_devices=True)
    assert not contents(tmp_path)


def test_a_rank_that_cannot_join_the_others_fails(cli, tmp_path, monkeypatch):
    """Nothing listens on port 1. The status is not 2, because the same command may succeed later."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    args = [*TINY, "--multi-gpu", "ddp", "--device", "cpu", "--dist-timeout-s", 1, "--save-dir", tmp_path / "run"]
    told = "rank 1 of 2 could not join the other ranks at 127.0.0.1:1 within --dist-timeout-s 1"
    status, _, errors = cli(*args, several_devices=True)
    assert status == 1 and len(errors) == 1 and told in errors[0]
    assert not contents(tmp_path)


def test_an_unknown_master_addr_is_named_once_while_its_rank_waits(cli, tmp_path, monkeypatch):
    """The domain "invalid" has no names."""
    for name, value in (GOOD | {"MASTER_ADDR": "host.invalid"}).items():
        monkeypatch.setenv(name, value)
    args = [*TINY, "--multi-gpu", "ddp", "--device", "cpu", "--dist-timeout-s", 1, "--save-dir", tmp_path / "run"]
    status, _, (waits, error) = cli(*args, several_devices=True)
    assert status == 1 and waits.startswith("MASTER_ADDR=host.invalid: no address is known for this name yet; waiting")
    assert "within --dist-timeout-s 1" in error and error.endswith("this name; correct this environment variable")


def test_a_message_of_one_of_several_machines_names_the_machine(refused, tmp_path, monkeypatch):
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    args = ["--multi-gpu", "ddp", "--task", "seqrec", "--data-dir", tmp_path / "none", "--save-dir", tmp_path / "run"]
    told = f"rank 1 on {socket.gethostname()}: --data-dir {tmp_path / 'none'}: no such file or folder"
    refused([told], *args, several_devices=True)


# --- srun and mpirun ---------------------------------------------------------------------------------------------


def of_rank(variables, rank):
    return {name: value.format(rank=rank) for name, value in variables.items()}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("vm", "vm"), ("a1,a2", "a1"), ("node[03-07,9],other", "node03"), ("n[1,4]-ib,x", "n1-ib"), ("", ""),
        ("rack[1-2]node[3-4]", "rack1node3"), ("tux[0-3]-[0-3],vm", "tux0-0"), ("a-1,b[2-3]", "a-1"),
    ],
)  # fmt: skip
def test_the_first_of_a_list_of_nodes_is_found(nodes, first):
    assert first_host(nodes) == first


def test_a_step_of_several_nodes_meets_on_the_first():
    variables = of_rank(SRUN, 1) | {"SLURM_STEP_NODELIST": "node[03-04]", "SLURM_LOCALID": "0"}
    environment, problems = read_rank_environment(variables, ddp())
    assert not problems
    assert (environment.rank, environment.world_size, environment.local_rank) == (1, 2, 0)
    assert environment.init_method.startswith("tcp://node03:2")
    assert not environment.is_self_launched
    given = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert read_rank_environment(variables | given, ddp())[0].init_method == "tcp://10.0.0.1:29500"
    assert read_rank_environment(variables | {"MASTER_ADDR": "::1"}, ddp())[0].init_method.startswith("tcp://[::1]:2")
    another = read_rank_environment(variables | {"SLURM_STEP_ID": "1"}, ddp())[0]
    assert another.init_method != environment.init_method


@pytest.mark.parametrize("variables", [{}, BATCH, of_rank(SRUN, 0) | {"SLURM_STEP_NUM_TASKS": "1"}])
def test_a_process_without_a_launcher_starts_its_own_processes(variables):
    assert read_rank_environment(variables, ddp()) == (None, [])
    assert not is_launched(variables)


def test_variables_of_torchrun_take_precedence():
    own = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    assert read_rank_environment(of_rank(SRUN, 0) | own, ddp()) == (RankEnvironment(1, 2), [])


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        (
            {name: value for name, value in SRUN.items() if name != "SLURM_STEP_NODELIST"},
            ["SLURM_STEP_NUM_TASKS=2: srun has started", "lack MASTER_ADDR; use: srun ", "RANK=$SLURM_PROCID"],
        ),
        (
            MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            ["OMPI_COMM_WORLD_SIZE=2: mpirun has started", "lack MASTER_ADDR; use: mpirun "],
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ["PMI_SIZE=2: mpiexec has started", "RANK=$PMI_RANK"]),
        (SRUN | {"SLURM_PROCID": "7"}, ["SLURM_PROCID=7: must be below SLURM_STEP_NUM_TASKS=2; correct"]),
        (MPIRUN | {"OMPI_COMM_WORLD_RANK": "abc"}, ["OMPI_COMM_WORLD_RANK=abc: must be a whole number"]),
    ],
)
def test_incomplete_launcher_variables_are_refused(variables, parts, refused, tmp_path, monkeypatch):
    for name, value in of_rank(variables, 0).items():
        monkeypatch.setenv(name, value)
    (message,) = read_rank_environment(of_rank(variables, 0), ddp())[1]
    assert all(part in message for part in parts), message
    refused(parts[:1], *TINY, "--multi-gpu", "ddp", "--save-dir", tmp_path / "run", several_devices=True)
    assert not contents(tmp_path)


@pytest.mark.parametrize("variables", [SRUN, pytest.param(MPIRUN, marks=pytest.mark.slow)], ids=["srun", "mpirun"])
def test_processes_of_srun_and_mpirun_train_together(variables, tmp_path, environment):
    arguments = [*TINY, "--multi-gpu", "ddp", "--device", "cpu", "--save-dir", tmp_path / "run"]
    port = str(free_port())  # another process may listen on the port that follows from the job's id
    processes = [
        subprocess.Popen(
            [sys.executable, "main_multi_gpu.py", *map(str, arguments)],
            cwd=ROOT,
            env=environment | of_rank(variables, rank) | {"MASTER_PORT": port},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert json.loads((tmp_path / "run" / "results.json").read_text())["world_size"] == 2
