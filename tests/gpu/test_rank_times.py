"""Tests the times of a rank on a GPU, which are measured between CUDA events."""

import time

import pytest
import torch

from tests.helpers.simulated_gpu import on_simulated_gpus
from trainer.logs.run_log import SilentLog
from trainer.loop.progress import Progress
from trainer.loop.rank_times import REPORT_EVERY, SENT, RankTimes
from trainer.parallel.devices import LAG_STEPS
from trainer.parallel.strategy import SingleDevice


@on_simulated_gpus(2, may_wait=True)
def test_periods_follow_one_another():
    strategy, progress = SingleDevice(torch.device("cuda", 1)), Progress()
    sent = []
    strategy.group.start_sum = lambda values: lambda: sent.append(values) or values
    times = RankTimes(strategy.group)
    times.begin(progress)
    times.resume()
    for pause_s in (0.02, 0.05):
        for name in ("data loading", "forward", "backward", "optimizer"):
            strategy.group.activity.enter(name)
            time.sleep(pause_s)
        progress.step += REPORT_EVERY
        times.after_step(progress, None, SilentLog())
    for _ in range(2):
        progress.step += LAG_STEPS
        times.after_step(progress, None, SilentLog())
    times.after_step(progress, None, SilentLog())
    assert len(sent) == 2
    for pause_s, values in zip((0.02, 0.05), sent, strict=True):
        seconds = dict(zip(SENT, values, strict=True))
        for name in ("data loading", "forward", "backward"):
            assert seconds[name] == pytest.approx(pause_s, abs=0.5)
            assert seconds[name] >= pause_s
