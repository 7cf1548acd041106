"""The array cache survives concurrent processes, kills and full disks."""

import multiprocessing
import os
import resource
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import trainer.loading.cache
from tests.helpers.machines import not_supported
from trainer.common.errors import UserError
from trainer.loading.cache import cached_arrays

SPAWN = multiprocessing.get_context("spawn")


def small() -> dict[str, np.ndarray]:
    return {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "y": np.arange(3)}


def fail() -> dict[str, np.ndarray]:
    raise AssertionError("was built although it is there")


def build_slowly_and_count(log: Path) -> dict[str, np.ndarray]:
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(0.3)
    return small()


def ask(cache_dir: Path, log: Path, barrier, results) -> None:
    barrier.wait()
    arrays = cached_arrays(cache_dir, "key", lambda: build_slowly_and_count(log))
    results.put(float(arrays["x"].sum()))


def test_an_entry_is_built_once_and_read_back_equal(tmp_path) -> None:
    built = cached_arrays(tmp_path / "new" / "folder", "key", small)
    again = cached_arrays(tmp_path / "new" / "folder", "key", fail)
    for arrays in (built, again):
        assert arrays.keys() == small().keys()
        for name, expected in small().items():
            assert np.array_equal(arrays[name], expected) and arrays[name].dtype == expected.dtype
            assert not arrays[name].flags.writeable
            assert isinstance(arrays[name].base, np.memmap)


def test_concurrent_processes_build_an_entry_once(tmp_path) -> None:
    barrier, results = SPAWN.Barrier(3), SPAWN.Queue()
    log = tmp_path / "log"
    processes = [SPAWN.Process(target=ask, args=(tmp_path, log, barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [66.0] * 3
    for process in processes:
        process.join()
    assert len(log.read_text().splitlines()) == 1


def die_in_the_middle_of_writing(cache_dir: Path) -> None:
    written = []
    save = np.save

    def save_once(*args, **kwargs) -> None:
        if written:
            os.kill(os.getpid(), signal.SIGKILL)
        written.append(save(*args, **kwargs))

    np.save = save_once
    cached_arrays(cache_dir, "key", small)


def test_a_killed_build_leaves_no_seemingly_complete_entry(tmp_path) -> None:
    process = SPAWN.Process(target=die_in_the_middle_of_writing, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert any(tmp_path.rglob("x.npy")), "the kill came too early to prove anything"
    assert cached_arrays(tmp_path, "key", small)["y"].tolist() == [0, 1, 2]


def test_an_error_of_a_build_is_raised_and_the_build_can_be_repeated(tmp_path) -> None:
    def broken() -> dict[str, np.ndarray]:
        raise UserError("the user's data is wrong")

    with pytest.raises(UserError, match="the user's data is wrong"):
        cached_arrays(tmp_path, "key", broken)
    assert cached_arrays(tmp_path, "key", small)["y"].tolist() == [0, 1, 2]


def test_a_link_at_the_name_of_the_lock_does_no_harm(tmp_path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "key.lock").symlink_to(tmp_path / "victim")
    cached_arrays(tmp_path / "cache", "key", small)
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_folder_that_cannot_be_created_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--cache-dir .*file"):
        cached_arrays(tmp_path / "file" / "cache", "key", small)


def write_with_little_room(cache_dir: Path, results) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit then fails, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    try:
        cached_arrays(cache_dir, "key", lambda: {"x": np.zeros(100_000)})
    except UserError as error:
        results.put(str(error))


def test_a_full_disk_is_reported_and_the_partial_file_removed(tmp_path) -> None:
    results = SPAWN.Queue()
    process = SPAWN.Process(target=write_with_little_room, args=(tmp_path, results))
    process.start()
    message = results.get(timeout=60)
    process.join()
    assert f"--cache-dir {tmp_path}" in message
    assert not list(tmp_path.rglob("*.npy"))


@pytest.mark.parametrize(
    ("files", "names"),
    [("x.npy", "x\ny"), ("names.txt", None), ("none", ""), ("none", "x"), ("none", "x\ny\nz")],
)
def test_a_cache_entry_without_a_file_is_rebuilt(files, names, tmp_path) -> None:
    before = cached_arrays(tmp_path, "key", small)
    for path in (tmp_path / "key").glob(files):
        path.unlink()
    if names is not None:
        (tmp_path / "key" / "names.txt").write_text(names)
    after = cached_arrays(tmp_path, "key", small)
    for name, expected in small().items():
        assert np.array_equal(before[name], expected) and np.array_equal(after[name], expected)
    cached_arrays(tmp_path, "key", fail)


def test_a_damaged_entry_is_named(tmp_path) -> None:
    cached_arrays(tmp_path, "key", small)
    (tmp_path / "key" / "x.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(UserError, match=r"--cache-dir.*key.*delete"):
        cached_arrays(tmp_path, "key", fail)


def test_a_complete_entry_is_kept_even_if_a_stale_look_up_misses_it(tmp_path, monkeypatch) -> None:
    """NFS may hide for some time what another machine has stored; deleting mapped files would break that machine."""
    cached_arrays(tmp_path, "key", small)
    before = (tmp_path / "key" / "x.npy").stat().st_ino
    answers = iter([False, False])
    is_complete = trainer.loading.cache._is_complete
    monkeypatch.setattr(trainer.loading.cache, "_is_complete", lambda entry: next(answers, True) and is_complete(entry))
    assert cached_arrays(tmp_path, "key", small)["y"].tolist() == [0, 1, 2]
    assert (tmp_path / "key" / "x.npy").stat().st_ino == before
    assert {path.name for path in tmp_path.iterdir()} == {"key", "key.lock"}


def test_without_kernel_locks_each_process_builds_and_the_first_to_finish_stores(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("fcntl.flock", not_supported)
    barrier, found = threading.Barrier(3), []

    def build() -> dict[str, np.ndarray]:
        barrier.wait(60)
        return small()

    threads = [threading.Thread(target=lambda: found.append(cached_arrays(tmp_path, "key", build))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [float(arrays["x"].sum()) for arrays in found] == [66.0] * 3
    assert len({os.stat(arrays["x"].base.filename).st_ino for arrays in found}) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"key", "key.lock"}


def test_what_killed_builds_left_is_removed_but_a_folder_in_use_is_not(tmp_path) -> None:
    for name, age_s in (("key.1.partial", 7200), ("key.2.partial", 60), ("other.1.partial", 7200)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    cached_arrays(tmp_path, "key", small)
    assert {path.name for path in tmp_path.iterdir()} == {"key", "key.lock", "key.2.partial", "other.1.partial"}
