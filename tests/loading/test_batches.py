"""Workers that load batches change no result, and end with their trainer."""

import json
import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import ROOT, TINY, assert_same_bits, load, read_metrics
from tests.helpers import forks
from tests.helpers.weighted_task import Sequences, Weighted, WeightedFlags
from trainer.common.errors import UserError
from trainer.loading.batches import Batch
from trainer.loading.order import SampleKeys, evaluation_keys
from trainer.loading.workers import BatchLoader, Workers

# --- loaded batches ----------------------------------------------------------------------------------------------


def of_workers(num_workers: int) -> dict[str, BatchLoader]:
    """Returns loaders of training data and of two evaluation sets."""
    collate, workers = Weighted(WeightedFlags(), 0, Path()).collate, Workers(num_workers)
    return {
        "train": BatchLoader([Sequences(40, 0, True)], collate, workers, trains=True),
        "val": BatchLoader([Sequences(11, 1, False)], collate, workers),
        "test": BatchLoader([Sequences(6, 2, False)], collate, workers),
    }


TRAINING_KEYS = [SampleKeys(np.arange(i, i + 4), epoch=1) for i in range(0, 40, 4)]


def evaluated(loaders: dict[str, BatchLoader]) -> list[Batch]:
    return [
        batch
        for name, size in (("val", 11), ("test", 6), ("val", 11))
        for batch in loaders[name](evaluation_keys(size, (0, 1), 4))
    ]


def assert_same_batches(batches: list[Batch], expected: list[Batch]) -> None:
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert batch.keys() == other.keys()
        assert all(torch.equal(batch[name], other[name]) for name in other)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_an_evaluation_between_batches_changes_nothing(num_workers):
    """Batches that training loaded ahead arrive in order. An unfinished evaluation is dropped."""
    here, loaders = of_workers(0), of_workers(num_workers)
    expected, expected_evaluation = list(here["train"](TRAINING_KEYS)), evaluated(here)
    state = torch.random.get_rng_state()
    stream = loaders["train"](TRAINING_KEYS)
    found = [next(stream) for _ in range(3)]
    next(iter(loaders["test"](evaluation_keys(6, (0, 1), 1))))
    assert_same_batches(evaluated(loaders), expected_evaluation)
    found += [next(stream) for _ in range(2)]
    assert_same_batches([loaders["val"].one(key) for key in evaluation_keys(11, (0, 1), 4)], expected_evaluation[:3])
    assert len(multiprocessing.active_children()) == num_workers
    assert_same_batches([*found, *stream], expected)
    assert torch.equal(torch.random.get_rng_state(), state)
    for loader in loaders.values():
        loader.close()
    assert not multiprocessing.active_children()


class CutShort(Sequences):
    def __getitems__(self, keys):
        raise UserError("part-3.tar: is cut short; fetch it again")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_refusal_keeps_its_message(num_workers):
    loader = BatchLoader([CutShort(4, 0, True)], Weighted(WeightedFlags(), 0, Path()).collate, Workers(num_workers))
    with pytest.raises(UserError) as refusal:
        list(loader(evaluation_keys(4, (0, 1), 2)))
    assert str(refusal.value) == "part-3.tar: is cut short; fetch it again"
    loader.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_and_its_metrics_are_the_same_with_workers(world_size, run_here, environment, tmp_path):
    for num_workers in (0, 1):
        directory = tmp_path / str(num_workers)
        arguments = [*TINY, "--epochs", 2, "--num-workers", num_workers, "--save-dir", directory]
        if world_size == 1:
            run_here(*arguments)
        else:
            arguments = ["--multi-gpu", "ddp", "--nproc", world_size, "--device", "cpu", *arguments]
            statuses = forks.run_group(arguments, world_size, environment, tmp_path / "out")
            assert statuses == [0, 0], (tmp_path / "out").read_text()
    assert_same_bits(load(tmp_path / "0" / "final.pth"), load(tmp_path / "1" / "final.pth"))
    results = [json.loads((tmp_path / name / "results.json").read_text())["metrics"] for name in "01"]
    assert results[0] == results[1]
    assert results[0].keys() >= {"test/loss", "test/accuracy"}
    for event in ("epoch", "result"):
        assert read_metrics(tmp_path / "0", event) == read_metrics(tmp_path / "1", event)


def test_the_start_reports_the_number_of_workers(train, tmp_path):
    assert "Workers: 0 per rank. Threads" in train(tmp_path / "0")
    assert "Workers: 2 per rank. Threads" in train(tmp_path / "2", "--num-workers", 2)
    assert not multiprocessing.active_children()


def test_changed_data_that_workers_do_not_see_are_reported_once(run_here, tmp_path):
    for num_workers in (0, 1):
        argv = ["--task", f"{ROOT / 'tests' / 'helpers' / 'refreshing_task.py'}:Scored", *TINY[2:], "--epochs", 3]
        out = run_here(*argv, "--num-workers", num_workers, "--save-dir", tmp_path / str(num_workers)).out
        assert out.count("Workers: Sequences.scores changed, but workers see the old value; if ") == num_workers


def test_scoring_a_finished_run_leaves_no_worker(train, tmp_path):
    train(tmp_path / "run", "--no-test")
    plain, loaded = (train(tmp_path / "run", "--eval-only", "--num-workers", number) for number in (0, 1))
    assert plain.splitlines()[-3:] == loaded.splitlines()[-3:]
    assert "test/accuracy" in loaded.splitlines()[-1]
    assert not multiprocessing.active_children()


# --- ends of workers ---------------------------------------------------------------------------------------------

KILLED_WITH_WORKERS = """
import multiprocessing, os, signal
from tests.loading.test_batches import TRAINING_KEYS, evaluated, of_workers

loaders = of_workers(1)
next(loaders["train"](TRAINING_KEYS))
evaluated(loaders)
print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker looks every five seconds")
def test_workers_end_when_their_trainer_is_killed(environment):
    """They end at once, because they hold connections by which other ranks notice that the trainer has ended."""
    command = [sys.executable, "-c", KILLED_WITH_WORKERS]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as trainer:
        workers = list(map(int, trainer.stdout.readline().split()))
        assert trainer.wait(60) == -signal.SIGKILL
    assert len(workers) == 1
    deadline = time.monotonic() + 2
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, workers))


OUT_OF_FILES = """
import resource
from pathlib import Path
import numpy as np
from trainer.loading.workers import BatchLoader, Workers
from trainer.common.errors import UserError
from trainer.loading.order import SampleKeys
from tests.helpers.weighted_task import Sequences, Weighted, WeightedFlags

loader = BatchLoader([Sequences(4, 0, False)], Weighted(WeightedFlags(), 0, Path()).collate, Workers(20))
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
next(loader([SampleKeys(np.arange(2), epoch=0)]))
"""


def test_a_trainer_ends_when_only_some_workers_could_start(environment):
    command = [sys.executable, "-c", OUT_OF_FILES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Too many open files" in done.stderr


def test_a_batch_that_a_worker_cannot_send_ends_the_run(environment, tmp_path):
    """The path of a socket in such a long folder is too long."""
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    argv = [*TINY, "--num-workers", 1, "--save-dir", tmp_path / "run"]
    done = subprocess.run(
        [sys.executable, "main.py", *map(str, argv)], cwd=ROOT, env=environment | {"TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert "path too long" in done.stderr and "exited unexpectedly" in done.stderr


class Noted(Sequences):
    """Appends the first sample of each request to a file."""

    def __init__(self, note: Path, *arguments) -> None:
        super().__init__(*arguments)
        self.note = note

    def __getitems__(self, keys):
        with self.note.open("a") as file:
            file.write(f"{keys.index[0]} ")
        return super().__getitems__(keys)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_idle_workers_prefetch_later_batches(num_workers, tmp_path):
    """Idle workers load the data set that was requested first. A dropped request is not loaded."""
    collate, workers = Weighted(WeightedFlags(), 0, Path()).collate, Workers(num_workers)
    train = BatchLoader([Sequences(40, 0, True)], collate, workers, trains=True)
    one, other = (BatchLoader([Noted(tmp_path / name, 11, 1, False)], collate, workers) for name in ("one", "other"))
    keys = list(evaluation_keys(11, (0, 1), 4))
    expected = [list(here(own)) for here, own in zip(of_workers(0).values(), (TRAINING_KEYS, keys), strict=False)]
    found = train(TRAINING_KEYS)
    early, dropped, later = one(keys, ahead=True), other(keys, ahead=True), one(keys[1:], ahead=True)
    del dropped
    assert_same_batches(list(found), expected[0])
    deadline = time.monotonic() + 20
    while num_workers and not (tmp_path / "one").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (tmp_path / "one").exists() == (num_workers > 0)
    next_epoch = train(TRAINING_KEYS, ahead=True)
    assert_same_batches(list(later), expected[1][1:])
    assert_same_batches(list(early), expected[1])
    assert_same_batches(list(next_epoch), expected[0])
    assert not (tmp_path / "other").exists()
    workers.close()
