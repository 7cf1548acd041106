"""Whether a device that is waited for will ever come to its end."""

import threading
from types import SimpleNamespace

import pytest
import torch

from trainer.parallel import device_probe
from trainer.parallel.activity import CurrentActivity
from trainer.parallel.device_probe import DeviceProbe, await_gpu

PATIENCE_S = 100


class Device:
    """Is at its end while `done` is set. num_asked: how often it was waited for."""

    def __init__(self):
        self.done, self.num_asked = threading.Event(), 0

    def wait(self):
        self.num_asked += 1
        assert self.done.wait(30)


@pytest.fixture
def device():
    device = Device()
    yield device
    device.done.set()


@pytest.fixture
def stuck_s(device, monkeypatch):
    """Looks at the given second, of an activity that begins at 0; answers are then waited for."""
    activity = CurrentActivity()
    activity.since = 0.0
    probe = DeviceProbe(activity, lambda: device.wait())

    def look(second, since=0.0):
        activity.since = since
        monkeypatch.setattr(device_probe, "time", SimpleNamespace(monotonic=lambda: second))
        found = probe.stuck_s(PATIENCE_S)
        if device.done.is_set() and probe._thread is not None:
            probe._thread.join()
        return found

    return look


def test_a_device_that_never_comes_to_its_end(device, stuck_s):
    assert [stuck_s(second) for second in (5, 49, 51, 90, 100, 101)] == [0] * 6
    assert stuck_s(102) == 51
    assert device.num_asked == 1


def test_it_is_left_alone_until_half_of_the_patience_is_over(device, stuck_s):
    assert [stuck_s(second) for second in (5, 30, 49)] == [0] * 3
    assert device.num_asked == 0


def test_a_host_that_computes_for_long(device, stuck_s):
    device.done.set()
    assert [stuck_s(second) for second in range(5, 300, 5)] == [0] * 59


def test_activities_that_change_while_the_device_is_behind(device, stuck_s):
    assert [stuck_s(second, since=second // 60 * 60) for second in range(5, 300, 5)] == [0] * 59
    assert device.num_asked == 1


def test_a_device_that_is_stuck_after_it_has_answered(device, stuck_s):
    """As where a program was compiled for long before the kernels that wait."""
    device.done.set()
    assert stuck_s(150) == 0
    device.done.clear()
    assert [stuck_s(second) for second in (155, 205, 206)] == [0, 0, 51]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_device_that_fails_is_left_to_the_training_thread(device, stuck_s, monkeypatch):
    def fail():
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(device, "wait", fail)
    device.done.set()
    assert [stuck_s(second) for second in (60, 120, 180)] == [0] * 3


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and -m cuda")
def test_a_gpu_is_waited_for():
    torch.cuda._sleep(2 * 10**9)
    assert not torch.cuda.default_stream().query()
    await_gpu(torch.device("cuda", 0))
    assert torch.cuda.default_stream().query()
