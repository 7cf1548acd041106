"""Tests saves in the background, and the snapshots that they write."""

import errno
import json
import os
import threading
import weakref

import pytest
import torch
from torch import nn

from tests.checkpoint.conftest import state_at
from trainer.checkpoint.background import THREAD_NAME, BackgroundSaver, snapshot, state_bytes
from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.manifest import Retention

# --- the thread --------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory(tmp_path / "run", Retention(3), lambda line: None)
    directory.acquire()
    yield directory
    directory.release()


def moment(step, is_best=False):
    """Returns a state to save."""
    best = {"epoch": step, "step": step, "value": 0.5} if is_best else None
    return state_at(step) | {"step": step, "best": best, "value": 0.5, "is_best": is_best}


def steps_on_disk(directory):
    entries = json.loads((directory.path / "manifest.json").read_text())["checkpoints"]
    return [entry["step"] for entry in entries if (directory.path / entry["file"]).exists()]


@pytest.fixture
def gate(monkeypatch):
    """Blocks every fsync while it is cleared, and lets it raise the error `refusal` if that is set."""

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


def test_start_returns_at_once_and_finish_returns_when_saved(directory, gate):
    saver = BackgroundSaver(directory.save)
    gate.clear()
    saver.start(moment(1))
    assert not (directory.path / "checkpoint_1.pth").exists()
    assert not saver.wait(0) and not saver.finish(0)
    gate.set()
    saver.finish()
    assert steps_on_disk(directory) == [1]
    assert not any(thread.name == THREAD_NAME for thread in threading.enumerate())


def test_a_full_disk_is_reported_once_and_the_next_save_is_tried(directory, gate):
    saver = BackgroundSaver(directory.save)
    gate.refusal = errno.ENOSPC
    saver.start(moment(1))
    saver.wait()
    assert "training continues, and the next save tries again" in saver.take_refusal()
    assert saver.take_refusal() is None
    gate.refusal = None
    saver.start(moment(2))
    saver.finish()
    assert steps_on_disk(directory) == [2]


def test_best_and_newest_checkpoints_that_did_not_fit_are_saved_later(directory, gate):
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


def test_what_is_a_copy_is_neither_copied_again_nor_kept():
    written, saver = [], BackgroundSaver(lambda state: written.append((state["model"].data_ptr(), state["step"])))
    model, state = torch.ones(1000), moment(1)
    del state["model"]
    pointer, kept = model.data_ptr(), weakref.ref(model)
    saver.start(state, {"model": model})
    del model
    saver.finish()
    assert written == [(pointer, 1)] and kept() is None


def test_a_thread_that_fails_to_start_is_not_joined():
    saver, usual = BackgroundSaver(lambda state: None), threading.stack_size(1 << 50)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            saver.start(moment(1))
    finally:
        threading.stack_size(usual)
    assert saver.end() is None


# --- snapshots ----------------------------------------------------------------------------------------------------


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


def test_a_snapshot_reuses_memory():
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
def test_every_kind_of_tensor_is_copied(tensor):
    copy = snapshot({"x": tensor})["x"]
    assert torch.equal(copy.to_dense(), tensor.to_dense())
    assert (copy.dtype, copy.layout) == (tensor.dtype, tensor.layout)
