"""Downloads from a real server on this machine: whole, broken, changed, wrong, absent, and by two processes at once."""

import hashlib
import io
import os
import socket
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from data.har.download import fetch
from data.har.uci_har import SHA256, download_uci_har, load_uci_har
from tests.conftest import ROOT
from tests.data.har.test_har_data import assert_is_the_layout, write_layout, zip_folder
from trainer.cli import main
from trainer.loading.errors import BadInput
from trainer.tasks.har import HarFlags, HarTask, open_download_bar

CONTENT = np.random.default_rng(0).bytes(300_000)
HALF = len(CONTENT) // 2
BLOCK_BYTES = 1 << 16
"""More than a broken chunked answer may lose."""


class Server(ThreadingHTTPServer):
    """Serves one file under every path. What it does wrong is set by a test; what it was asked for is kept."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.headers: dict[str, str] = {}
        self.says_length = True
        self.chunked = False
        self.knows_ranges = True
        self.cut_after: list[int] = []  # bytes of the body that the next connections bring before they break
        self.errors: dict[str, int] = {}  # path -> status
        self.redirects: dict[str, str] = {}  # path -> address
        self.answers_left = 100  # then it has only status 503 to say
        self.delay_s = 0.0
        self.requests: list[tuple[str, str | None]] = []  # path, Range
        self.bytes_sent = 0

    def address(self, path: str = "file.zip") -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        server, path = self.server, self.path[1:]
        server.requests.append((path, self.headers["Range"]))
        time.sleep(server.delay_s)
        server.answers_left -= 1
        if server.answers_left < 0:
            self.answer(503, b"", {})
        elif path in server.redirects:
            self.answer(302, b"", {"Location": server.redirects[path]})
        elif path in server.errors:
            self.answer(server.errors[path], b"no", {})
        else:
            self.send_file()

    def send_file(self) -> None:
        server, whole = self.server, self.server.content
        validators = set(server.headers.values())
        is_current = self.headers["If-Range"] is None or self.headers["If-Range"] in validators
        if self.headers["Range"] is None or not server.knows_ranges or not is_current:
            return self.answer(200, whole, server.headers)
        start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        if start >= len(whole):
            return self.answer(416, b"", {"Content-Range": f"bytes */{len(whole)}"})
        content_range = f"bytes {start}-{len(whole) - 1}/{len(whole)}"
        self.answer(206, whole[start:], {**server.headers, "Content-Range": content_range})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.close_connection = True
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.server.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif self.server.says_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if status < 300 and self.server.cut_after:
            body = body[: self.server.cut_after.pop(0)]
            end = b""
        else:
            end = b"0\r\n\r\n"
        self.server.bytes_sent += len(body)
        self.wfile.write(b"%x\r\n%b\r\n%b" % (len(body), body, end) if self.server.chunked else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "new" / "folder" / "file.zip"


@pytest.fixture
def nobody_listens() -> str:
    """An address at which nobody answers."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{reserved.getsockname()[1]}/file.zip"


def verify_content(path: Path) -> None:
    assert path.name.endswith(".partial")
    if path.read_bytes() != CONTENT:
        raise BadInput("train/y_train.txt: is not the published file")


class RecordedBars(list):
    """[address, bytes at the start, bytes of the whole, bytes at the end] of every bar that was opened."""

    def __call__(self, address: str, num_received: int, num_bytes: int | None) -> "RecordedBars":
        self.append([address, num_received, num_bytes, num_received])
        return self

    def update(self, n: int) -> None:
        self[-1][3] += n

    def __enter__(self) -> "RecordedBars":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def get(target: Path, *addresses: str) -> RecordedBars:
    bars = RecordedBars()
    fetch(addresses, target, verify_content, bars)
    return bars


def assert_only(target: Path) -> None:
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def partial_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.partial")


def break_off(server: Server, target: Path, num_bytes: int = HALF) -> None:
    """Leaves what a download leaves that breaks off after so many bytes, with the server out of order from then on."""
    server.cut_after, server.answers_left = [num_bytes], 1
    with pytest.raises(BadInput, match="HTTP status 503"):
        get(target, server.address())
    kept = partial_of(target).read_bytes()
    assert server.content.startswith(kept) and num_bytes - BLOCK_BYTES < len(kept) <= num_bytes
    assert not target.exists()
    server.answers_left = 100
    server.requests.clear()
    server.bytes_sent = 0


def test_whole(server, target) -> None:
    bars = get(target, server.address())
    assert_only(target)
    assert server.requests == [("file.zip", None)]
    assert bars == [[server.address(), 0, len(CONTENT), len(CONTENT)]]


def test_what_is_there_is_not_fetched_again(server, target) -> None:
    get(target, server.address())
    server.shutdown()
    server.server_close()
    assert get(target, server.address()) == []
    assert_only(target)
    assert len(server.requests) == 1


# Broken downloads


def test_a_cut_connection_goes_on_within_the_call(server, target) -> None:
    server.cut_after = [HALF, 1000]
    bars = get(target, server.address())
    assert_only(target)
    assert [asked for _, asked in server.requests] == [None, f"bytes={HALF}-", f"bytes={HALF + 1000}-"]
    assert server.bytes_sent == len(CONTENT)
    assert [bar[1:] for bar in bars] == [
        [0, len(CONTENT), HALF],
        [HALF, len(CONTENT), HALF + 1000],
        [HALF + 1000, len(CONTENT), len(CONTENT)],
    ]


def test_a_cut_connection_goes_on_without_a_length(server, target) -> None:
    server.chunked, server.cut_after = True, [HALF, BLOCK_BYTES]
    starts = [start for _, start, _, _ in get(target, server.address())]
    assert_only(target)
    assert len(starts) == 3 and 0 == starts[0] < starts[1] < starts[2]


@pytest.mark.parametrize(
    "headers",
    [{}, {"ETag": '"a"'}, {"Last-Modified": "Sun, 06 Nov 1994 08:49:37 GMT"}, {"ETag": 'W/"a"', "Last-Modified": "b"}],
)
def test_a_broken_download_goes_on_in_a_later_call(server, target, headers) -> None:
    server.headers = headers
    break_off(server, target)
    get(target, server.address())
    assert_only(target)
    assert server.requests == [("file.zip", f"bytes={HALF}-")]
    assert server.bytes_sent == len(CONTENT) - HALF


def test_a_connection_that_breaks_every_time_is_given_up(server, target) -> None:
    server.knows_ranges, server.cut_after = False, [HALF] * 100
    with pytest.raises(BadInput, match=f"the connection broke after {HALF} of {len(CONTENT)} bytes"):
        get(target, server.address())
    assert len(server.requests) == 5
    assert not target.exists()


def test_a_server_that_ignores_ranges_starts_over(server, target) -> None:
    break_off(server, target)
    server.knows_ranges = False
    bars = get(target, server.address())
    assert_only(target)
    assert server.requests == [("file.zip", f"bytes={HALF}-")]
    assert bars == [[server.address(), 0, len(CONTENT), len(CONTENT)]]


@pytest.mark.parametrize("validator", ["ETag", "Last-Modified"])
def test_a_file_that_has_changed_starts_over(server, target, validator) -> None:
    """Of the same length, so that only the validator tells."""
    server.content, server.headers = CONTENT[::-1], {validator: '"old"'}
    break_off(server, target)
    server.content, server.headers = CONTENT, {validator: '"new"'}
    get(target, server.address())
    assert_only(target)
    assert server.requests == [("file.zip", f"bytes={HALF}-")]


def test_a_file_of_another_length_starts_over(server, target) -> None:
    """Without a validator."""
    server.content = b"x" * (len(CONTENT) + 1)
    break_off(server, target)
    server.content = CONTENT
    get(target, server.address())
    assert_only(target)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_partial_file_larger_than_the_file_starts_over(server, target, chunked) -> None:
    server.chunked = chunked
    break_off(server, target)
    partial_of(target).write_bytes(b"x" * (len(CONTENT) + 10))
    get(target, server.address())
    assert_only(target)


def test_a_complete_partial_file_needs_only_its_name(server, target) -> None:
    """As after a kill between the last byte and the check."""
    break_off(server, target)
    partial_of(target).write_bytes(CONTENT)
    get(target, server.address())
    assert_only(target)
    assert server.requests == []


@pytest.mark.parametrize("note", [None, "", "[]", "{"])
def test_a_partial_file_of_unknown_origin_is_not_continued(server, target, note) -> None:
    break_off(server, target)
    file = target.with_name("file.zip.partial.json")
    file.unlink() if note is None else file.write_text(note)
    get(target, server.address())
    assert_only(target)
    assert server.requests == [("file.zip", None)]


def test_a_partial_file_of_another_address_is_not_continued(server, target) -> None:
    """And stays for its own address where the other one fails."""
    break_off(server, target)
    server.errors = {"other.zip": 404}
    with pytest.raises(BadInput, match="404"):
        get(target, server.address("other.zip"))
    assert partial_of(target).read_bytes() == CONTENT[:HALF]
    get(target, server.address("another.zip"))
    assert_only(target)
    assert server.requests == [("other.zip", None), ("another.zip", None)]


def test_a_length_that_is_not_said_is_not_needed(server, target) -> None:
    server.says_length = False
    assert get(target, server.address()) == [[server.address(), 0, None, len(CONTENT)]]
    assert_only(target)


# Downloads that fail


def test_a_wrong_file_is_named_and_removed(server, target) -> None:
    server.content = CONTENT[:-1] + b"x"
    with pytest.raises(BadInput, match=r"from http.*file.zip: train/y_train.txt: is not the published file"):
        get(target, server.address())
    assert [path.name for path in target.parent.iterdir()] == ["file.zip.lock"]
    server.content = CONTENT
    get(target, server.address())
    assert_only(target)


def test_every_address_that_fails_is_named_with_its_reason(server, target, nobody_listens) -> None:
    server.errors = {"a.zip": 404, "b.zip": 500}
    with pytest.raises(BadInput) as caught:
        get(target, server.address("a.zip"), server.address("b.zip"), nobody_listens)
    assert str(caught.value) == (
        f"--download: cannot fetch file.zip from {server.address('a.zip')}: HTTP status 404 (Not Found); "
        f"nor from {server.address('b.zip')}: HTTP status 500 (Internal Server Error); "
        f"nor from {nobody_listens}: Connection refused. Fetch it by other means and give the file with --data-dir"
    )
    assert not target.exists() and not partial_of(target).exists()


def test_the_first_address_that_works_is_taken(server, target, nobody_listens) -> None:
    server.errors = {"gone.zip": 404}
    get(target, nobody_listens, server.address("gone.zip"), server.address("b.zip"), server.address("c.zip"))
    assert_only(target)
    assert [path for path, _ in server.requests] == ["gone.zip", "b.zip"]


def test_a_redirect_on_this_machine_is_followed_with_the_range(server, target) -> None:
    server.redirects = {"file.zip": server.address("moved.zip")}
    server.cut_after = [HALF]
    get(target, server.address())
    assert_only(target)
    assert server.requests[-1] == ("moved.zip", f"bytes={HALF}-")


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://example.com/x", "leads to 'http://example.com/x', which is not https"),
        ("ftp://127.0.0.1/x", "leads to 'ftp://127.0.0.1/x', which is not https"),
        ("file:///etc/hostname", "HTTP status 302"),
    ],
)
def test_a_redirect_to_anything_but_https_is_refused(server, target, address, reason) -> None:
    server.redirects = {"file.zip": address}
    with pytest.raises(BadInput, match=reason):
        get(target, server.address())
    assert not partial_of(target).exists()


def test_a_redirect_to_https_is_followed(server, target, nobody_listens) -> None:
    server.redirects = {"file.zip": nobody_listens.replace("http:", "https:")}
    with pytest.raises(BadInput, match="Connection refused"):
        get(target, server.address())


@pytest.mark.parametrize("address", ["http://example.com/x", "ftp://127.0.0.1/x", "file:///etc/hostname"])
def test_an_address_that_is_not_https_is_refused(target, address) -> None:
    with pytest.raises(BadInput, match="which is not https"):
        get(target, address)


def test_a_folder_that_cannot_be_made_is_named(server, tmp_path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(BadInput, match=r"--download: cannot write .*taken/file.zip: File exists; .* --data-dir"):
        get(tmp_path / "taken" / "file.zip", server.address())


# Several processes


FETCH = """
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

from data.har.download import fetch
from trainer.loading.errors import BadInput

print("ready", flush=True)
sys.stdin.readline()
bar = SimpleNamespace(update=lambda n: None)
try:
    fetch([sys.argv[1]], Path(sys.argv[2]), lambda path: None, lambda *sizes: nullcontext(bar))
    print("done")
except BadInput as error:
    print(error)
"""


def fetch_in_two_processes(target: Path, address: str) -> list[str]:
    """What each of them said in the end."""
    command = [sys.executable, "-c", FETCH, address, str(target)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    return [process.communicate(timeout=60)[0] for process in processes]


def test_two_processes_at_once_fetch_once(server, target) -> None:
    server.delay_s = 0.4
    assert fetch_in_two_processes(target, server.address()) == ["done\n", "done\n"]
    assert_only(target)
    assert len(server.requests) == 1


def test_two_processes_at_once_fail_once(server, target) -> None:
    server.delay_s, server.errors = 0.4, {"file.zip": 404}
    first, second = fetch_in_two_processes(target, server.address())
    assert first == second and "HTTP status 404" in first
    assert len(server.requests) == 1


# UCI HAR


@pytest.fixture
def layout(tmp_path) -> Path:
    return write_layout(tmp_path / "published")


def checksums(layout: Path) -> dict[str, str]:
    return {name: hashlib.sha256((layout / name).read_bytes()).hexdigest() for name in SHA256}


def zip_in_zip(inner: bytes) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr("UCI HAR Dataset.names", "about")
        archive.writestr("UCI HAR Dataset.zip", inner)
    return memory.getvalue()


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("name", ["data", "my.zip"])
def test_har_is_fetched_as_published(server, layout, tmp_path, nested, name) -> None:
    server.content = zip_folder(layout, "UCI HAR Dataset/")
    if nested:
        server.content = zip_in_zip(server.content)
    path, cache_dir = tmp_path / "new" / name, tmp_path / "cache"
    for _ in range(2):
        download_uci_har(path, cache_dir, RecordedBars(), [server.address()], checksums(layout))
        assert_is_the_layout(load_uci_har(path, cache_dir))
    file = path / "UCI HAR Dataset.zip" if name == "data" else path
    assert file.read_bytes() == server.content
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert len(server.requests) == 1


@pytest.mark.parametrize("name", ["train/subject_train.txt", "test/Inertial Signals/body_gyro_y_test.txt"])
def test_har_with_another_checksum_is_named_and_removed(server, layout, tmp_path, name) -> None:
    server.content = zip_in_zip(zip_folder(layout, "UCI HAR Dataset/"))
    sums = checksums(layout) | {name: "0" * 64}
    with pytest.raises(BadInput, match=f": the download, {name}: is not the published file .sha256 [0-9a-f]+, not 0+"):
        download_uci_har(tmp_path / "new", tmp_path / "cache", RecordedBars(), [server.address()], sums)
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".lock"]


def test_a_page_instead_of_har_is_named_and_removed(server, layout, tmp_path) -> None:
    server.content = b"<html>We have moved</html>"
    with pytest.raises(BadInput, match="the download is not a zip file"):
        download_uci_har(tmp_path / "new", tmp_path / "cache", RecordedBars(), [server.address()], checksums(layout))
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".lock"]


@pytest.mark.parametrize("zipped", [True, False])
def test_har_that_is_there_is_verified_and_kept(layout, tmp_path, nobody_listens, zipped) -> None:
    path, file = layout, layout / "train" / "y_train.txt"
    if zipped:
        path = file = tmp_path / "har.zip"
        path.write_bytes(zip_folder(layout, ""))
    arguments = path, tmp_path / "cache", RecordedBars(), [nobody_listens], checksums(layout)
    download_uci_har(*arguments)
    changed = file.stat().st_mtime_ns
    write_layout(tmp_path / "other")
    edited = tmp_path / "other" / "train" / "y_train.txt"
    edited.write_text(edited.read_text().replace("1", "2"))
    content = zip_folder(tmp_path / "other", "") if zipped else edited.read_bytes()
    file.write_bytes(content)
    if not zipped:
        os.utime(file, ns=(changed, changed))
        download_uci_har(*arguments)  # not read again, since size and time are those that were verified
    os.utime(file, ns=(changed + 1, changed + 1))
    with pytest.raises(BadInput, match=r"^--data-dir: .*y_train.txt: is not the published file .* Delete it"):
        download_uci_har(*arguments)
    assert file.read_bytes() == content


@pytest.mark.skipif("LOCKSTEP_DATA" not in os.environ, reason="LOCKSTEP_DATA names no folder with UCI HAR")
def test_the_official_recordings_have_the_official_checksums(server, tmp_path) -> None:
    official = Path(os.environ["LOCKSTEP_DATA"]) / "uci_har" / "UCI HAR Dataset.zip"
    if not official.exists():
        pytest.skip(f"there is no {official}")
    server.content = zip_in_zip(official.read_bytes())
    download_uci_har(tmp_path / "new", tmp_path / "cache", RecordedBars(), [server.address()])
    assert (tmp_path / "new" / "UCI HAR Dataset.zip").stat().st_size == len(server.content)


# The command line


@pytest.fixture
def no_network(monkeypatch, nobody_listens) -> None:
    """Whatever the machine has: https goes by way of a proxy, and there is none at its address."""
    monkeypatch.setenv("https_proxy", nobody_listens.removesuffix("/file.zip"))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)


@pytest.mark.parametrize("place", [None, "folder", "har.zip"])
def test_without_a_network_one_message_says_what_to_do(no_network, tmp_path, capsys, signals_restored, place) -> None:
    arguments = ["--download", "--cache-dir", str(tmp_path / "cache"), "--save-dir", str(tmp_path / "run")]
    if place is not None:
        arguments += ["--data-dir", str(tmp_path / place)]
    assert main(["--num-threads", "1", "--device", "cpu", *arguments], several_devices=False) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --download: cannot fetch")
    assert line.count("https://archive.ics.uci.edu/") == 2 and line.count("Connection refused") == 2
    assert "--data-dir" in line
    assert not list(tmp_path.rglob("*.zip")) and not (tmp_path / "run").exists()


def test_the_flag_verifies_what_is_there(layout, tmp_path) -> None:
    """By the official checksums, which generated files do not have."""
    for flags, cache_dir in (
        (HarFlags(download=True, data_dir=layout), tmp_path / "cache"),
        (HarFlags(download=True), tmp_path),
    ):
        (tmp_path / "uci_har").mkdir(exist_ok=True)
        (tmp_path / "uci_har" / "UCI HAR Dataset.zip").write_bytes(zip_folder(layout, ""))
        with pytest.raises(BadInput, match=r"y_train.txt: is not the published file"):
            HarTask(flags, seed=0, cache_dir=cache_dir).splits()


def test_a_missing_folder_is_a_mistake_only_without_the_flag(tmp_path) -> None:
    (problem,) = HarFlags(data_dir=tmp_path / "missing").problems()
    assert "no such file or folder" in problem and "--download" in problem
    assert HarFlags(data_dir=tmp_path / "missing", download=True).problems() == []


def test_the_console_says_what_is_fetched(server, target, capsys) -> None:
    server.cut_after = [HALF]
    fetch([server.address()], target, verify_content, open_download_bar)
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        f"Downloading {server.address()}, 0.3 MB",
        f"Downloading {server.address()}, 0.3 MB, going on after 0.1 MB",
    ]
    assert shown.err == ""  # no bar without a terminal
