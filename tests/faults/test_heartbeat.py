"""A process notices the end of other processes through the rendezvous store and, on one machine, the kernel."""

import os
import signal
import subprocess
import sys
import time

import pytest
from torch.distributed import HashStore

from trainer.failure import heartbeat
from trainer.failure.errors import Failure
from trainer.failure.heartbeat import CurrentActivity, HeartbeatMonitor, Neighbours, process_space

needs_descriptors = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs descriptors of processes")


@pytest.fixture
def start():
    monitors = []

    def monitor(store, rank, world_size=2, activity=None, neighbours=None):
        parts = activity or CurrentActivity(), neighbours or Neighbours({})
        monitors.append(HeartbeatMonitor(store, rank, world_size, *parts))
        return monitors[-1]

    yield monitor
    for monitor in monitors:
        monitor.close()


def test_the_first_report_of_an_exit_reaches_all(start):
    store = HashStore()
    monitors = [start(store, rank) for rank in range(2)]
    first, is_own = monitors[1].report_end(lambda: Failure("the sky fell", 75, {"batch_size": 4}))
    assert (str(first), is_own) == ("the sky fell", True)
    for monitor in monitors:
        later, is_own = monitor.report_end(lambda: pytest.fail("there is a report already"))
        assert (str(later), later.status, later.memory_limit) == ("the sky fell", 75, {"batch_size": 4})
        assert not is_own


def test_a_live_rank_answers_a_ping(start, monkeypatch):
    monkeypatch.setattr(heartbeat, "ANSWER_WITHIN_S", 1.5)
    store, activity = HashStore(), CurrentActivity()
    asking = start(store, 0, world_size=3)
    gone = start(store, 1, world_size=3)
    start(store, 2, world_size=3, activity=activity)
    while not store.check(["heartbeat 1"]):
        time.sleep(0.02)
    gone.close()
    activity.enter("forward")
    activity.step = 7
    found = asking.ping()
    assert [found[rank].answers_ping for rank in range(3)] == [True, False, True]
    assert (found[2].activity, found[2].number) == ("forward at optimizer step 7", 1)
    assert found[1].activity == "start-up"


def test_waiting_for_a_silent_store_ends(start, monkeypatch):
    class Silent(HashStore):
        def add(self, key, amount):
            time.sleep(2)

    monkeypatch.setattr(heartbeat, "REPORT_WITHIN_S", 0.2)
    assert start(Silent(), 0).report_end(lambda: Failure("the sky fell")) is None


@needs_descriptors
@pytest.mark.parametrize("told_by", [None, "closed 1", heartbeat.END_REPORT])
def test_a_neighbour_that_dies_silently_is_noticed(told_by, start, monkeypatch):
    monkeypatch.setattr(heartbeat, "LEAVE_WITHIN_S", 0.6)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    store, losses = HashStore(), []
    monitor = start(store, 0, neighbours=Neighbours({1: process.pid}))
    monitor.may_force_end, monitor.on_loss = False, lambda: losses.append(None)
    time.sleep(1.5)
    assert not losses
    if told_by is not None:
        store.set(told_by, "")
    process.kill()
    process.wait()
    time.sleep(2.0)
    assert bool(losses) == (told_by is None)


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def neighbours(sleeper):
    neighbours = Neighbours({3: sleeper.pid})
    yield neighbours
    neighbours.close()


@needs_descriptors
def test_a_live_process_is_not_reported_as_gone(neighbours):
    assert not neighbours.is_gone(3)
    assert not neighbours.await_end(3, 0.05)


@needs_descriptors
def test_a_stopped_process_can_be_ended(neighbours, sleeper):
    sleeper.send_signal(signal.SIGSTOP)
    assert not neighbours.is_gone(3)
    neighbours.end(3)
    assert neighbours.await_end(3, 10)
    assert sleeper.wait() < 0


@needs_descriptors
def test_a_dead_process_is_gone_and_ending_it_has_no_effect(neighbours, sleeper):
    sleeper.kill()
    sleeper.wait()
    assert neighbours.is_gone(3)
    neighbours.end(3)


@needs_descriptors
def test_ranks_on_other_hosts_are_neither_ended_nor_gone(neighbours):
    neighbours.end(0)
    assert not neighbours.is_gone(0)


@needs_descriptors
def test_a_process_that_has_ended_is_not_a_neighbour(sleeper):
    sleeper.kill()
    sleeper.wait()
    assert not Neighbours({0: sleeper.pid}).is_gone(0)


def test_processes_of_one_pid_namespace_see_each_other():
    code = "from trainer.failure.heartbeat import process_space; print(process_space())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == process_space()
