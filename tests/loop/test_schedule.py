import math

import pytest

from trainer.loop.schedule import LearningRate, device_scaling_factor, lr_factor


def test_warm_up_is_linear_and_cosine_ends_at_the_floor():
    assert lr_factor(0.5, warmup=2, total=10, floor=0.1) == 0.25
    assert lr_factor(2, warmup=2, total=10, floor=0.1) == 1
    assert lr_factor(6, warmup=2, total=10, floor=0.1) == pytest.approx(0.55)
    assert lr_factor(10, warmup=2, total=10, floor=0.1) == pytest.approx(0.1)


def test_no_warm_up_and_nothing_but_warm_up():
    assert lr_factor(0, warmup=0, total=5, floor=0) == 1
    assert lr_factor(5, warmup=5, total=5, floor=0) == 1
    assert lr_factor(2.5, warmup=5, total=5, floor=0) == 0.5


def test_factor_rises_then_falls():
    curve = [lr_factor(i / 100, 1.5, 10, 0.0) for i in range(1001)]
    peak = curve.index(max(curve))
    assert curve[: peak + 1] == sorted(curve[: peak + 1])
    assert curve[peak:] == sorted(curve[peak:], reverse=True)
    assert all(math.isfinite(value) and 0 <= value <= 1 for value in curve)


def test_learning_rate_runs_between_peak_and_floor():
    rate = LearningRate(peak=0.4, floor=0.1, warmup=0, total=2)
    assert rate.at(0) == pytest.approx(0.4)
    assert rate.at(2) == pytest.approx(0.1)


def test_scaling_by_devices():
    assert device_scaling_factor("none", 128, 32) == 1
    assert device_scaling_factor("linear", 128, 32) == 4
    assert device_scaling_factor("sqrt", 128, 32) == 2
