"""The times of a rank on a GPU lie between events on its stream."""

import time

import pytest
import torch

from tests.helpers.imagined_gpu import on_imagined_gpus
from trainer.loop.rank_times import DeviceClock
from trainer.parallel.activity import CurrentActivity


@on_imagined_gpus(2, may_wait=True)
def test_periods_follow_one_another():
    phase = CurrentActivity()
    phase.enter("optimizer")
    clock = DeviceClock(torch.device("cuda", 1))
    phase.on_border = clock.enter
    for pause_s in (0.02, 0.05):
        for name in ("data loading", "forward", "backward"):
            phase.enter(name)
            time.sleep(pause_s)
        phase.enter("optimizer")
        clock.stop()
    for pause_s in (0.02, 0.05):
        seconds = clock.read()
        for name in ("data loading", "forward", "backward"):
            assert seconds[name] == pytest.approx(pause_s, abs=0.5)
            assert seconds[name] >= pause_s
