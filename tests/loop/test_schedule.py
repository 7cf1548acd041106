import math
import typing

import pytest

from trainer.common.errors import UserError
from trainer.flags import Schedule
from trainer.loop.schedule import LearningRate, device_scaling_factor, lr_factor

SCHEDULES = typing.get_args(Schedule)


def test_warm_up_is_linear_and_cosine_ends_at_the_floor():
    assert lr_factor(0.5, warmup=2, total=10, floor=0.1) == 0.25
    assert lr_factor(2, warmup=2, total=10, floor=0.1) == 1
    assert lr_factor(6, warmup=2, total=10, floor=0.1) == pytest.approx(0.55)
    assert lr_factor(10, warmup=2, total=10, floor=0.1) == pytest.approx(0.1)


def test_a_run_may_have_no_warm_up_or_only_warm_up():
    assert lr_factor(0, warmup=0, total=5, floor=0) == 1
    assert lr_factor(5, warmup=5, total=5, floor=0) == 1
    assert lr_factor(2.5, warmup=5, total=5, floor=0) == 0.5


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1.5, 9, 10])
def test_every_schedule_rises_then_falls(schedule, warmup):
    """A warm-up that reaches into the decay shortens the decay."""
    curve = [lr_factor(i / 100, warmup, 10, 0.1, schedule) for i in range(1001)]
    peak = curve.index(max(curve))
    assert max(curve) == 1
    assert curve[: peak + 1] == sorted(curve[: peak + 1])
    assert curve[peak:] == sorted(curve[peak:], reverse=True)
    assert curve[-1] == pytest.approx(1 if schedule in ("constant", "plateau") or warmup == 10 else 0.1)


def test_a_tasks_lr_factor_precedes_the_schedule():
    def half_of_the_first_steps(step, total):
        assert total == 7
        return 0.5 if step < 3 else None

    rate = LearningRate(0.4, 0.0, warmup=0, total=2, num_steps=7, factor_of_step=half_of_the_first_steps)
    assert rate.at(1, 2) == 0.2
    assert rate.at(1, 3) == pytest.approx(0.4 * lr_factor(1, 0, 2, 0))


def test_a_tasks_lr_factor_knows_the_number_of_steps():
    rate = LearningRate(0.4, 0.0, warmup=0, total=2, num_steps=7, factor_of_step=lambda step, total: 1 - step / total)
    assert rate.at(2, 9) == rate.at(1.9, 6) == pytest.approx(0.4 / 7)


@pytest.mark.parametrize("factor", [-0.1, math.nan, math.inf, "0.5", 1j])
def test_an_invalid_lr_factor_is_refused(factor):
    rate = LearningRate(0.4, 0.0, warmup=0, total=2, num_steps=7, factor_of_step=lambda step, total: factor)
    with pytest.raises(UserError, match=rf"lr_factor\(2, 7\) is {factor!r}; it must be a finite number, at least 0"):
        rate.at(1, 2)


def test_the_device_scaling_factor_is_a_ratio_of_batches_or_its_root():
    assert device_scaling_factor("none", 128, 32) == 1
    assert device_scaling_factor("linear", 128, 32) == 4
    assert device_scaling_factor("sqrt", 128, 32) == 2
