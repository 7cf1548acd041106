"""A command that torchrun restarts keeps the settings of the attempt before."""

import json
import os
import time

import pytest

from tests.conftest import WEIGHTED
from trainer.parallel.environment import torchrun_agent

TINY = ["--task", WEIGHTED, "--epochs", 1, "--num-train", 24, "--batch-size", 8, "--num-threads", 1, "--device", "cpu"]
ELSEWHERE = "process 7 on node-12.cluster"
AGENT = "TORCHELASTIC_RUN_ID"
DIES = """
from tests.helpers.weighted_task import Weighted

class Dies(Weighted):
    def on_epoch_start(self, objective, epoch, progress):
        1 / 0
"""


@pytest.fixture
def under_torchrun(monkeypatch):
    """Sets torchrun's variable, so that the parent process of the tests counts as its agent."""
    monkeypatch.setenv(AGENT, "none")


@pytest.fixture
def start(run_here, tmp_path):
    def run(*arguments, **options):
        return run_here(*TINY, "--save-dir", tmp_path / "run", *arguments, **options)

    return run


def rewrite_config(directory, **values):
    file = directory / "config.json"
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps(config))


def test_the_agent_has_a_name_only_under_torchrun(monkeypatch):
    assert torchrun_agent() is None
    monkeypatch.setenv(AGENT, "none")
    assert torchrun_agent().startswith(f"process {os.getppid()} on {os.uname().nodename} since ")


def test_fresh_applies_once_across_restarts(under_torchrun, start, tmp_path):
    start()
    rewrite_config(tmp_path / "run", torchrun_agents=["another"])
    out, _ = start("--fresh")
    assert "Starting over" in out
    out, _ = start("--fresh")
    assert "This run is finished" in out
    assert not (tmp_path / "run" / "previous-2").exists()


def test_fresh_without_torchrun_starts_over_each_time(start, tmp_path):
    for _ in range(3):
        start("--fresh")
    assert (tmp_path / "run" / "previous-2").exists()


def test_a_lock_left_by_a_lost_node_of_the_same_job_is_taken_over(under_torchrun, start, tmp_path):
    start()
    (tmp_path / "run" / "lock").write_text(f"{ELSEWHERE}\n")
    rewrite_config(tmp_path / "run", torchrun_agents=["lost", torchrun_agent()])
    start()
    assert (tmp_path / "run" / "lock").read_text() == ""


@pytest.mark.parametrize("agents", [[], ["another"], None, 7])
def test_a_lock_of_another_job_is_not_taken_over(agents, under_torchrun, start, tmp_path, monkeypatch):
    """The lock is still being renewed."""
    start()
    monkeypatch.setattr("trainer.checkpoint.lock._stamp", lambda path: time.monotonic())
    (tmp_path / "run" / "lock").write_text(f"{ELSEWHERE}\n")
    rewrite_config(tmp_path / "run", torchrun_agents=agents)
    _, err = start(status=2)
    assert f"in use by {ELSEWHERE}; wait until it ends" in err


@pytest.mark.parametrize("restarted", [True, False])
def test_the_global_batch_is_kept_before_there_is_a_checkpoint(restarted, under_torchrun, start, tmp_path):
    file = tmp_path / f"dies_{restarted}.py"  # another name for each case, because Python imports a module once
    file.write_text(DIES)
    start("--task", f"{file}:Dies", status=1)
    # An attempt on three devices would have written this global batch size.
    agents = [torchrun_agent()] if restarted else ["another"]
    rewrite_config(tmp_path / "run", global_batch_sizes=[24], torchrun_agents=agents)
    start()
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["global_batch_size"] == (24 if restarted else 8)
    assert results["step"] == (1 if restarted else 3)


def test_a_restarted_job_keeps_the_id_of_its_run(under_torchrun, start, tmp_path):
    """The command has --fresh, and the first attempt saved nothing."""
    file = tmp_path / "dies_again.py"
    file.write_text(DIES)
    start("--fresh", "--task", f"{file}:Dies", status=1)
    before = json.loads((tmp_path / "run" / "config.json").read_text())["run_id"]
    start("--fresh")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["run_id"] == before
