"""The last completed step is found although the device lags behind the host, as a GPU does."""

import pytest
import torch

from trainer.logs.run_log import SilentLog
from trainer.loop import rescue
from trainer.loop.progress import Progress
from trainer.loop.rescue import LastStep
from trainer.parallel.devices import LAG_STEPS, CudaQueue, DeviceQueue

LOG = SilentLog()


class Device(DeviceQueue):
    """Queue of a device that has passed `num_passed` marks."""

    def __init__(self):
        super().__init__(LAG_STEPS)
        self.num_made = self.num_passed = 0

    def mark(self):
        number, self.num_made = self.num_made, self.num_made + 1
        return lambda: number < self.num_passed


def steps_of_host(num_steps, device):
    """Enqueues steps: one mark at the start, and three per step."""
    last, progress = LastStep(device), Progress()
    last.begin(progress)
    for number in range(1, num_steps + 1):
        last.at("forward")
        last.at("update")
        progress.step = number
        last.after_step(progress, None, LOG)
    return last


@pytest.mark.parametrize(
    ("num_passed", "expected"),
    [
        (0, None),
        (1, (0, False)),
        (2, (0, True)),
        (3, None),
        (4, (1, False)),
        (5, (1, True)),
        (6, None),
        (10, (3, False)),
    ],
)
def test_the_last_step_that_the_device_completed_is_found(num_passed, expected):
    """Between the marks before and after the optimizer's update, the weights belong to no step."""
    device = Device()
    last = steps_of_host(3, device)
    device.num_passed = num_passed
    found = last.find()
    assert (found and (found[0].progress.step, found[1])) == expected


@pytest.mark.parametrize(
    ("num_passed", "expected"),
    [(1, (0, False)), (2, (0, True)), (3, None), (4, (0, True)), (5, None), (6, (1, False))],
)
def test_no_completed_step_is_known_while_weights_are_moved(num_passed, expected):
    device = Device()
    last, progress = LastStep(device), Progress()
    last.begin(progress)
    for place in ("forward", "update", "forward", "update"):
        last.at(place)
    progress.step = 1
    last.after_step(progress, None, LOG)
    device.num_passed = num_passed
    found = last.find()
    assert (found and (found[0].progress.step, found[1])) == expected


def test_completed_steps_are_forgotten():
    device = Device()
    device.num_passed = 10**9
    last = steps_of_host(100, device)
    assert len(last._steps) == 1
    assert last.find()[0].progress.step == 100


def test_no_completed_step_is_known_while_the_optimizer_runs():
    last = steps_of_host(2, DeviceQueue())
    last.at("forward")
    assert last.find()[1]
    last.at("update")
    assert last.find() is None


def test_before_training_no_progress_is_known():
    assert LastStep(DeviceQueue()).find() is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and -m cuda")
def test_the_last_step_is_found_while_a_gpu_lags_behind(monkeypatch):
    """A kernel of about one second takes the place of an exchange that never ends."""
    monkeypatch.setattr(rescue, "DRAINS_WITHIN_S", 0.05)
    last, progress = LastStep(CudaQueue(torch.device("cuda", 0))), Progress()
    last.begin(progress)
    torch.cuda.synchronize()
    last.at("forward")
    torch.cuda._sleep(2 * 10**9)
    last.at("update")
    progress.step = 1
    last.after_step(progress, None, LOG)
    found = last.find()
    assert (found[0].progress.step, found[1]) == (0, True)
    torch.cuda.synchronize()
    assert last.find()[0].progress.step == 1
