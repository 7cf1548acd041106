"""profiler.py step attributes time to the phase in which it passes."""

import json
import time

import pytest

from profiler import main as profile
from tests.helpers.small_catalogue import write_catalogue
from tests.profiling.conftest import SHORT, SLEEPY, TINY, TORCHRUN
from trainer.profiling.phase_clock import BACKWARD, DATA, FORWARD, PHASES


@pytest.fixture(scope="module")
def slept(tmp_path_factory):
    """Measures a step whose parts sleep for 20, 40 and 60 ms, by the command line in this process."""
    folder = tmp_path_factory.mktemp("step")
    rests = ["--data-s", "0.02", "--delay-s", "0.04", "--backward-s", "0.06"]
    arguments = ["--task", SLEEPY, *TINY[2:], *rests, "--json", folder / "step.json", "--trace", folder / "trace"]
    started = time.perf_counter()
    save_dir = folder / "run"
    assert profile(["step", *map(str, arguments), *SHORT, "--save-dir", str(save_dir)]) == 0
    return {
        "result": json.loads((folder / "step.json").read_text()),
        "traces": list((folder / "trace").iterdir()),
        "seconds": time.perf_counter() - started,
        "save_dir": save_dir,
    }


def test_each_part_of_a_step_is_found_in_its_phase(slept):
    phases = slept["result"]["phases"]
    expected = {DATA: 20, FORWARD: 40, BACKWARD: 60}
    assert list(phases) == list(PHASES)
    for phase, least in expected.items():
        assert phases[phase]["ms_p10"] >= least, phase


def test_phase_times_sum_to_the_step_time(slept):
    result = slept["result"]
    parts = [part["ms_mean"] for part in result["phases"].values()]
    assert sum(parts) == pytest.approx(result["step_ms_mean"])
    assert sum(part["percent"] for part in result["phases"].values()) == pytest.approx(100)
    assert result["steps"] == 4
    assert result["samples_per_second"] == pytest.approx(8e3 / result["step_ms_mean"], rel=1e-6)
    assert result["step_ms_mean"] * 5 < 1e3 * slept["seconds"]
    assert len(result["ranks"]) == 1
    assert result["ranks"][0]["peak_memory_mib"] > 50


def test_trace_names_the_phases(slept):
    (path,) = slept["traces"]
    assert path.name.endswith(".pt.trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event.get("name") in PHASES and "dur" in event]
    assert {DATA, FORWARD, BACKWARD, "optimizer"} <= {span["name"] for span in spans}
    forward_us = [span["dur"] for span in spans if span["name"] == FORWARD]
    assert len(forward_us) >= 5 and max(forward_us) >= 40_000
    assert any(event.get("name", "").startswith("aten::") for event in events)


def test_save_dir_is_not_created(slept):
    assert not slept["save_dir"].exists()


def test_a_batch_larger_than_the_data_is_reported(profile_here, tmp_path):
    arguments = [*TINY, *SHORT, "--batch-size", "64", "--json", tmp_path / "step.json"]
    out = profile_here("step", *arguments).out
    result = json.loads((tmp_path / "step.json").read_text())
    assert (result["requested_global_batch_size"], result["global_batch_size"]) == (64, 40)
    assert result["samples_per_step"] == 40
    assert "\n4 steps of 40 samples: " in out
    assert "Steps of 64 samples were requested, but the training data has only 40." in out


def test_steps_of_two_phases_have_their_own_samples(profile_here, tmp_path):
    """The steps of one epoch use the samples of one epoch, wherever they begin."""
    data = write_catalogue(tmp_path / "data")
    num_interactions = sum(len(line.split()) - 1 for line in (data / "train.txt").read_text().splitlines())
    num_edges = 2 * (num_interactions + len((data / "kg_final.txt").read_text().splitlines()))
    steps = -(-num_interactions // 16) - (-num_edges // 24)
    argv = [
        "--task", "kgat", "--model", "kgat", "--loss", "bpr", "--data-dir", data, "--select-on-test",
        "--batch-size", 16, "--kg-batch-ratio", 1.5, "--num-threads", 1, "--device", "cpu",
        "--cache-dir", tmp_path / "cache", "--json", tmp_path / "step.json",
    ]  # fmt: skip
    profile_here("step", *argv, "--steps", steps, "--settling-steps", 3)
    result = json.loads((tmp_path / "step.json").read_text())
    assert result["steps"] == steps
    assert result["samples_per_step"] == pytest.approx((num_interactions + num_edges) / steps)
    assert all(result["phases"][phase]["ms_p10"] > 0 for phase in (FORWARD, BACKWARD, "optimizer"))


@pytest.mark.parametrize("start", [
    ["profiler.py", "step", "--multi-gpu", "ddp", "--nproc", "2"],
    [*TORCHRUN, "profiler.py", "step", "--multi-gpu", "ddp"],
])  # fmt: skip
@pytest.mark.slow
def test_step_command_measures_two_processes(start, command, tmp_path):
    rests = ["--delay-s", "0.03", "--backward-s", "0.03"]
    out = command(
        *start, "--task", SLEEPY, *TINY[2:], *rests, *SHORT, "--json", tmp_path / "step.json",
        CUDA_VISIBLE_DEVICES="",
    ).stdout  # fmt: skip
    result = json.loads((tmp_path / "step.json").read_text())
    assert (result["world_size"], result["global_batch_size"], result["steps"]) == (2, 16, 4)
    assert out.count("DistributedDataParallel over gloo") == 1
    assert len(result["ranks"]) == 2
    for rank in result["ranks"]:
        phases = rank["phases_ms_mean"]
        assert phases[FORWARD] >= 30 and phases[BACKWARD] >= 25
        assert phases["communication"] > 0
        assert sum(phases.values()) == pytest.approx(rank["step_ms_mean"], rel=0.1)
