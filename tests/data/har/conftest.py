import socket
import threading
from pathlib import Path

import pytest

from data.har.uci_har import load_uci_har
from data.har.windows import HarRecordings
from tests.helpers.file_server import FileServer
from tests.helpers.uci_har_files import write_layout


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = FileServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def nobody_listens() -> str:
    """Yields an address at which nothing listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{reserved.getsockname()[1]}/file.zip"


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return write_layout(tmp_path / "UCI HAR Dataset")


@pytest.fixture
def recordings(layout: Path, cache_dir: Path) -> HarRecordings:
    return load_uci_har(layout, cache_dir)
