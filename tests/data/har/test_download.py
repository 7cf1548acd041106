"""Tests downloads from a local server: complete, broken, wrong, missing, and by two processes at once."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.error import URLError
from urllib.request import Request, build_opener

import numpy as np
import pytest

from data.har.download import HttpsOnly, fetch
from tasks.har import show_download
from tests.conftest import ROOT
from tests.helpers.machines import not_supported
from trainer.common.errors import UserError

CONTENT = np.random.default_rng(0).bytes(300_000)
HALF = len(CONTENT) // 2


@pytest.fixture
def server(server):
    server.content = CONTENT
    return server


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "new" / "folder" / "file.zip"


def verify_content(path: Path) -> None:
    assert path.name.endswith(".partial")
    if path.read_bytes() != CONTENT:
        raise UserError("train/y_train.txt: is not the published file")


class RecordedProgress(list):
    """List of [address, expected bytes, received bytes], one per download that began."""

    @contextmanager
    def __call__(self, address: str, num_bytes: int | None, file: IO[bytes]):
        self.append([address, num_bytes, 0])
        yield file
        self[-1][2] = file.tell()


def get(target: Path, *addresses: str) -> RecordedProgress:
    progress = RecordedProgress()
    fetch(addresses, target, verify_content, progress)
    return progress


def assert_only(target: Path) -> None:
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def assert_nothing_left(target: Path) -> None:
    assert [path.name for path in target.parent.iterdir()] == [f"{target.name}.lock"]


@pytest.mark.parametrize("says_length", [True, False])
def test_a_complete_download_is_kept(server, target, says_length) -> None:
    server.says_length = says_length
    num_bytes = len(CONTENT) if says_length else None
    assert get(target, server.address()) == [[server.address(), num_bytes, len(CONTENT)]]
    assert_only(target)
    assert server.requests == ["file.zip"]


def test_an_existing_file_is_not_downloaded_again(server, target) -> None:
    get(target, server.address())
    server.shutdown()
    server.server_close()
    assert get(target, server.address()) == []
    assert_only(target)
    assert len(server.requests) == 1


def test_the_remains_of_a_killed_download_are_replaced(server, target) -> None:
    target.parent.mkdir(parents=True)
    target.with_name("file.zip.partial").write_bytes(b"x" * (len(CONTENT) + 10))
    get(target, server.address())
    assert_only(target)


# Downloads that fail


@pytest.mark.parametrize(
    ("chunked", "reason"),
    [(False, f"the connection ended {len(CONTENT) - HALF} bytes too early"), (True, "IncompleteRead")],
)
def test_a_broken_download_leaves_nothing(server, target, chunked, reason) -> None:
    server.chunked, server.cut_after = chunked, [HALF]
    with pytest.raises(UserError, match=reason):
        get(target, server.address())
    assert_nothing_left(target)
    get(target, server.address())
    assert_only(target)


@pytest.mark.parametrize("says_length", [True, False])
def test_a_download_that_is_too_large_is_refused(server, target, says_length, monkeypatch) -> None:
    monkeypatch.setattr("data.har.download.MOST_WHOLE", len(server.content) - 1)
    server.says_length = says_length
    with pytest.raises(UserError, match=r"sends more than [0-9,]+ bytes"):
        get(target, server.address())
    assert_nothing_left(target)


def test_links_at_the_names_of_temporary_files_are_not_followed(server, target, tmp_path) -> None:
    victims = [tmp_path / "first", tmp_path / "second"]
    for victim, suffix in zip(victims, ("lock", "partial"), strict=True):
        victim.write_text("precious")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.with_name(f"{target.name}.{suffix}").symlink_to(victim)
    get(target, server.address())
    assert [victim.read_text() for victim in victims] == ["precious"] * 2


def test_an_interrupted_download_leaves_nothing(server, target) -> None:
    @contextmanager
    def interrupt(address: str, num_bytes: int | None, file: IO[bytes]):
        file.write(CONTENT[:HALF])
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        fetch([server.address()], target, verify_content, interrupt)
    assert_nothing_left(target)


def test_a_wrong_file_is_named_and_removed(server, target) -> None:
    server.content = CONTENT[:-1] + b"x"
    with pytest.raises(UserError, match=r"from http.*file.zip: train/y_train.txt: is not the published file"):
        get(target, server.address())
    assert_nothing_left(target)
    server.content = CONTENT
    get(target, server.address())
    assert_only(target)


def test_every_address_that_fails_is_named_with_its_reason(server, target, nobody_listens) -> None:
    server.errors = {"a.zip": 404, "b.zip": 500}
    with pytest.raises(UserError) as caught:
        get(target, server.address("a.zip"), server.address("b.zip"), nobody_listens)
    assert str(caught.value) == (
        f"--download: cannot download file.zip from {server.address('a.zip')}: HTTP Error 404: Not Found; "
        f"nor from {server.address('b.zip')}: HTTP Error 500: Internal Server Error; "
        f"nor from {nobody_listens}: [Errno 111] Connection refused. "
        "Download the file in another way, and give its path with --data-dir"
    )
    assert_nothing_left(target)


def test_the_first_address_that_works_is_taken(server, target, nobody_listens) -> None:
    server.errors, server.cut_after = {"gone.zip": 404}, [HALF]
    names = ("gone.zip", "broken.zip", "whole.zip", "other.zip")
    get(target, nobody_listens, *map(server.address, names))
    assert_only(target)
    assert server.requests == ["gone.zip", "broken.zip", "whole.zip"]


def test_a_redirect_on_this_machine_is_followed(server, target) -> None:
    server.redirects = {"file.zip": server.address("moved.zip")}
    get(target, server.address())
    assert_only(target)
    assert server.requests == ["file.zip", "moved.zip"]


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://example.com/x", "redirects to 'http://example.com/x', which is not an https"),
        ("ftp://127.0.0.1/x", "redirects to 'ftp://127.0.0.1/x', which is not an https"),
        ("file:///etc/hostname", "HTTP Error 302"),
    ],
)
def test_a_redirect_to_anything_but_https_is_refused(server, target, address, reason) -> None:
    server.redirects = {"file.zip": address}
    with pytest.raises(UserError, match=reason):
        get(target, server.address())
    assert_nothing_left(target)


def test_a_redirect_to_https_is_followed(server, target, nobody_listens) -> None:
    server.redirects = {"file.zip": nobody_listens.replace("http:", "https:")}
    with pytest.raises(UserError, match="Connection refused"):
        get(target, server.address())


@pytest.mark.parametrize("address", ["http://example.com/x", "ftp://127.0.0.1/x", "file:///etc/hostname", "data:,x"])
def test_an_address_that_is_not_https_is_refused(target, address) -> None:
    with pytest.raises(UserError, match="which is not an https"):
        get(target, address)


def test_https_is_not_redirected_to_local_http() -> None:
    request = Request("http://127.0.0.1/x", origin_req_host="example.com")
    with pytest.raises(URLError, match="which is not an https"):
        build_opener(HttpsOnly).open(request)


def test_a_folder_that_cannot_be_created_is_named(server, tmp_path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UserError, match=r"--download: cannot write .*taken/file.zip: File exists; .* --data-dir"):
        get(tmp_path / "taken" / "file.zip", server.address())


# Several processes


FETCH = """
import sys
from contextlib import nullcontext
from pathlib import Path

from data.har.download import HttpsOnly, fetch
from trainer.common.errors import UserError

print("ready", flush=True)
sys.stdin.readline()
try:
    fetch([sys.argv[1]], Path(sys.argv[2]), lambda path: None, lambda address, num_bytes, file: nullcontext(file))
    print("done")
except UserError as error:
    print(error)
"""


def fetch_in_two_processes(target: Path, address: str) -> list[str]:
    """Returns what each process printed."""
    command = [sys.executable, "-c", FETCH, address, str(target)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    return [process.communicate(timeout=60)[0] for process in processes]


def test_two_concurrent_processes_download_once(server, target) -> None:
    server.delay_s = 0.4
    assert fetch_in_two_processes(target, server.address()) == ["done\n", "done\n"]
    assert_only(target)
    assert len(server.requests) == 1


def test_one_process_downloads_when_the_other_has_failed(server, target) -> None:
    server.delay_s, server.cut_after = 0.4, [HALF]
    failed, done = sorted(fetch_in_two_processes(target, server.address()))
    assert done == "done\n" and "the connection ended" in failed
    assert_only(target)
    assert len(server.requests) == 2


# Console output


def test_the_console_reports_downloads(server, target, capsys) -> None:
    fetch([server.address()], target, verify_content, show_download)
    shown = capsys.readouterr()
    assert shown.out == f"Downloading {server.address()}, 0.3 MB\n"
    assert shown.err == ""  # no progress bar without a terminal


def test_a_terminal_shows_a_bar(server, target, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fetch([server.address()], target, verify_content, show_download)
    assert "/300k [" in capsys.readouterr().err


def test_a_file_system_without_kernel_locks_gets_the_file(server, target, monkeypatch):
    monkeypatch.setattr("fcntl.flock", not_supported)
    get(target, server.address())
    assert_only(target)
