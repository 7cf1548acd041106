"""What the rank variables may say, and the message about each that contradicts itself or the command line."""

import pytest

from tests.conftest import TINY, contents
from trainer.flags import MultiDeviceFlags
from trainer.parallel.environment import RankEnvironment, one_process_problems, read_rank_environment

GOOD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def ddp(**flags):
    return MultiDeviceFlags(multi_gpu="ddp", **flags)


def test_processes_of_a_launcher_must_be_one_run():
    assert "leave it out" in read_rank_environment(GOOD, ddp(nproc=2))[1][0]
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
        ({"RANK": "2"}, None, "RANK=2 must be below WORLD_SIZE=2"),
        ({"RANK": "one"}, None, "RANK=one"),
        ({"WORLD_SIZE": ""}, None, "WORLD_SIZE is not set"),
        ({"MASTER_PORT": ""}, None, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "70000"}, None, "MASTER_PORT=70000"),
        ({"LOCAL_RANK": "0"}, 1, "--local-rank 1 contradicts LOCAL_RANK=0"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, None, "LOCAL_RANK=1 must be below LOCAL_WORLD_SIZE=1"),
        ({"LOCAL_WORLD_SIZE": "3"}, None, "LOCAL_WORLD_SIZE=3 must not exceed WORLD_SIZE=2"),
    ],
)
def test_contradicting_rank_variables_are_named(changes, local_rank, message):
    environment, problems = read_rank_environment(GOOD | changes, ddp(local_rank=local_rank))
    assert environment is None
    assert any(message in problem for problem in problems), problems


# --- as a command line -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1", ["RANK=2 must be below WORLD_SIZE=2"]),
        ("RANK=0 WORLD_SIZE=two MASTER_ADDR=127.0.0.1 MASTER_PORT=1", ["WORLD_SIZE=two"]),
        (
            "RANK=0",
            ["WORLD_SIZE is not set", "MASTER_ADDR is not set", "MASTER_PORT is not set"],
        ),
    ],
)
def test_rank_variables_that_contradict_themselves(variables, parts, refused, tmp_path, monkeypatch):
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    refused(parts, *TINY, "--multi-gpu", "ddp", "--save-dir", tmp_path / "run", several_devices=True)
    assert not contents(tmp_path)


def test_launcher_of_several_processes_for_a_run_of_one(refused, tmp_path, monkeypatch):
    """`torchrun --nproc_per_node=2 main.py`"""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    refused(["WORLD_SIZE=2 is set"], *TINY, "--save-dir", tmp_path / "run")
    refused(["WORLD_SIZE=2 is set"], *TINY, "--multi-gpu", "dp", "--save-dir", tmp_path / "run", several_devices=True)
    assert not contents(tmp_path)


def test_launcher_of_several_runs(refused, tmp_path, monkeypatch):
    """`torchrun main_multi_gpu.py --seeds 2`"""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    args = [*TINY, "--multi-gpu", "ddp", "--seeds", 2, "--save-dir", tmp_path / "run"]
    refused(["--seeds 2: starts its runs by itself; leave the launcher out"], *args, several_devices=True)
    assert not contents(tmp_path)


def test_nobody_else_comes(refused, tmp_path, monkeypatch):
    """Nothing listens on port 1."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    args = [*TINY, "--multi-gpu", "ddp", "--device", "cpu", "--dist-timeout-s", 1, "--save-dir", tmp_path / "run"]
    refused(
        ["rank 1 of 2 could not meet the others at 127.0.0.1:1 within --dist-timeout-s 1"], *args, several_devices=True
    )
    assert not contents(tmp_path)
