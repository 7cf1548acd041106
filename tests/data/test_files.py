"""Tests that folders and archives give the same files, and that damage is named."""

import gzip
import io
import multiprocessing
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from data import files as module
from data.files import DataFile, Source, shown, source_at
from tests.helpers.archives import zipped
from trainer.common.errors import UserError

RNG = np.random.default_rng(0)
VISIBLE = {
    name: RNG.bytes(size) for name, size in {"b.wav": 900, "a/2.wav": 0, "a/1.wav": 70_000, "a/3.txt": 5}.items()
}
PACKED = {"a/4.TXT.gz": b"four" * 1000}
HIDDEN = {"._b.wav": b"shadow", "a/.hidden": b"h", ".git/config": b"c"}
STORED = VISIBLE | HIDDEN | {name: gzip.compress(content) for name, content in PACKED.items()}


def write_folder(path: Path, members: dict[str, bytes]) -> Path:
    for name, content in members.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def write_zip(path: Path, members: dict[str, bytes]) -> Path:
    path = path.with_suffix(".zip")
    path.write_bytes(zipped({"a/": b"", **members}))
    return path


def write_tar(path: Path, members: dict[str, bytes], prefix: str = "./") -> Path:
    path = path.with_suffix(".tar.gz")
    with tarfile.open(path, "w:gz") as archive:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE):
            special = tarfile.TarInfo(f"{prefix}link {kind!r}")
            special.type, special.linkname = kind, "/etc/passwd"
            archive.addfile(special)
        for name, content in members.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


WRITERS = {"folder": write_folder, "zip": write_zip, "tar.gz": write_tar}


def opened(path: Path) -> Source:
    source = source_at(path, depth=2, advice="give another")
    assert source is not None
    return source


@pytest.fixture(params=WRITERS)
def source(request, tmp_path) -> Source:
    return opened(WRITERS[request.param](tmp_path / "data", STORED))


def test_files_have_equal_content_from_any_container(source) -> None:
    assert [file.name for file in source.files] == sorted(VISIBLE | PACKED)
    files = {file.name: file for file in source.files}
    for name in [*RNG.permutation([*VISIBLE, *PACKED]), *RNG.permutation([*VISIBLE, *PACKED])]:
        assert files[str(name)].read() == (VISIBLE | PACKED)[str(name)]
    assert (files["a/4.TXT.gz"].bare_name, files["b.wav"].bare_name) == ("4.txt", "b.wav")
    with files["a/4.TXT.gz"].open() as content, io.TextIOWrapper(content) as text:
        assert text.read() == "four" * 1000


def test_a_zip_is_opened_once_for_many_files(tmp_path, monkeypatch) -> None:
    path, times, real = write_zip(tmp_path / "data", STORED), [], module.ZipArchive
    monkeypatch.setattr(module, "ZipArchive", lambda *args: times.append(1) or real(*args))
    assert [file.read() for file in opened(path).files][-1] == VISIBLE["b.wav"]
    assert len(times) == 1


def test_forked_processes_do_not_share_a_file_position_in_a_zip(tmp_path) -> None:
    members = {f"{i}": RNG.bytes(20_000) for i in range(60)}
    source = opened(write_zip(tmp_path / "data", members))

    def read_all() -> None:
        for _ in range(5):
            for file in source.files:
                assert file.read() == members[file.name]

    source.files[0].read()
    processes = [multiprocessing.get_context("fork").Process(target=read_all) for _ in range(3)]
    for process in processes:
        process.start()
    read_all()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]


def test_a_missing_file_is_named_in_the_error(source) -> None:
    with pytest.raises(UserError, match=rf"^--data-dir {source.path}(/|, )a/5.wav: .*; restore this file, or download"):
        DataFile(source, "a/5.wav").read()
    with pytest.raises(UserError, match=r"nowhere: no such file or folder; give another$"):
        opened(source.path / "nowhere")


@pytest.mark.parametrize("name", ["../../outside.wav", "/tmp/outside.wav", "a/../../../outside.wav"])
@pytest.mark.parametrize("write", [write_zip, partial(write_tar, prefix="")])
def test_names_of_paths_are_only_names(write, name, tmp_path) -> None:
    path = write(tmp_path / "data", {name: b"content"})
    assert [(file.name, file.read()) for file in opened(path).files] == [(name, b"content")]
    assert list(tmp_path.iterdir()) == [path] and not Path("/tmp/outside.wav").exists()


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_damage_is_named(kind, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_READ_BYTES", tarfile.RECORDSIZE)  # the last part ends with the archive
    path = WRITERS[kind](tmp_path / "data", VISIBLE)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    cut = [whole[:-length] for length in (1, 4, 9, len(whole) // 2, len(whole))]
    for content in [b"no archive", bytes(flipped), *cut]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"^--data-dir {path}(, a/1.wav)?: cannot be read or is damaged .*again$"):
            [file.read() for file in opened(path).files]


@pytest.mark.parametrize("packing", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damage_in_any_compression_is_named(packing, tmp_path) -> None:
    path = tmp_path / "data.zip"
    with zipfile.ZipFile(path, "w", packing) as archive:
        archive.writestr("ä.wav", bytes(range(256)) * 8)
    whole = path.read_bytes()
    for place in (38, len(whole) // 2, whole.rindex("ä".encode()), len(whole) - 5):
        damaged = bytearray(whole)
        damaged[place : place + 4] = b"\xff" * 4
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"^--data-dir {path}(, ä.wav)?: cannot be read or is damaged .*again$"):
            [file.read() for file in opened(path).files]


def test_long_lists_of_names_are_shortened() -> None:
    assert (shown([]), shown("ba")) == ("no files", "a, b")
    assert shown(f"{i:02}" for i in range(13)).endswith("10, 11, ...")


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_a_tar_header_of_gigabytes_is_refused(kind, tmp_path):
    header = tarfile.TarInfo("long")
    header.type, header.size = kind, 3 << 30
    path = tmp_path / "data.tar.gz"
    path.write_bytes(gzip.compress(header.tobuf(tarfile.GNU_FORMAT) + bytes(10240)))
    with pytest.raises(tarfile.ReadError, match=f"a header of {3 << 30} bytes"):
        list(opened(path).names())
