"""Other processes of this machine, held on to while they live."""

import os
import signal
import subprocess
import sys

import pytest

from trainer.parallel.neighbours import Neighbours, process_space

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs descriptors of processes")


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


def test_one_that_lives_is_not_gone(neighbours):
    assert not neighbours.is_gone(3)
    assert not neighbours.await_end(3, 0.05)


def test_one_that_is_stopped_can_be_ended(neighbours, sleeper):
    sleeper.send_signal(signal.SIGSTOP)
    assert not neighbours.is_gone(3)
    neighbours.end(3)
    assert neighbours.await_end(3, 10)
    assert sleeper.wait() < 0


def test_its_number_may_be_taken_by_another_one(neighbours, sleeper):
    """Which is then neither taken for it nor ended."""
    sleeper.kill()
    sleeper.wait()
    assert neighbours.is_gone(3)
    neighbours.end(3)


def test_of_others_nothing_is_known(neighbours):
    neighbours.end(0)
    assert not neighbours.is_gone(0)


def test_one_that_has_ended_before_is_no_neighbour(sleeper):
    sleeper.kill()
    sleeper.wait()
    assert not Neighbours({0: sleeper.pid}).is_gone(0)


def test_processes_of_one_namespace_share_a_space():
    code = "from trainer.parallel.neighbours import process_space; print(process_space())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == process_space()
