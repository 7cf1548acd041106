"""Tests examples/tar_shards.py: equal samples on any number of processes and after a kill, memory, and bad files."""

import io
import os
import signal
import tarfile
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from examples.tar_shards import MOST_MEMBER, TarFlags, TarSamples, TarShards, index_of, stripes, write_shard
from tests.conftest import ROOT, assert_same_bits, largest_difference, load
from tests.helpers import forks
from trainer import SampleKeys, UserError
from trainer.loading.order import split_global_batch

SIZES = (7, 0, 12, 5, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for number, size in enumerate(SIZES):
        write_shard(folder / f"train-{number}.tar", size, seed=number)
    for name in ("val", "test"):
        write_shard(folder / f"{name}-0.tar", 4, seed=9)
    return folder


@pytest.fixture
def task(folder, tmp_path):
    return TarShards(TarFlags(folder), seed=3, cache_dir=tmp_path)


def tar_of(path: Path, *fields: tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in fields:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def npy(array) -> bytes:
    content = io.BytesIO()
    np.save(content, array, allow_pickle=True)
    return content.getvalue()


PICTURE = npy(np.zeros((32, 32), np.uint8))


# --- which samples ---------------------------------------------------------------------------------------------------


def test_every_sample_is_read_once(task):
    rngs = [np.random.default_rng(number) for number in range(len(SIZES))]
    expected = [stripes(i % 4, rng) for rng, size in zip(rngs, SIZES, strict=True) for i in range(size)]
    train, seen = task.splits()["train"], []
    for batch in task.order("train", 1, 4):
        samples = train.__getitems__(SampleKeys(batch, 1))
        assert np.array_equal(samples["picture"], [expected[i] for i in batch])
        seen += batch.tolist()
    assert sorted(seen) == list(range(sum(SIZES))) and seen != sorted(seen)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_has_the_same_samples_on_any_number_of_processes(world_size, task):
    for batch in task.order("train", 0, 5):
        shares = [split_global_batch(batch, (rank, world_size), 2, 0) for rank in range(world_size)]
        counted = [keys.index for parts in shares for keys in parts if not keys.placeholder]
        assert sorted(np.concatenate(counted)) == sorted(batch)


@pytest.fixture(scope="module")
def train(folder, environment, tmp_path_factory):
    """Trains with a save after each step and a worker that reads ahead."""
    base = tmp_path_factory.mktemp("runs")

    def run(name, world_size=1, kill_at=None):
        argv = [
            "--task", f"{ROOT / 'examples' / 'tar_shards.py'}:TarShards", "--shards", folder, "--device", "cpu",
            "--num-threads", 1, "--epochs", 3, "--batch-size", 2, "--global-batch-size", 5, "--dtype", "float64",
            "--save-every-steps", 1, "--keep-checkpoints", 0, "--num-workers", 1, "--save-dir", base / name,
        ]  # fmt: skip
        out = base / f"{name}.txt"
        if world_size > 1:
            assert forks.run_group([*argv, "--multi-gpu", "ddp"], world_size, environment, out) == [0] * world_size
            return base / name
        process, until = forks.start(argv, environment, out, out), time.monotonic() + 120
        while kill_at and not (base / name / kill_at).exists() and time.monotonic() < until:
            time.sleep(0.002)
        if kill_at:
            process.kill()
        process.join(120)
        assert process.exitcode == (-signal.SIGKILL if kill_at else 0), out.read_text()
        return base / name

    return run


@pytest.fixture(scope="module")
def unbroken(train):
    return load(train("unbroken") / "final.pth")


def test_a_run_killed_within_an_epoch_resumes_bit_identically(train, unbroken):
    killed = train("killed", kill_at="checkpoint_1_0_10.pth")
    assert not (killed / "final.pth").exists()
    assert_same_bits(load(train("killed") / "final.pth"), unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_more_processes_give_the_same_weights(world_size, train, unbroken):
    assert largest_difference(load(train(str(world_size), world_size) / "final.pth"), unbroken) < 1e-9


# --- memory ----------------------------------------------------------------------------------------------------------


def test_an_epoch_takes_less_memory_than_a_shard(tmp_path):
    num_samples, num_shards = 400, 5
    picture = PICTURE + bytes(10_000)  # bytes after an array are not read
    for number in range(num_shards):
        fields = [field for i in range(num_samples) for field in ((f"{i}.npy", picture), (f"{i}.cls", b"1"))]
        tar_of(tmp_path / f"train-{number}.tar", *fields)
    for name in ("val", "test"):
        write_shard(tmp_path / f"{name}-0.tar", 1, seed=0)
    task = TarShards(TarFlags(tmp_path), seed=0, cache_dir=tmp_path / "cache")
    train = task.splits()["train"]
    tracemalloc.start()
    for batch in task.order("train", 0, 8):
        train.__getitems__(SampleKeys(batch, 0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < num_samples * len(picture)  # the size of a shard


def test_shards_are_scanned_once(task, monkeypatch):
    assert len(task.splits()["train"]) == sum(SIZES)
    monkeypatch.setattr("examples.tar_shards.index_of", lambda path: pytest.fail(f"reads {path}"))
    assert len(TarShards(task.config, seed=3, cache_dir=task.cache_dir).splits()["train"]) == sum(SIZES)


# --- damaged shards --------------------------------------------------------------------------------------------------


def damaged(folder, change):
    """Writes a shard, changes its bytes, and returns its path."""
    path = folder / "train-0.tar"
    write_shard(path, 6, seed=0)
    path.write_bytes(change(path.read_bytes()))
    return path


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: b"", "empty file"),
        (lambda content: content[:700], "of 1152 bytes"),
        (lambda content: content[: 2560 * 2], "no member and no end at byte 5120"),
        (lambda content: content[:3072] + b"?" * 512 + content[3584:], "no member and no end at byte 3072"),
        (lambda content: b"\x1f\x8b" + content, "truncated header|invalid header|bad checksum"),
    ],
    ids=["empty", "within a member", "between members", "header", "compressed"],
)
def test_a_damaged_shard_is_named(change, reason, tmp_path):
    with pytest.raises(UserError, match=rf"^--shards: .*train-0\.tar cannot be read or is damaged \(.*({reason})"):
        index_of(damaged(tmp_path, change))


def test_a_sample_that_lacks_a_field_is_named(tmp_path):
    with pytest.raises(UserError, match=r"a\.tar cannot be read or is damaged \(x/2 has no \.cls\)"):
        index_of(tar_of(tmp_path / "a.tar", ("x/1.npy", PICTURE), ("x/1.cls", b"1"), ("x/2.npy", PICTURE)))


@pytest.mark.parametrize(
    ("picture", "label", "reason"),
    [
        (npy(np.array([{}])), b"1", "allow_pickle=False"),
        (npy(np.zeros((32, 31), np.uint8)), b"1", r"uint8 of shape \(32, 31\)"),
        (PICTURE.replace(b"(32, 32)", b"(3 << 9)"), b"1", "malformed"),
        (PICTURE[:-1], b"1", "EOF"),
        (PICTURE, b"4", "class 4"),
        (PICTURE, b"one", "invalid literal"),
    ],
)
def test_a_damaged_sample_is_named(picture, label, reason, tmp_path):
    path = tar_of(tmp_path / "a.tar", ("1.npy", PICTURE), ("1.cls", b"1"), ("2.npy", picture), ("2.cls", label))
    samples = TarSamples([path], tmp_path / "cache")
    samples.__getitems__(SampleKeys(np.array([0]), 0))
    with pytest.raises(UserError, match=rf"^--shards: sample 1 of .*a\.tar is damaged \(.*{reason}"):
        samples.__getitems__(SampleKeys(np.array([0, 1]), 0))


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_an_unbounded_size_is_refused(kind, tmp_path):
    """The file has a hole of 1 GiB, as the content of a member or of the header of one."""
    header = tarfile.TarInfo("1.npy")
    header.type, header.size = kind, 1 << 30
    path = tmp_path / "a.tar"
    path.write_bytes(header.tobuf())
    os.truncate(path, (1 << 30) + 10240)
    tracemalloc.start()
    with pytest.raises(UserError, match=r"a\.tar cannot be read or is damaged \(.*107374"):
        index_of(path)
    assert tracemalloc.get_traced_memory()[1] < MOST_MEMBER / 64
    tracemalloc.stop()


def test_links_and_paths_cannot_leave_the_folder(tmp_path):
    """Paths in a shard serve only as names, and no file is written."""
    inside = tmp_path / "inside"
    inside.mkdir()
    path = tar_of(
        inside / "a.tar", ("../../1.npy", PICTURE), ("../../1.cls", b"1"), ("/etc/2.npy", PICTURE), ("/etc/2.cls", b"2")
    )
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("3.npy")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    samples = TarSamples([path], tmp_path / "cache")
    assert samples.__getitems__(SampleKeys(np.arange(2), 0))["label"].tolist() == [1, 2] and len(samples) == 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cache", "inside"]
    assert [entry.name for entry in inside.iterdir()] == ["a.tar"]


def test_an_empty_folder_is_refused(refused, tmp_path):
    refused(
        [f"--shards {tmp_path}: contains no train-*.tar"],
        "--task",
        "examples/tar_shards.py:TarShards",
        "--shards",
        tmp_path,
    )
