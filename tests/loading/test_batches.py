"""Workers that load batches: how they end."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

KILLED_WITH_A_WORKER = """
import os, signal
from pathlib import Path
import numpy as np
from trainer.loading.batches import BatchLoader
from trainer.loading.order import SampleKeys
from tests.helpers.weighted_task import Sequences, Weighted, WeightedFlags

loader = BatchLoader(Sequences(4, 0, False), Weighted(WeightedFlags(), 0, Path()).collate, num_workers=1)
next(loader([SampleKeys(np.arange(2), epoch=0)]))
print(loader._workers._iterator._workers[0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker looks every five seconds")
def test_a_worker_ends_with_a_trainer_that_is_killed(environment):
    """At once: it holds the trainer's connections, by which other ranks notice the death."""
    command = [sys.executable, "-c", KILLED_WITH_A_WORKER]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as trainer:
        worker = int(trainer.stdout.readline())
        assert trainer.wait(60) == -signal.SIGKILL
    deadline = time.monotonic() + 2
    while is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(worker)


OUT_OF_FILES = """
import resource
from pathlib import Path
import numpy as np
from trainer.loading.batches import BatchLoader
from trainer.loading.order import SampleKeys
from tests.helpers.weighted_task import Sequences, Weighted, WeightedFlags

loader = BatchLoader(Sequences(4, 0, False), Weighted(WeightedFlags(), 0, Path()).collate, num_workers=20)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
next(loader([SampleKeys(np.arange(2), epoch=0)]))
"""


def test_a_trainer_ends_when_only_some_workers_could_start(environment):
    command = [sys.executable, "-c", OUT_OF_FILES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Too many open files" in done.stderr
