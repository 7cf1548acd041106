"""Measured steps equal the loop's steps, and the clock of their phases leaves the run unchanged."""

import time
from contextlib import contextmanager

import pytest
import torch

from trainer.failure.heartbeat import EXCHANGE
from trainer.parallel.strategy import SingleDevice
from trainer.profiling import step
from trainer.profiling.measure import MeasuredRun
from trainer.profiling.phase_clock import BACKWARD, COMMUNICATION, COPY, OPTIMIZER, PHASES, REST


def test_measured_steps_equal_the_loops_in_number_and_content(run):
    """40 samples are 3 steps of 16, 16 and 8."""
    weights = [p.clone() for p in run.learner.objective.parameters()]
    assert MeasuredRun(run).train(2) == 32
    assert MeasuredRun(run).train(4) == 40 + 16
    assert run.progress.step == 6
    assert not all(
        torch.equal(p, before) for p, before in zip(run.learner.objective.parameters(), weights, strict=True)
    )


def slow(function, seconds):
    def called(*args, **kwargs):
        time.sleep(seconds)
        return function(*args, **kwargs)

    return called


def test_clock_leaves_the_run_as_it_was(run):
    strategy, plain = run.strategy, run.group.activity
    run.log.start_segment = slow(run.log.start_segment, 0.05)
    started = time.perf_counter()
    with MeasuredRun(run).watched() as clock:
        MeasuredRun(run).train(3)
        steps = clock.stop()
        wall_ms = 1e3 * (time.perf_counter() - started)
    assert strategy.group.activity is plain and plain.step == 3
    assert not {"to_device", "seed_dropout", "start_sum", "gradient_sync"} & vars(strategy).keys()
    assert "update" not in vars(run.learner) and "step" not in vars(run.log) and "enter" not in vars(plain)
    assert steps.shape == (3, len(PHASES))
    assert 0.8 * wall_ms < steps.sum() <= wall_ms


def test_copy_optimizer_and_logging_time_are_separated(run, monkeypatch):
    """The loop itself does not mark where these phases end. The steps have 2, 2 and 1 micro-batches."""
    (optimizer,) = run.learner.optimizers["train"]
    optimizer.step = slow(optimizer.step, 0.03)
    run.log.advance = slow(run.log.advance, 0.05)
    monkeypatch.setattr(SingleDevice, "to_device", slow(SingleDevice.to_device, 0.01))
    steps, _ = MeasuredRun(run).timed(3)
    total = dict(zip(PHASES, steps.sum(axis=0), strict=True))
    expected = {COPY: 50, OPTIMIZER: 90, REST: 150}
    # No time counts in two phases.
    for phase, least in expected.items():
        assert total[phase] >= least, phase
    assert steps.sum() < sum(expected.values()) + 300


def test_gradient_exchange_counts_as_communication(run, monkeypatch):
    def exchange(strategy, params):
        strategy.group.activity.enter(EXCHANGE)
        time.sleep(0.03)

    with monkeypatch.context() as patched:
        patched.setattr(SingleDevice, "exchange", exchange)
        after = MeasuredRun(run).measure(3, 1)["phases"]
    assert after[COMMUNICATION]["ms_mean"] >= 30 > after[BACKWARD]["ms_mean"]

    @contextmanager
    def sync(strategy, net, enabled):
        yield
        time.sleep(0.03 * enabled)

    monkeypatch.setattr(SingleDevice, "overlaps", True)
    monkeypatch.setattr(SingleDevice, "gradient_sync", sync)
    within = MeasuredRun(run).measure(3, 1)["phases"]
    assert within[COMMUNICATION]["ms_mean"] >= 20 > within[BACKWARD]["ms_mean"]


def test_a_step_includes_its_accumulated_micro_batches(run):
    assert MeasuredRun(run).measure(3, 1)["global_batch_size"] == 16
    assert MeasuredRun(run).measure(3, 1)["steps"] == 3


def test_samples_per_step_are_averaged_if_the_last_step_is_short(run):
    """40 samples are steps of 16, 16 and 8."""
    result = MeasuredRun(run).measure(3, 1)
    assert result["samples_per_step"] == pytest.approx(40 / 3)
    assert "3 steps of 13.3 samples on average: " in step.report(result)
    assert result["samples_per_second"] == pytest.approx(1e3 * result["samples_per_step"] / result["step_ms_mean"])


def test_a_report_of_several_processes_names_rank_0(run):
    result = MeasuredRun(run).measure(2, 1)
    assert step.report(result).startswith("      ")
    assert step.report({**result, "ranks": 2 * result["ranks"]}).startswith("rank 0 ")
