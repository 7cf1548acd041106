"""profiler.py predict: the model of a step, and where its numbers come from."""

import json
import time

import pytest

from tests.profiling.conftest import TINY
from trainer.commands.parse import parse
from trainer.profiling import predict as command
from trainer.profiling.cost_model import FIRST_BUCKET_BYTES, Compute, Link, buckets, predict
from trainer.profiling.processes import World


def test_ring_takes_what_the_textbook_says():
    link = Link(latency_s=1e-5, bandwidth=1e9)
    assert link.all_reduce_s(1e8, 1) == 0
    assert link.all_reduce_s(1e8, 8) == pytest.approx(2 * 7 / 8 * 0.1 + 14 * 1e-5)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_link_is_recovered_from_what_it_takes(world_size):
    link = Link(latency_s=2e-5, bandwidth=3e9)
    found = Link.measured(link.all_reduce_s(0, world_size), link.all_reduce_s(10**8, world_size), 10**8, world_size)
    assert (found.latency_s, found.bandwidth) == (pytest.approx(2e-5), pytest.approx(3e9))


def test_only_what_backward_does_not_hide_is_waited_for():
    link = Link(latency_s=0, bandwidth=1e9)
    one_ms = 1e3 * link.all_reduce_s(10**7, 4)
    hidden = predict(Compute(0.3, 0.2, {"train": [10**7, 10**7, 10**7]}, 32), link, 4)
    assert hidden["exchange_ms"] == pytest.approx(3 * one_ms)
    assert hidden["exposed_exchange_ms"] == pytest.approx(one_ms)  # the last bucket
    assert hidden["step_ms"] == pytest.approx(300 + one_ms)
    exposed = predict(Compute(0.3, 0.001, {"train": [10**7, 10**7, 10**7]}, 32), link, 4)
    assert exposed["step_ms"] == pytest.approx(300 + 3 * one_ms - 1)
    assert predict(Compute(0.3, 0.2, {"train": [10**7]}, 32), link, 1)["step_ms"] == 300


def test_only_the_last_backward_hides_the_exchange():
    phases = {"backward": {"ms_median": 12.0}}
    sizes = {"gen": [40, 2], "disc": [7]}
    measured = {"step_ms_median": 20.0, "phases": phases, "gradient_bytes": sizes, "global_batch_size": 32}
    assert command.compute_of([measured], 4) == Compute(0.02, 0.003, {"gen": [42], "disc": [7]}, 32)


def test_phases_count_by_their_own_gradients():
    link, sizes = Link(latency_s=1e-5, bandwidth=1e9), {"cf": [10**7, 10**6], "kg": [10**5]}
    alone = [predict(Compute(0.3, 0.001, {phase: own}, 32), link, 4) for phase, own in sizes.items()]
    together = predict(Compute(0.3, 0.001, sizes, 32), link, 4)
    for name in ("step_ms", "exchange_ms", "exposed_exchange_ms"):
        assert together[name] == pytest.approx(sum(one[name] for one in alone) / 2)
    said = command.report(Compute(0.3, 0.001, sizes, 32), link, [together])
    assert "Gradients: cf, buckets of 9.54, 0.95 MiB; kg, buckets of 0.10 MiB." in said


def test_buckets_are_filled_from_the_last_gradient():
    assert buckets([100, FIRST_BUCKET_BYTES, 5]) == [FIRST_BUCKET_BYTES + 5, 100]
    assert buckets([7, 8]) == [15]
    assert buckets([]) == []
    sizes = [3 * 2**20] * 40
    assert sum(buckets(sizes)) == sum(sizes)
    assert buckets(sizes)[:2] == [3 * 2**20, 27 * 2**20]


def test_row_and_comparison():
    row = predict(Compute(0.01, 0.004, {"train": [10**6]}, 32), Link(0, 1e9), 4)
    assert row["step_ms"] == pytest.approx(10 + 1.5)
    assert (row["num_devices"], row["global_batch_size"]) == (4, 128)
    assert row["samples_per_second"] == pytest.approx(4 * 32 / 0.0115)
    assert row["efficiency"] == pytest.approx(10 / 11.5)
    command.compare(row, [{"step_ms_median": 10.0}, {"step_ms_median": 23.0}, {"step_ms_median": 30.0}])
    assert (row["measured_step_ms"], row["error_percent"]) == (23, pytest.approx(-50))


def test_link_that_is_given_is_not_measured():
    """No process is started, which would take longer than the test."""
    argv = ["--device", "cpu", "--bandwidth-gb-s", "12", "--latency-us", "8"]
    flags, _ = parse(argv, False, command.PredictFlags)
    started = time.perf_counter()
    assert command.measured_link(flags.tool, argv, World("ddp", 2)) == Link(8 / 1e6, 12e9)
    assert time.perf_counter() - started < 0.5


@pytest.mark.slow
def test_predict_command(command, tmp_path):
    """Of a step that mostly sleeps, which two processes do at once: there the model must be right."""
    arguments = [*TINY, "--steps", 20, "--delay-s", "0.1", "--rounds", "1", "--world-sizes", "2,8", "--validate"]
    out = command("profiler.py", "predict", *arguments, "--json", tmp_path / "p.json", CUDA_VISIBLE_DEVICES="").stdout
    result = json.loads((tmp_path / "p.json").read_text())
    two, eight = result["worlds"]
    assert result["bandwidth_gb_s"] > 0.01 and result["latency_us"] > 1
    assert two["step_ms"] <= eight["step_ms"]
    assert abs(two["error_percent"]) < 30
    assert "measured step ms" in out
