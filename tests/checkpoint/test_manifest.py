"""A lost or invalid manifest is rebuilt from the checkpoint files."""

import json
import re

import pytest

from tests.checkpoint.conftest import checkpoints, save
from trainer.checkpoint.file import read_checkpoint
from trainer.checkpoint.manifest import CHECKPOINT_NAME, unused_path
from trainer.common.errors import UserError
from trainer.loading.order import Position


def test_checkpoints_within_a_turn_have_their_own_names(tmp_path):
    positions = [Position(0, 1, 8, turn) for turn in range(3)]
    names = [unused_path(tmp_path, position).name for position in positions]
    assert names == ["checkpoint_0_1_8.pth", "checkpoint_0_1_8_1.pth", "checkpoint_0_1_8_2.pth"]
    assert all(re.fullmatch(CHECKPOINT_NAME, name) for name in names)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"null", b'{"checkpoints": [1]}', b"\xff\xfe\x00"])
def test_manifest_lost_or_damaged_is_rebuilt_from_the_files(content, opened):
    directory, _ = opened(keep=2)
    for epoch in (1, 2, 3):
        save(directory, epoch)
    manifest = directory.path / "manifest.json"
    manifest.unlink()
    if content is not None:
        manifest.write_bytes(content)
    again, said = opened(keep=2)
    assert any("rebuilt from 3 checkpoint files" in line for line in said)
    assert (again.path / "best.pth").samefile(again.path / "checkpoint_1.pth")
    save(again, 4)
    assert checkpoints(again.path) == {"checkpoint_1.pth", "checkpoint_3.pth", "checkpoint_4.pth"}
    assert again.load_newest()["step"] == 40


def test_manifest_entry_without_a_file_is_ignored(opened):
    directory, _ = opened()
    save(directory, 1)
    save(directory, 2).unlink()
    (directory.path / "last.pth").unlink()
    again, _ = opened()
    assert again.load_newest()["step"] == 10
    assert (again.path / "last.pth").samefile(again.path / "checkpoint_1.pth")


@pytest.mark.parametrize("file", ["../outside.pth", "/etc/hostname", "config.json", "checkpoint_1.pth/x", 3])
def test_a_manifest_names_only_checkpoints_of_its_directory(file, opened):
    directory, _ = opened()
    path = save(directory, 1)
    outside = directory.path.parent / "outside.pth"
    outside.write_bytes(b"precious")
    manifest = json.loads((directory.path / "manifest.json").read_text())
    manifest["checkpoints"].append({**manifest["checkpoints"][0], "file": file, "step": 99})
    (directory.path / "manifest.json").write_text(json.dumps(manifest))
    again, said = opened()
    assert any("manifest.json is damaged" in line for line in said)
    assert again.load_newest()["step"] == 10
    assert outside.read_bytes() == b"precious"
    assert path.exists()


def test_a_file_that_was_replaced_by_another_checkpoint_is_not_read(opened):
    directory, _ = opened()
    first, second = save(directory, 1), save(directory, 2)
    second.unlink()
    second.write_bytes(first.read_bytes())
    with pytest.raises(UserError, match=r"x.pth: is damaged: its sha256 is not the one in .*manifest.json"):
        read_checkpoint(second, "x.pth")
    (directory.path / "manifest.json").unlink()
    assert read_checkpoint(second, "x.pth")["step"] == 10
