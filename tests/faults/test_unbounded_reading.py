"""Endless files, and files that unpack to more than any valid file, are refused before they fill the memory."""

import gzip
import os
import pickle
import resource
import shutil
import threading
import time
import tracemalloc
import zipfile

import pytest
import torch

import data.files
import data.speech.sources
from data.files import TarGz, Zip
from data.har.recording import read_new_windows
from data.interactions.reader import load_interactions
from data.speech.reader import load_corpus, read_recordings
from data.speech.text import Alphabet
from data.table_files import Reading
from data.tabular.reader import read_table
from models.speech.language_model import read_arpa
from tests.checkpoint.conftest import state_at
from tests.conftest import TINY, load
from tests.helpers.archives import tarred, zipped
from trainer.checkpoint.file import read_checkpoint, read_settings
from trainer.common.errors import UserError

MEMORY = 200 << 20
"""Bytes that Python may allocate in a test, although some files unpack to 3 GB."""
ONE_LINE = gzip.compress(b"x" * (48 << 20)) * 64
"""Consecutive gzip members: 3 GB in 3 MB."""


@pytest.fixture(autouse=True)
def little_memory():
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MEMORY


@pytest.fixture
def pipe(tmp_path):
    """Returns a named pipe without a writer; opening it to read would block forever."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    # Unblocks a test that fails.
    rescue = threading.Timer(20, lambda: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)))
    rescue.daemon = True
    rescue.start()
    yield path
    rescue.cancel()
    rescue.join()


LINES = {
    "ratings.txt.gz": lambda path: load_interactions(path, 1, path.parent / "cache"),
    "table.csv.gz": lambda path: read_table(path),
    "words.arpa.gz": lambda path: read_arpa(path),
}


@pytest.mark.parametrize(
    "name", [pytest.param("ratings.txt.gz", marks=pytest.mark.slow), "table.csv.gz", "words.arpa.gz"]
)
def test_one_line_of_3_gb_is_refused(name, tmp_path):
    (tmp_path / name).write_bytes(ONE_LINE)
    with pytest.raises((UserError, OSError), match="has a line of more than 1,048,576 characters"):
        LINES[name](tmp_path / name)


def test_a_device_in_place_of_a_file_is_refused(run_here, tmp_path):
    for argv in (
        ["--predict", "/dev/zero"], ["--config", "/dev/zero"], ["--resume-from", "/dev/zero"],
        ["--task", "seqrec", "--data-dir", "/dev/zero"], ["--task", "kgat", "--data-dir", "/dev/zero"],
        ["--task", "speech", "--data-dir", "/dev/zero"],
        ["--task", "tabular", "--label", "x", "--data-dir", "/dev/zero"],
    ):  # fmt: skip
        _, err = run_here(*argv, "--save-dir", tmp_path / "new", "--num-threads", 1, "--device", "cpu", status=2)
        assert err.startswith("error: --") and "/dev/zero: " in err, (argv, err)


def test_readers_of_new_data_refuse_devices_and_pipes(pipe, tmp_path):
    (tmp_path / "x.wav").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"x.wav: cannot be read: is a device or a pipe, not a regular file"):
        read_recordings(tmp_path / "x.wav", 8000)
    with pytest.raises(UserError, match="is a device or a pipe, not a regular file"):
        read_new_windows(pipe)


def test_a_device_named_in_a_speech_manifest_is_refused(tmp_path):
    (tmp_path / "all.jsonl").write_text('{"audio_path": "/dev/zero", "text": "zero"}\n')
    with pytest.raises(UserError, match="is a device or a pipe, not a regular file"):
        load_corpus(tmp_path / "all.jsonl", tmp_path)


def test_pipes_in_place_of_the_files_of_a_run_count_as_damaged(train, pipe, tmp_path):
    train(tmp_path / "run")
    for name in ("config.json", "manifest.json", "memory.json", "results.json", "state.json"):
        (tmp_path / "run" / name).unlink(missing_ok=True)
        os.link(pipe, tmp_path / "run" / name)
    out = train(tmp_path / "run", "--epochs", 2)
    for name in ("config.json", "manifest.json", "memory.json"):
        assert f"{name} is damaged" in out
    assert "Resuming after optimizer step 3" in out


def test_a_pipe_for_settings_is_refused(pipe, refused, tmp_path):
    refused([f"--config {pipe}: cannot be read: is a device or a pipe, not a regular file"], *TINY, "--config", pipe)


def test_settings_from_the_shell_are_read(run_here, tmp_path):
    """The shell turns `--config <(...)` into `--config /dev/fd/N`."""
    read, write = os.pipe()
    os.write(write, b"epochs = 3\n")
    os.close(write)
    out, _ = run_here("--config", f"/dev/fd/{read}", "--print-config")
    os.close(read)
    assert "epochs = 3" in out


def test_a_checkpoint_with_compressed_entries_is_refused(train, tmp_path):
    train(tmp_path / "run")
    packed, stored = tmp_path / "packed.pth", tmp_path / "stored.pth"
    torch.save(load(tmp_path / "run" / "last.pth"), stored)
    with zipfile.ZipFile(stored) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for part in old.namelist():
            new.writestr(part, old.read(part))
    read_checkpoint(stored, "x")
    for verified in (False, True):  # an untrusted run has matching checksums
        with pytest.raises(UserError, match="one of its entries is compressed"):
            read_checkpoint(packed, "x", verified=verified)


def test_a_checkpoint_with_two_lists_of_entries_is_refused(tmp_path):
    """zipfile reads the list in front of the end record, and torch the list at the stated position."""
    torch.save({"model": {}}, tmp_path / "stored.pth")
    (tmp_path / "two.pth").write_bytes(bytes(100) + (tmp_path / "stored.pth").read_bytes())
    with pytest.raises(UserError, match="it has bytes in front of its first entry"):
        read_checkpoint(tmp_path / "two.pth", "two.pth")


BOMBS = {
    "bytes": b"c__builtin__\nbytearray\nJ\0\0\0\x7f\x85R",
    "tensor": b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n)R",
}
"""Pickles of a few bytes that could allocate gigabytes."""


@pytest.mark.parametrize("form", ["zip", "legacy", "end of a zip behind legacy"])
@pytest.mark.parametrize("kind", BOMBS)
def test_a_checkpoint_that_grows_when_it_is_read_is_refused(kind, form, little_time_and_memory, tmp_path):
    pickled, path = b"\x80\2}(X\5\0\0\0model}X\1\0\0\0x" + BOMBS[kind] + b"su.", tmp_path / "x.pth"
    if form == "zip":
        path.write_bytes(
            zipped({"x/data.pkl": pickled, "x/version": b"3\n", "x/byteorder": b"little"}, zipfile.ZIP_STORED)
        )
    else:
        head = b"".join(pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {}))
        path.write_bytes(head + pickled + pickle.dumps([], 2) + (zipped({}) if "end" in form else b""))
    with pytest.raises(UserError, match=r"^x.pth: (refused|is damaged).*"):
        read_checkpoint(path, "x.pth", only_weights=True)
    assert read_settings(path) is None


def repeated(number):
    return torch.zeros(1).expand(number)


def without_content(number):
    return torch.empty(number, device="meta")


def in_a_billion_rows(number):
    return torch.sparse_coo_tensor(torch.tensor([[0], [5]]), torch.ones(1), (number, 7))


def overlapping(number):
    number = int(number**0.5)
    return torch.zeros(2 * number).as_strided((number, number), (1, 1))


def lists_in_lists(number):
    value = []
    while number > 1:
        value, number = [value, value], number / 2
    return value


HUGE = {
    "a value repeated": (repeated, 10**12), "and again": (repeated, 3 * 10**9), "no content": (without_content, 10**12),
    "few values": (in_a_billion_rows, 10**12), "rows that overlap": (overlapping, 10**10),
    "lists": (lists_in_lists, 2**60),
}  # fmt: skip


@pytest.fixture
def little_time_and_memory():
    """Limits the memory of the process, because tracemalloc does not see the memory of tensors."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    yield
    assert time.monotonic() - began < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


@pytest.mark.filterwarnings("ignore:Sparse invariant")
@pytest.mark.parametrize("kind", HUGE)
def test_a_checkpoint_that_declares_too_large_tensors_is_refused_or_small(kind, little_time_and_memory, tmp_path):
    build, number = HUGE[kind]
    huge, refused = build(number), 0
    optimizer = {"state": {0: {"exp_avg": huge}}, "param_groups": [{"params": [0], "lr": 0.1}]}
    for entry in (
        {"model": {"weight": huge}}, {"optimizers": {"train": [optimizer]}}, {"totals": {"train": {"loss": huge}}},
        {"data_facts": {"x": huge}}, {"extra": huge},
    ):  # fmt: skip
        torch.save(state_at(1) | entry, tmp_path / "x.pth")
        for only_weights in (False, True):
            try:
                read_checkpoint(tmp_path / "x.pth", "x.pth", only_weights=only_weights)
            except UserError as error:
                assert str(error).startswith("x.pth: is "), error
                refused += 1
    assert refused >= 4


def test_a_tensor_of_endless_size_is_refused_by_every_reader(train, cli, little_time_and_memory, tmp_path):
    train(tmp_path / "run")
    state = load(tmp_path / "run" / "last.pth")
    state["model"][next(iter(state["model"]))] = repeated(10**12)
    torch.save(state, tmp_path / "bad.pth")
    for flags in (["--init-from"], ["--resume-from"], ["--eval-only", "--resume-from"]):
        status, _, (line,) = cli(*TINY, *flags, tmp_path / "bad.pth", "--save-dir", tmp_path / "new")
        assert status == 2 and "it needs far more memory than its size implies" in line
    shutil.copy(tmp_path / "bad.pth", tmp_path / "run" / "last.pth")  # the newest checkpoint has the same inode
    (tmp_path / "run" / "manifest.json").unlink()
    assert cli(*TINY, "--save-dir", tmp_path / "run")[0] == 2


def test_many_views_of_one_tensor_need_no_more_memory_than_their_file(tmp_path):
    weight = torch.randn(1500, 1500)
    state = {f"layer{number}": weight for number in range(20)} | {
        "transposed": weight.T,
        "table": torch.ones(1).expand(9),
    }
    torch.save(state, tmp_path / "x.pth")
    found = read_checkpoint(tmp_path / "x.pth", "x.pth", only_weights=True)["model"]
    assert torch.equal(found["transposed"], weight.T) and len(found) == 22


# --- members of archives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["zip", "tar.gz", "gz in tar.gz", "folder"])
def test_an_archive_member_that_unpacks_to_too_much_is_refused(kind, monkeypatch, tmp_path):
    monkeypatch.setattr(data.files, "MOST_WHOLE", 1 << 20)
    content = bytes((1 << 20) + 1)
    if kind == "folder":
        (tmp_path / "train.txt.gz").write_bytes(gzip.compress(content))
        source = data.files.Folder(tmp_path)
    elif kind == "zip":
        (tmp_path / "x.zip").write_bytes(zipped({"train.txt": content}))
        source = Zip(tmp_path / "x.zip")
    else:
        packed = tarred({"train.txt.gz": gzip.compress(content)} if "gz in" in kind else {"train.txt": content})
        (tmp_path / "x.tar.gz").write_bytes(packed)
        source = TarGz(tmp_path / "x.tar.gz")
    with pytest.raises(UserError, match="is larger than 1 MiB, the limit for such a file"):
        source.files[0].read()


def test_sound_in_an_archive_that_unpacks_to_too_much_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(data.speech.sources, "MOST_SOUND", 1 << 20)
    for name in ("x.zip", "x.tar.gz"):
        pack = zipped if name == "x.zip" else tarred
        (tmp_path / name).write_bytes(pack({"a.wav": bytes((1 << 20) + 1), "a.txt": b"zero"}))
        with pytest.raises(UserError, match="is larger than 1 MiB"):
            load_corpus(tmp_path / name, tmp_path, reading=Reading(on_bad="refuse"))


@pytest.mark.parametrize("name", ["x.zip", "x.tar.gz"])
def test_an_archive_of_sound_that_unpacks_to_too_much_in_total_is_refused(name, monkeypatch, tmp_path):
    monkeypatch.setattr(data.speech.sources, "MOST_SOUND", 1 << 20)
    pack = zipped if name == "x.zip" else tarred
    (tmp_path / name).write_bytes(pack({f"{number}.wav": bytes(1 << 20) for number in range(8)}))
    with pytest.raises(UserError, match=rf"{name}: unpacks to more than [12],\d+,\d+ bytes, 100 times its size"):
        load_corpus(tmp_path / name, tmp_path, reading=Reading(on_bad="refuse"))


def test_an_alphabet_file_that_is_too_large_is_refused(tmp_path):
    with (tmp_path / "alphabet").open("wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(UserError, match="is larger than 64 MiB"):
        Alphabet.from_file(tmp_path / "alphabet", "characters")
