"""Tests the content of a checkpoint file, and that damaged, unsafe and other files are refused."""

import json
import random
import re
import tarfile
from io import BytesIO

import numpy as np
import pytest
import torch
from torch import nn

from examples.own_task import SpiralData
from tests.checkpoint.conftest import save, state_at
from tests.conftest import ROOT, TINY, assert_same_bits, contents, load
from trainer.checkpoint.file import read_checkpoint, size_and_sum, write_checkpoint
from trainer.checkpoint.format import FORMAT_VERSION, Saved, brought_up_to_date, integer, schema_error_of_checkpoint
from trainer.checkpoint.weights import compare
from trainer.cli import main
from trainer.common.errors import UserError


def test_model_entry_loads_into_the_bare_model(tmp_path, signals_restored):
    """Plain PyTorch, without the trainer, reaches the score that the run reports."""
    task = f"{ROOT}/examples/own_task.py:Spirals"
    argv = ["--task", task, "--epochs", "2", "--num-points", "500", "--hidden-units", "8", "--num-threads", "1"]
    assert main([*argv, "--save-dir", str(tmp_path)], several_devices=False) == 0
    model = nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    model.load_state_dict(torch.load(tmp_path / "best.pth", weights_only=True)["model"])
    test = SpiralData(500, noise=0.1, seed=2)
    accuracy = float((model(torch.from_numpy(test.points)).argmax(1).numpy() == test.arms).mean())
    reported = json.loads((tmp_path / "results.json").read_text())["metrics"]["test/accuracy"]
    assert accuracy == pytest.approx(reported)


def test_bare_weights_initialise_a_run_but_cannot_resume_one(tmp_path):
    torch.save({"model": {"weight": torch.zeros(3)}}, tmp_path / "x.pth")
    assert read_checkpoint(tmp_path / "x.pth", "x.pth", only_weights=True)["model"]["weight"].shape == (3,)
    with pytest.raises(UserError, match=r"contains weights, but not .* with --init-from"):
        read_checkpoint(tmp_path / "x.pth", "x.pth")


def test_a_tensor_that_looks_like_a_zip_end_record_is_read(tmp_path):
    looks = torch.frombuffer(bytearray(b"PK\x05\x06" + bytes(18)), dtype=torch.uint8)
    state = state_at(1) | {"model": {"weight": looks}}
    assert write_checkpoint(state, tmp_path / "x.pth") == size_and_sum(tmp_path / "x.pth")
    assert torch.equal(read_checkpoint(tmp_path / "x.pth", "x.pth")["model"]["weight"], looks)


# --- damage ------------------------------------------------------------------------------------------------------


def test_without_a_manifest_every_changed_bit_is_detected_or_harmless(opened):
    """Some bits of an archive, such as padding, have no meaning."""
    directory, _ = opened()
    path = save(directory, 1)
    intact, data = load(path), path.read_bytes()
    draw = random.Random(0)
    attributes = [match.start() + 38 for match in re.finditer(b"PK\x01\x02", data)]
    bits = [8 * byte + 4 for byte in attributes] + [draw.randrange(8 * len(data)) for _ in range(500)]
    num_found = 0
    for bit in bits:
        spoiled = bytearray(data)
        spoiled[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoiled)
        try:
            assert_same_bits(intact, read_checkpoint(path, "x.pth"))
        except UserError as error:
            assert "damaged" in str(error), bit
            num_found += 1
    assert num_found > len(bits) / 2


def test_a_file_without_checksums_is_read(tmp_path):
    """torch can be told to write no checksums."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"model": {"weight": torch.full((50,), 2.0)}}, tmp_path / "x.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_checkpoint(tmp_path / "x.pth", "x.pth", only_weights=True)["model"]["weight"].sum() == 100


# --- other content -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [{"position": {}}, [1, 2], {"model": 1}, {"model": {"weight": 1}}])
def test_different_content_is_refused(content, tmp_path):
    torch.save(content, tmp_path / "x.pth")
    with pytest.raises(UserError, match=r"x.pth: is not a checkpoint"):
        read_checkpoint(tmp_path / "x.pth", "x.pth")


def test_arrays_of_numpy_are_refused_without_a_traceback(tmp_path):
    torch.save({"model": {"weight": np.zeros(3)}, "position": {}}, tmp_path / "x.pth")
    with pytest.raises(UserError, match="refused"):
        read_checkpoint(tmp_path / "x.pth", "x.pth")


@pytest.fixture(params=["empty", "text", "truncated", "other"])
def bad_file(request, train, tmp_path):
    """Returns a file that is not a checkpoint, and why it is refused."""
    path = tmp_path / "bad.pth"
    if request.param == "empty":
        path.touch()
    elif request.param == "text":
        path.write_text("These are not the weights you are looking for.\n" * 100)
    elif request.param == "truncated":
        train(tmp_path / "source")
        path.write_bytes((tmp_path / "source" / "last.pth").read_bytes()[:5000])
    else:
        torch.save({"state_dict": {}}, path)
    return path, "is not a checkpoint" if request.param == "other" else "is damaged"


@pytest.mark.parametrize("flag", ["--resume-from", "--init-from"])
def test_a_file_that_is_not_a_checkpoint_is_refused(flag, bad_file, train, refused, tmp_path):
    path, reason = bad_file
    refused([f"{flag} {path}: {reason}"], *TINY, "--save-dir", tmp_path / "new", flag, path)
    assert not contents(tmp_path / "new")
    train(tmp_path / "new")  # the refusal left nothing in the folder


# --- files of other programs and other versions ------------------------------------------------------------------


def other_format(kind, path):
    if kind == "TorchScript":
        torch.jit.script(nn.Linear(2, 2)).save(str(path))
    else:  # as torch wrote it before its zip format
        with tarfile.open(path, "w") as archive:
            for name in ("storages", "tensors", "pickle", "sys_info"):
                part = tarfile.TarInfo(name)
                part.size = 8
                archive.addfile(part, BytesIO(bytes(8)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["TorchScript", "tar"])
def test_no_message_advises_to_load_unsafely(kind, tmp_path):
    """torch's own message advises to set weights_only=False."""
    other_format(kind, tmp_path / "x.pth")
    with pytest.raises(UserError, match=r"^x.pth: refused, because a TorchScript .*; no code was run") as refusal:
        read_checkpoint(tmp_path / "x.pth", "x.pth", only_weights=True)
    assert "weights_only" not in str(refusal.value)


@pytest.mark.parametrize("content", [b"", b"epoch,loss\n1,2\n", b"hello\n", b"GIF89a...", b"\x89PNG\r\n\x1a\n0000"])
def test_a_file_of_another_kind_is_refused(content, tmp_path):
    (tmp_path / "x.pth").write_bytes(content)
    with pytest.raises(UserError, match=r"^x.pth: is damaged or not a checkpoint(; no code in the file was run)?$"):
        read_checkpoint(tmp_path / "x.pth", "x.pth", only_weights=True)


def test_a_newer_format_is_refused_without_changes(train, refused, tmp_path):
    """No file is reported as damaged, set aside or replaced, with a manifest and without one."""
    run = tmp_path / "run"
    train(run)
    path, manifest = run / "checkpoint_1.pth", run / "manifest.json"
    torch.save(load(path) | {"format_version": FORMAT_VERSION + 1}, path)
    rewritten = json.loads(manifest.read_text())
    rewritten["checkpoints"][-1] |= size_and_sum(path)
    manifest.write_text(json.dumps(rewritten))
    message = f"{path}: has checkpoint format {FORMAT_VERSION + 1}, but this trainer reads only formats up to"
    for _ in range(2):
        before = contents(run, ("lock", "state.json"))
        refused([message], *TINY, "--epochs", 2, "--save-dir", run)
        assert contents(run, ("lock", "state.json")) == before
        manifest.unlink(missing_ok=True)
    for flag in ("--resume-from", "--init-from"):
        refused([f"{flag} {message}"], *TINY, "--save-dir", tmp_path / "new", flag, path)
    assert not contents(tmp_path / "new")


def test_a_checkpoint_without_a_version_has_version_1():
    """The first version wrote a checksum of the entries."""
    old = state_at(1) | {"checksum": "0" * 64}
    assert_same_bits(brought_up_to_date(old), state_at(1) | {"format_version": FORMAT_VERSION})
    for number in ("2", 0, None, True, 2.0):
        with pytest.raises(ValueError, match=r"format_version .*: must be a whole number, at least 1"):
            brought_up_to_date(old | {"format_version": number})


def test_older_files_use_the_default_of_a_new_entry():
    """A file of the version that added the entry must contain it."""
    entries = {"step": Saved(integer()), "restarts": Saved(integer(), since=2, default=0)}
    assert brought_up_to_date({"step": 3}, entries)["restarts"] == 0
    assert "restarts" not in brought_up_to_date({"step": 3, "format_version": 2}, entries)
    assert "step" not in brought_up_to_date({}, entries)


@pytest.mark.parametrize("missing", ["skipped_in_a_row", "position", "totals", "run_id"])
def test_a_checkpoint_that_lacks_an_entry_does_not_resume(missing, tmp_path):
    state = state_at(2)
    del state[missing]
    torch.save(state, tmp_path / "x.pth")
    with pytest.raises(UserError, match=rf"^x.pth: contains weights, but not {missing}; load the weights with --init"):
        read_checkpoint(tmp_path / "x.pth", "x.pth")
    assert schema_error_of_checkpoint(state, resumable=True) == f"{missing} is missing"
    assert read_checkpoint(tmp_path / "x.pth", "x", only_weights=True)["model"].keys() == state["model"].keys()


def test_unreadable_content_is_not_written(tmp_path):
    for state, schema_error in [
        (state_at(1) | {"data_facts": {"x": object()}}, "data_facts.x <object object"),
        (state_at(1) | {"model": {"weight": torch.full((3,), torch.nan)}}, "model.weight contains NaN"),
        (state_at(1) | {"step": -1}, "step -1: must be a whole number"),
    ]:
        with pytest.raises(
            UserError, match=rf"nothing was saved, because the new file could not be read back: {schema_error}"
        ):
            write_checkpoint(state, tmp_path / "x.pth")
        assert not list(tmp_path.iterdir())


def test_weights_of_an_unsupported_dtype_are_named(tmp_path):
    comparison = compare(nn.Linear(1, 2, bias=False), {"weight": torch.ones(2, 1, dtype=torch.uint8).view(torch.bits8)})
    assert comparison.differences == ["weight has type torch.bits8 in the file and torch.float32 in the model"]
