"""Tests `--download` with published, other and existing contents, and without a network."""

import hashlib
import os
from pathlib import Path

import pytest

from data.har.uci_har import SHA256, download_uci_har, load_uci_har
from tasks.har import HarFlags, HarTask, show_download
from tests.helpers.uci_har_files import assert_is_the_layout, write_layout, zip_folder, zip_in_zip
from trainer.cli import main
from trainer.common.errors import UserError


def checksums(layout: Path) -> dict[str, str]:
    return {name: hashlib.sha256((layout / name).read_bytes()).hexdigest() for name in SHA256}


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("name", ["data", "my.zip"])
def test_har_is_downloaded_as_published(server, layout, tmp_path, nested, name) -> None:
    server.content = zip_folder(layout, "UCI HAR Dataset/")
    if nested:
        server.content = zip_in_zip(server.content)
    path, cache_dir = tmp_path / "new" / name, tmp_path / "cache"
    for _ in range(2):
        download_uci_har(path, cache_dir, show_download, [server.address()], checksums(layout))
        assert_is_the_layout(load_uci_har(path, cache_dir))
    file = path / "UCI HAR Dataset.zip" if name == "data" else path
    assert file.read_bytes() == server.content
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert len(server.requests) == 1


@pytest.mark.parametrize("name", ["train/subject_train.txt", "test/Inertial Signals/body_gyro_y_test.txt"])
def test_har_with_another_checksum_is_reported_and_removed(server, layout, tmp_path, name) -> None:
    server.content = zip_in_zip(zip_folder(layout, "UCI HAR Dataset/"))
    sums = checksums(layout) | {name: "0" * 64}
    with pytest.raises(UserError, match=f": the download, {name}: is not the published file .its sha256 is [0-9a-f]+"):
        download_uci_har(tmp_path / "new", tmp_path / "cache", show_download, [server.address()], sums)
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".lock"]


def test_a_web_page_instead_of_har_is_reported_and_removed(server, layout, tmp_path) -> None:
    server.content = b"<html>We have moved</html>"
    with pytest.raises(UserError, match=r"the download: cannot be read or is damaged .File is not a zip file"):
        download_uci_har(tmp_path / "new", tmp_path / "cache", show_download, [server.address()], checksums(layout))
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".lock"]


@pytest.mark.parametrize("zipped", [True, False])
def test_existing_uci_har_is_verified_and_kept(layout, tmp_path, nobody_listens, zipped) -> None:
    path, file = layout, layout / "train" / "y_train.txt"
    if zipped:
        path = file = tmp_path / "har.zip"
        path.write_bytes(zip_folder(layout, ""))
    arguments = path, tmp_path / "cache", show_download, [nobody_listens], checksums(layout)
    download_uci_har(*arguments)
    changed = file.stat().st_mtime_ns
    write_layout(tmp_path / "other")
    edited = tmp_path / "other" / "train" / "y_train.txt"
    edited.write_text(edited.read_text().replace("1", "2"))
    content = zip_folder(tmp_path / "other", "") if zipped else edited.read_bytes()
    file.write_bytes(content)
    if not zipped:
        os.utime(file, ns=(changed, changed))
        download_uci_har(*arguments)  # not read again: size and time are the verified ones
    os.utime(file, ns=(changed + 1, changed + 1))
    with pytest.raises(UserError, match=r"^--data-dir .*y_train.txt: is not the published file .* Delete this file"):
        download_uci_har(*arguments)
    assert file.read_bytes() == content


@pytest.mark.skipif("LOCKSTEP_DATA" not in os.environ, reason="LOCKSTEP_DATA names no folder with UCI HAR")
def test_the_official_recordings_have_the_official_checksums(server, tmp_path) -> None:
    official = Path(os.environ["LOCKSTEP_DATA"]) / "uci_har" / "UCI HAR Dataset.zip"
    if not official.exists():
        pytest.skip(f"there is no {official}")
    server.content = zip_in_zip(official.read_bytes())
    download_uci_har(tmp_path / "new", tmp_path / "cache", show_download, [server.address()])
    assert (tmp_path / "new" / "UCI HAR Dataset.zip").stat().st_size == len(server.content)


# The command line


@pytest.fixture
def no_network(monkeypatch, nobody_listens) -> None:
    """Sends https through a proxy address at which nothing listens."""
    monkeypatch.setenv("https_proxy", nobody_listens.removesuffix("/file.zip"))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)


@pytest.mark.parametrize("place", [None, "folder", "har.zip"])
def test_without_a_network_one_message_gives_advice(no_network, tmp_path, capsys, signals_restored, place) -> None:
    arguments = ["--download", "--cache-dir", str(tmp_path / "cache"), "--save-dir", str(tmp_path / "run")]
    if place is not None:
        arguments += ["--data-dir", str(tmp_path / place)]
    assert main(["--num-threads", "1", "--device", "cpu", *arguments], several_devices=False) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --download: cannot download")
    assert line.count("https://archive.ics.uci.edu/") == 2 and line.count("Connection refused") == 2
    assert "--data-dir" in line
    assert not list(tmp_path.rglob("*.zip")) and not (tmp_path / "run").exists()


def test_the_flag_verifies_existing_files(layout, tmp_path) -> None:
    """Generated files do not have the official checksums."""
    for flags, cache_dir in (
        (HarFlags(download=True, data_dir=layout), tmp_path / "cache"),
        (HarFlags(download=True), tmp_path),
    ):
        (tmp_path / "uci_har").mkdir(exist_ok=True)
        (tmp_path / "uci_har" / "UCI HAR Dataset.zip").write_bytes(zip_folder(layout, ""))
        with pytest.raises(UserError, match=r"y_train.txt: is not the published file"):
            HarTask(flags, seed=0, cache_dir=cache_dir).splits()


def test_a_missing_folder_is_an_error_only_without_download(tmp_path) -> None:
    (problem,) = HarFlags(data_dir=tmp_path / "missing").problems()
    assert "no such file or folder" in problem and "--download" in problem
    assert HarFlags(data_dir=tmp_path / "missing", download=True).problems() == []
