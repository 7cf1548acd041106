"""Tests which checkpoints a run directory keeps and how it names them, and that an intact one always remains."""

import errno
import os
import shutil

import pytest

from tests.checkpoint.conftest import Crash, checkpoints, names, save
from tests.conftest import TINY, WEIGHTED, contents, load
from trainer.cli import main
from trainer.common.errors import UserError
from trainer.common.files import refusing_disk_errors


def test_an_error_of_the_disk_names_its_file(cli, tmp_path):
    (tmp_path / "logs").touch()
    status, _, lines = cli("--task", WEIGHTED, "--epochs", 1, "--device", "cpu", "--save-dir", tmp_path)
    assert status == 2
    assert f"--save-dir {tmp_path}: cannot write a log: {tmp_path / 'logs'}: File exists; check" in lines[-1]


@pytest.mark.parametrize(("path", "told"), [("run/lock", "--save-dir run: run/lock: "), ("run", "--save-dir run: ")])
def test_a_path_is_named_once(path, told):
    with pytest.raises(UserError, match=rf"^{told}Permission denied$"), refusing_disk_errors("--save-dir run"):
        raise PermissionError(errno.EACCES, "Permission denied", path)


def test_a_link_to_a_missing_folder_is_named(refused, tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "missing")
    told = (
        f"--save-dir {tmp_path / 'run'}: {tmp_path / 'run'} is a link to {tmp_path / 'missing'}, which does not exist"
    )
    refused([told], *TINY, "--save-dir", tmp_path / "run")


# --- kept checkpoints and their names ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "kept"), [(1, {2, 6}), (2, {2, 5, 6}), (9, {1, 2, 3, 4, 5, 6}), (0, set(range(1, 7)))]
)
def test_the_best_and_newest_checkpoints_are_kept(keep, kept, opened):
    directory, _ = opened(keep)
    for epoch in range(1, 7):
        save(directory, epoch, best_epoch=min(epoch, 2))
    assert checkpoints(directory.path) == {f"checkpoint_{epoch}.pth" for epoch in kept}
    again, said = opened(keep)
    assert again.load_newest()["step"] == 60
    assert again.load_best()["step"] == 20
    assert said == []


def test_retention_counts_only_intact_checkpoints(opened):
    """The file is damaged while the run trains."""
    directory, _ = opened(keep=2)
    for epoch in (1, 2, 3):
        save(directory, epoch, best_epoch=1)
    (directory.path / "checkpoint_3.pth").write_bytes(b"damaged")
    save(directory, 4)
    assert checkpoints(directory.path) == {f"checkpoint_{epoch}.pth" for epoch in (1, 2, 3, 4)}
    save(directory, 5)
    assert checkpoints(directory.path) == {f"checkpoint_{epoch}.pth" for epoch in (1, 4, 5)}


def test_retention_keeps_the_last_intact_best_checkpoint(opened):
    """Epoch 2 was the best when it was damaged, and epoch 1 was the best before it."""
    directory, _ = opened(keep=2)
    save(directory, 1, best_epoch=1)
    save(directory, 2, best_epoch=2).write_bytes(b"damaged")
    for epoch in (3, 4, 5):
        save(directory, epoch, best_epoch=2)
    assert checkpoints(directory.path) == {f"checkpoint_{epoch}.pth" for epoch in (1, 2, 4, 5)}


def test_last_best_and_final_are_links(opened):
    directory, _ = opened()
    first, second = save(directory, 1), save(directory, 2)
    directory.mark_final()
    for name, target in {"last": second, "best": first, "final": second}.items():
        assert (directory.path / f"{name}.pth").samefile(target)


def test_links_are_repaired_at_start(opened):
    """A kill between two operations leaves a link missing, or pointing to the wrong checkpoint."""
    directory, _ = opened()
    first, second = save(directory, 1), save(directory, 2)
    (directory.path / "best.pth").unlink()
    (directory.path / "last.pth").unlink()
    os.link(first, directory.path / "last.pth")
    opened()
    assert (directory.path / "best.pth").samefile(first)
    assert (directory.path / "last.pth").samefile(second)


def test_links_become_copies_on_file_systems_without_links(opened, monkeypatch):
    def refuse(*args):
        raise OSError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    directory, _ = opened()
    path = save(directory, 1)
    for name in ("last", "best"):
        copy = directory.path / f"{name}.pth"
        assert not copy.samefile(path)
        assert copy.read_bytes() == path.read_bytes()


def test_evicting_checkpoints_makes_room_for_copies(opened, monkeypatch):
    def refuse(*args):
        raise OSError("no hard links here")

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", refuse)
    directory, _ = opened(keep=1)
    save(directory, 1, best_epoch=1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        for epoch in (2, 3, 4):
            save(directory, epoch, best_epoch=epoch)
            assert checkpoints(directory.path) == {f"checkpoint_{epoch}.pth"}
    last = save(directory, 5, best_epoch=5)
    assert (directory.path / "last.pth").read_bytes() == last.read_bytes()


def test_a_name_is_never_overwritten(opened):
    """A run that went back to epoch 1 saves epoch 2 again."""
    directory, _ = opened(keep=0)
    paths = [save(directory, epoch) for epoch in (1, 2)]
    before = [path.read_bytes() for path in paths]
    again = [save(directory, 2), save(directory, 2)]
    assert len({*paths, *again}) == 4
    assert [path.read_bytes() for path in paths] == before


# --- weights that are not finite ---------------------------------------------------------------------------------


def test_nonfinite_weights_are_never_saved(tmp_path, capsys, signals_restored):
    argv = ["--task", WEIGHTED, "--epochs", "3", "--lr", "1e30", "--num-threads", "1", "--save-dir", str(tmp_path)]
    assert main(argv, several_devices=False) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("error: training diverged: ")
    assert "use a lower --lr (peak learning rate now 1e+30)" in message
    for name in names(tmp_path):
        assert all(bool(value.isfinite().all()) for value in load(tmp_path / name)["model"].values())
    assert not names(tmp_path, "*.tmp")
    assert not (tmp_path / "results.json").exists()


# --- order of writing --------------------------------------------------------------------------------------------


def test_a_kill_between_operations_leaves_the_old_or_the_new_state(tmp_path, opened, disk_operations):
    directory, _ = opened(keep=1)
    operations, failures = disk_operations
    save(directory, 1)
    shutil.copytree(directory.path, tmp_path / "before")
    operations.clear()
    save(directory, 2, best_epoch=2)
    num_operations = len(operations)
    assert num_operations == 9
    directory.release()
    for n in range(num_operations):
        shutil.rmtree(directory.path)
        shutil.copytree(tmp_path / "before", directory.path)
        broken, _ = opened(keep=1)
        operations.clear()
        failures[n] = Crash()
        with pytest.raises(Crash):
            save(broken, 2, best_epoch=2)
        failures.clear()
        again, said = opened(keep=1)
        assert said == [], n
        step = again.load_newest()["step"]
        assert step == (10 if n < 3 else 20), n  # operation 2 puts the new file's checksum into the manifest
        assert again.load_best()["step"] == step
        assert not names(again.path, "*.tmp")
        assert load(again.path / "last.pth")["step"] == step
        save(again, 3, best_epoch=3)
        assert again.load_newest()["step"] == 30


def test_a_disk_that_refuses_writes_keeps_existing_files(opened, disk_operations):
    """The write fails at each of the operations before the new file has its name."""
    directory, _ = opened(keep=1)
    operations, failures = disk_operations
    save(directory, 1)
    good = (directory.path / "checkpoint_1.pth").read_bytes()
    for n in range(5):
        operations.clear()
        failures[n] = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with pytest.raises(
            UserError, match=r"--save-dir .* No space left on device; .* earlier checkpoints are intact"
        ):
            save(directory, 2, best_epoch=2)
        failures.clear()
        assert not names(directory.path, "*.tmp"), n
        assert (directory.path / "checkpoint_1.pth").read_bytes() == good
        directory, said = opened(keep=1)
        assert said == []
        assert directory.load_newest()["step"] == 10
    save(directory, 2, best_epoch=2)
    assert directory.load_newest()["step"] == 20


# --- folders and disks that refuse a run -------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--eval-only"], ["--fresh"]])
@pytest.mark.parametrize("place", ["file", "file/run", "/proc/nowhere/run"])
def test_an_unwritable_folder_is_refused(place, more, refused, tmp_path):
    (tmp_path / "file").write_text("precious")
    directory = tmp_path / place
    reason = "is a file, or one of its parents is; choose" if place.startswith("file") else ""
    refused([f"--save-dir {directory}: {reason}"], *TINY, "--save-dir", directory, *more)
    assert contents(tmp_path) == {"file": b"precious"}


@pytest.mark.parametrize("name", ["train.log", "logs", "logs/baseline", "lock.held"])
def test_symbolic_links_in_a_run_directory_are_refused(name, refused, tmp_path):
    (tmp_path / "target").write_text("unchanged")
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "target")
    refused([f"--save-dir {tmp_path / 'run'}: {name} is a symbolic link"], *TINY, "--save-dir", tmp_path / "run")
    assert (tmp_path / "target").read_text() == "unchanged"
