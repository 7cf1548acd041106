"""Tests profiler.py scaling: its arithmetic, and its remarks about the machine."""

import json
import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.profiling.conftest import SHORT, TINY
from trainer.commands.parse import parse
from trainer.profiling import scaling
from trainer.profiling.processes import FOR_SEVERAL_DEVICES, World, placed


def measured(samples_per_second, memory=(100.0,)):
    return {
        "samples_per_second": samples_per_second, "global_batch_size": 32, "requested_global_batch_size": 32,
        "step_ms_mean": 5.0,
        "phases": {"communication": {"ms_mean": 1.0}}, "ranks": [{"peak_memory_mib": m} for m in memory],
    }  # fmt: skip


def test_speed_up_is_computed_within_rounds(tmp_path):
    """The machine was three times as slow in the first round."""
    found = {
        World("single"): [measured(30), measured(100), measured(100)],
        World("ddp", 2): [measured(54, (90.0, 120.0)), measured(180), measured(190)],
    }
    single, ddp = scaling.summary(found)
    assert (single["speedup"], single["efficiency"]) == (1, 1)
    assert (ddp["speedup"], ddp["efficiency"]) == (pytest.approx(1.8), pytest.approx(0.9))
    assert ddp["peak_memory_mib_per_process"] == 120
    assert scaling.report([single]).splitlines()[0].endswith("  peak MiB/process")
    assert re.search(r"ddp +2 +32 +180 +1\.80 +90%", scaling.report([single, ddp]))
    scaling.write_board([single, ddp], tmp_path)
    board = EventAccumulator(str(tmp_path)).Reload()
    curve = board.Scalars("scaling/ddp/speedup")
    assert [(point.step, point.value) for point in curve] == [(1, 1), (2, pytest.approx(1.8))]


@pytest.mark.parametrize(("world", "device", "mode", "gpus"), [
    (World("single"), "cuda:3", None, None),
    (World("dp", 2), "auto", "dp", (3, 1)),
    (World("ddp", 3), "auto", "ddp", (3, 1, 2)),
])  # fmt: skip
def test_a_group_uses_the_first_chosen_gpus(world, device, mode, gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    flags, problems = parse(["--gpu-ids", "3,1,2", *FOR_SEVERAL_DEVICES], True, scaling.ScalingFlags)
    assert not problems
    flags.tool.world_sizes = (1, 4)
    assert scaling.problems(flags, []) == ["--world-sizes 4: only 3 GPUs can be used; choose fewer"]
    placed_flags = placed(flags, world)
    assert placed_flags.devices.device == device
    multi = placed_flags.multi
    assert (multi.multi_gpu, multi.gpu_ids) == (mode, gpus) if multi is not None else mode is None


@pytest.fixture
def scaling_of(monkeypatch, profile_here):
    """Runs `profiler.py scaling` on the CPU, with one given result per number of devices."""

    def run(results, *argv, **options):
        monkeypatch.setattr(scaling, "measure_in", lambda world, *_: results[world.num_devices])
        return profile_here("scaling", "--device", "cpu", "--rounds", "1", *argv, **options)

    return run


def test_scaling_reports_limits_of_the_data_and_its_board(scaling_of, tmp_path):
    bounded = {**measured(150), "requested_global_batch_size": 64}
    out = scaling_of({1: measured(100), 2: bounded}, "--board", tmp_path / "a board").out
    assert f"tensorboard --logdir '{tmp_path / 'a board'}'\n" in out
    assert "\nddp 2: Steps of 64 samples were requested, but the training data has only 32.\n" in out
    assert "single: Steps" not in out


@pytest.mark.parametrize(("argv", "num_threads", "warns"), [
    ([], 4, True), ([], 1, False), (["--num-threads", "1"], 4, False),
])  # fmt: skip
def test_scaling_warns_of_one_process_on_all_cores(argv, num_threads, warns, scaling_of, monkeypatch):
    """OMP_NUM_THREADS=1 has the same effect as --num-threads 1."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    out = scaling_of({1: measured(100), 2: measured(150)}, *argv).out
    assert ("add --num-threads 1 for a fair comparison" in out) == warns


@pytest.mark.slow
def test_scaling_command_compares_one_and_two_processes(command, tmp_path):
    arguments = [*TINY, *SHORT, "--delay-s", "0.05", "--rounds", "2", "--world-sizes", "1,2"]
    files = ["--json", tmp_path / "scaling.json", "--board", tmp_path / "board"]
    out = command("profiler.py", "scaling", *arguments, *files, CUDA_VISIBLE_DEVICES="").stdout
    single, ddp = json.loads((tmp_path / "scaling.json").read_text())["worlds"]
    assert "DataParallel, which needs at least two GPUs" in out
    assert (single["mode"], ddp["mode"], ddp["num_devices"]) == ("single", "ddp", 2)
    assert (single["global_batch_size"], ddp["global_batch_size"]) == (8, 16)
    assert 1.3 < ddp["speedup"] < 2.5  # sleeping does not need a core
    assert list((tmp_path / "board").iterdir())


@pytest.mark.slow
def test_scaling_works_for_a_task_that_checks_weights_between_epochs(command, tmp_path):
    """Weights must stay the same on all processes while steps are timed without an exchange."""
    task = ["--task", "tests/helpers/refreshing_task.py:Refreshing", "--num-threads", "1", "--batch-size", "8"]
    out = command("profiler.py", "scaling", *task, *SHORT, "--rounds", "1", CUDA_VISIBLE_DEVICES="").stdout
    assert "ddp 2: " in out
