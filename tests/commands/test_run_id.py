"""The id of a run: one for each record, from its first start on."""

import json
import re

import pytest

from tests.conftest import TINY, load
from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.format import RUN_ID


def id_of(directory):
    """As config.json and the newest checkpoint have it, alike."""
    recorded = json.loads((directory / "config.json").read_text())["run_id"]
    assert re.fullmatch(RUN_ID, recorded)
    assert load(directory / "last.pth")["run_id"] == recorded
    return recorded


def test_equal_runs_have_ids_of_their_own(train, tmp_path):
    for name in "ab":
        train(tmp_path / name)
    assert id_of(tmp_path / "a") != id_of(tmp_path / "b")


@pytest.mark.parametrize(
    "lose",
    [
        lambda directory: None,
        lambda directory: (directory / "config.json").unlink(),
        lambda directory: (directory / "config.json").write_text("{"),
        lambda directory: (directory / "config.json").write_text('{"run_id": ["x"]}'),
    ],
    ids=["nothing", "config.json", "its end", "its type"],
)
def test_a_run_that_goes_on_keeps_its_id(lose, train, tmp_path):
    train(tmp_path)
    before = id_of(tmp_path)
    lose(tmp_path)
    train(tmp_path, "--epochs", 2)
    assert id_of(tmp_path) == before


def test_a_run_that_had_not_saved_keeps_its_id(cli, train, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError("no")

    with monkeypatch.context() as broken:
        broken.setattr(RunDirectory, "save", fail)
        status, _, _ = cli(*TINY, "--save-dir", tmp_path)
        assert status == 1
    before = json.loads((tmp_path / "config.json").read_text())["run_id"]
    train(tmp_path)
    assert id_of(tmp_path) == before


def test_a_fresh_start_has_a_new_one(train, tmp_path):
    train(tmp_path)
    before = id_of(tmp_path)
    train(tmp_path, "--fresh")
    assert id_of(tmp_path) != before == id_of(tmp_path / "previous-1")


def test_going_back_keeps_it_and_going_on_elsewhere_does_not(train, tmp_path):
    train(tmp_path / "run", "--epochs", 2)
    source = tmp_path / "run" / "checkpoint_1.pth"
    train(tmp_path / "elsewhere", "--epochs", 2, "--resume-from", source)
    elsewhere = id_of(tmp_path / "elsewhere")
    assert elsewhere != id_of(tmp_path / "run")
    assert load(tmp_path / "elsewhere" / "best.pth")["run_id"] == elsewhere
    train(tmp_path / "elsewhere", "--epochs", 3, "--resume-from", source)
    assert id_of(tmp_path / "elsewhere") == elsewhere
    before = id_of(tmp_path / "run")
    train(tmp_path / "run", "--epochs", 2, "--resume-from", source)
    assert id_of(tmp_path / "run") == before
