"""Saving while training goes on: what is written is the moment of the save, and a kill loses nothing promised."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

from tests.checkpoint.conftest import state_at
from tests.conftest import ROOT, WEIGHTED, assert_same_bits, load, read_metrics
from trainer.checkpoint.background import THREAD_NAME, BackgroundSaver, snapshot, state_bytes
from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.manifest import Retention
from trainer.cli import main
from trainer.common.errors import UserError

ARGV = ["--task", WEIGHTED, "--num-threads", "1", "--device", "cpu", "--lr", "0.01", "--dropout", "0.1"]


# --- the thread --------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory(tmp_path / "run", Retention(3), lambda line: None)
    directory.acquire()
    yield directory
    directory.release()


def moment(step, is_best=False):
    """What a saver is to start with."""
    best = {"epoch": step, "step": step, "value": 0.5} if is_best else None
    return state_at(step) | {"step": step, "best": best, "value": 0.5, "is_best": is_best}


def steps_on_disk(directory):
    entries = json.loads((directory.path / "manifest.json").read_text())["checkpoints"]
    return [entry["step"] for entry in entries if (directory.path / entry["file"]).exists()]


@pytest.fixture
def gate(monkeypatch):
    """Holds every fsync back while it is closed; `refusal` is raised instead, if set."""

    class Gate(threading.Event):
        refusal = None

    gate = Gate()
    gate.set()
    real = os.fsync

    def fsync(descriptor):
        assert gate.wait(30)
        if gate.refusal is not None:
            raise OSError(gate.refusal, os.strerror(gate.refusal))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return gate


def test_starting_returns_at_once_and_waiting_when_it_is_on_the_disk(directory, gate):
    saver = BackgroundSaver(directory.save)
    gate.clear()
    saver.start(moment(1))
    assert not (directory.path / "checkpoint_1.pth").exists()
    gate.set()
    saver.finish()
    assert steps_on_disk(directory) == [1]
    assert not any(thread.name == THREAD_NAME for thread in threading.enumerate())


def test_a_full_disk_is_reported_once_and_the_next_save_is_tried(directory, gate):
    saver = BackgroundSaver(directory.save)
    gate.refusal = errno.ENOSPC
    saver.start(moment(1))
    saver.wait()
    assert "training goes on and tries again at the next save" in saver.take_refusal()
    assert saver.take_refusal() is None
    gate.refusal = None
    saver.start(moment(2))
    saver.finish()
    assert steps_on_disk(directory) == [2]


def test_of_those_that_did_not_fit_the_best_and_the_newest_are_made_up_for(directory, gate):
    saver = BackgroundSaver(directory.save)
    gate.refusal = errno.EDQUOT
    for step, is_best in [(1, True), (2, False), (3, True), (4, False), (5, False)]:
        saver.wait()
        saver.start(moment(step, is_best))
    saver.wait()
    gate.refusal = None
    saver.finish()
    assert steps_on_disk(directory) == [3, 5]
    assert directory.load_best()["step"] == 3


def test_at_the_end_a_full_disk_is_an_error(directory, gate):
    saver = BackgroundSaver(directory.save)
    gate.refusal = errno.ENOSPC
    saver.start(moment(1))
    with pytest.raises(UserError, match=r"checkpoint_1.pth: No space left on device: .* free some space"):
        saver.finish()
    assert not [path for path in directory.path.iterdir() if path.suffix in (".tmp", ".pth")]


def test_any_other_error_reaches_whoever_waits(directory, gate):
    saver = BackgroundSaver(directory.save)
    gate.refusal = errno.EIO
    saver.start(moment(1))
    with pytest.raises(UserError, match=r"checkpoint_1.pth: Input/output error"):
        saver.wait()


# --- in a run ----------------------------------------------------------------------------------------------------


def test_saving_often_changes_no_bit(tmp_path, signals_restored):
    for every in (0, 1):
        argv = [*ARGV, "--epochs", "2", "--save-every-steps", str(every), "--save-dir", str(tmp_path / str(every))]
        assert main(argv, several_devices=False) == 0
    assert_same_bits(*(load(tmp_path / name / "final.pth") for name in ("0", "1")))


WIDE = ["--width", "30000", "--epochs", "2", "--batch-size", "50"]


def start_wide(directory, environment):
    return subprocess.Popen(
        [sys.executable, "main.py", *ARGV, *WIDE, "--save-every-steps", "1", "--save-dir", str(directory)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("num_starts", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_during_the_write_the_one_before_is_the_newest(num_starts, tmp_path, environment, signals_restored):
    """Real kills, while the temporary file grows; the metrics are as of the checkpoint that is gone on from."""
    run, num_kills = tmp_path / "run", 0
    for _ in range(num_starts):
        promised = set(run.glob("checkpoint_*.pth"))
        process = start_wide(run, environment)
        while process.poll() is None:
            if set(run.glob("checkpoint_*.pth")) - promised and list(run.glob("checkpoint_*.tmp")):
                process.send_signal(signal.SIGKILL)
                process.wait()
            time.sleep(0.001)
        num_kills += process.returncode == -signal.SIGKILL
    assert num_kills >= 1
    for name in (run, tmp_path / "unbroken"):
        argv = [*ARGV, *WIDE, "--save-every-steps", "1", "--save-dir", str(name)]
        assert main(argv, several_devices=False) == 0
    assert_same_bits(load(run / "final.pth"), load(tmp_path / "unbroken" / "final.pth"))
    assert read_metrics(run, "epoch") == read_metrics(tmp_path / "unbroken", "epoch")


# --- the copy that is written -------------------------------------------------------------------------------------


def test_a_snapshot_does_not_change_with_the_state():
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizers": {"train": optimizer.state_dict()}, "step": 1, "best": None}
    before = json.dumps(snapshot(state), default=torch.Tensor.tolist)
    copy = snapshot(state)
    for tensor in [*model.state_dict().values(), *optimizer.state[model.weight].values()]:
        tensor.fill_(7)
    assert json.dumps(copy, default=torch.Tensor.tolist) == before
    assert copy["model"]._metadata == model.state_dict()._metadata


def test_a_snapshot_keeps_shared_tensors_shared_and_views_small():
    table = torch.zeros(100, 10)
    copy = snapshot({"a": table, "b": [table], "row": table[3], "other": torch.zeros(100, 10)})
    assert copy["a"].data_ptr() == copy["b"][0].data_ptr()
    assert copy["other"].data_ptr() != copy["a"].data_ptr()
    assert copy["row"].untyped_storage().nbytes() == 40
    assert state_bytes(copy) == 2 * 4000 + 40


def test_a_snapshot_uses_memory_again_where_it_fits():
    old = snapshot({"a": torch.zeros(10), "b": torch.zeros(10), "c": torch.zeros(3)})
    memory = {tensor.data_ptr() for tensor in (old["a"], old["b"])}
    state = {"a": torch.ones(10), "b": torch.full((10,), 2.0), "c": torch.ones(4), "d": torch.ones(10).double()}
    new = snapshot(state, old)
    assert {new["a"].data_ptr(), new["b"].data_ptr()} == memory
    assert all(torch.equal(new[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(0), torch.tensor(3), torch.arange(6.0).view(2, 3).t(), torch.eye(3).to_sparse(), torch.ones(2) > 0],
)
def test_any_kind_of_tensor_is_copied(tensor):
    copy = snapshot({"x": tensor})["x"]
    assert torch.equal(copy.to_dense(), tensor.to_dense())
    assert (copy.dtype, copy.layout) == (tensor.dtype, tensor.layout)
