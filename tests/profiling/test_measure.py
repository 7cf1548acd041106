"""A few steps of a run: those of the loop, with the phases of a clock that leaves no trace."""

import time

import pytest
import torch

from trainer.parallel.strategy import SingleDevice
from trainer.profiling import step
from trainer.profiling.measure import measure, timed_steps, train_steps
from trainer.profiling.phase_clock import COPY, OPTIMIZER, PHASES, REST, watched


def test_steps_are_those_of_the_loop_and_as_many_as_asked_for(run):
    """40 samples are 3 steps of 16, 16 and 8."""
    weights = [p.clone() for p in run.learner.objective.parameters()]
    assert train_steps(run, 2) == 32
    assert train_steps(run, 4) == 40 + 16
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
    with watched(run) as clock:
        train_steps(run, 3)
        steps = clock.stop()
        wall_ms = 1e3 * (time.perf_counter() - started)
    assert strategy.group.activity is plain and plain.step == 3
    assert not {"to_device", "seed_dropout", "start_sum", "gradient_sync"} & vars(strategy).keys()
    assert "step" not in vars(run.learner.precision) and "step" not in vars(run.log) and "enter" not in vars(plain)
    assert steps.shape == (3, len(PHASES))
    assert 0.8 * wall_ms < steps.sum() <= wall_ms


def test_copy_optimizer_and_logging_are_told_apart(run, monkeypatch):
    """The loop itself does not say where they end. The steps are of 2, 2 and 1 micro-batches."""
    (optimizer,) = run.learner.optimizers["train"]
    optimizer.step = slow(optimizer.step, 0.03)
    run.log.advance = slow(run.log.advance, 0.05)
    monkeypatch.setattr(SingleDevice, "to_device", slow(SingleDevice.to_device, 0.01))
    steps, _ = timed_steps(run, 3)
    total = dict(zip(PHASES, steps.sum(axis=0), strict=True))
    expected = {COPY: 50, OPTIMIZER: 90, REST: 150}
    # Time counts once, so that what is found in its phase is in no other.
    for phase, least in expected.items():
        assert total[phase] >= least, phase
    assert steps.sum() < sum(expected.values()) + 300


def test_accumulated_steps_are_single_steps(run):
    assert measure(run, 3, 1)["global_batch_size"] == 16
    assert measure(run, 3, 1)["steps"] == 3


def test_samples_of_a_step_are_an_average_where_the_last_one_is_short(run):
    """40 samples are steps of 16, 16 and 8."""
    result = measure(run, 3, 1)
    assert result["samples_per_step"] == pytest.approx(40 / 3)
    assert "3 steps of 13.3 samples on average: " in step.report(result)
    assert result["samples_per_second"] == pytest.approx(1e3 * result["samples_per_step"] / result["step_ms_mean"])


def test_phases_of_several_processes_are_told_as_those_of_rank_0(run):
    result = measure(run, 2, 1)
    assert step.report(result).startswith("      ")
    assert step.report({**result, "ranks": 2 * result["ranks"]}).startswith("rank 0 ")
