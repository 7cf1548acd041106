"""Fetching a published file over https: it goes on where it broke off, is verified, and is fetched by one process."""

import fcntl
import http.client
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Protocol

from trainer.loading.errors import BadInput
from trainer.loading.files import flush_path

_TIMEOUT_S = 30.0
"""For connecting, and for each wait for more bytes."""
_MAX_CONNECTIONS = 5
"""To one address in one call, each going on where the one before broke off."""
_BLOCK_BYTES = 1 << 16
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Bar(Protocol):
    """Shows progress."""

    def update(self, n: int, /) -> object:
        """n more bytes have arrived."""
        ...


OpenBar = Callable[[str, int, int | None], AbstractContextManager[Bar]]
"""(address, bytes that are here already, bytes of the whole file or None if the server does not say) -> a bar."""


def fetch(addresses: Sequence[str], target: Path, verify: Callable[[Path], object], open_bar: OpenBar) -> None:
    """Makes the published file exist under its name, whole and verified; does nothing if a file is there.

    Until then it is `NAME.partial`, beside a note of where it came from. A broken download goes on from there, in this
    call or a later one; a server that cannot do that, or whose file has changed, sends it from the start. Of several
    processes that ask at the same time one downloads and the others wait, and fail with it.

    addresses: of the file, or of files that serve as well; the first that works is taken. They are https, and so is
        what they redirect to. Plain http is for this machine alone (loopback).
    target: its folder is created if need be.
    verify: gets the complete file, still under its temporary name. Raises BadInput with what is wrong; the file is
        then removed.

    Raises BadInput when no address works or the folder cannot be written to.
    """
    if target.exists():
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _one_process_at_a_time(target):
            if not target.exists():
                _fetch_from_any(addresses, target, verify, open_bar)
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadInput(f"--download: cannot write {target}: {reason}; choose another folder with --data-dir") from None


@contextmanager
def _one_process_at_a_time(target: Path) -> Iterator[None]:
    """Those that waited while another one failed fail with what it said, instead of trying in turn."""
    path = target.with_name(f"{target.name}.lock")
    with open(path, "a+") as file:
        waited = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        failure = file.read()
        if waited and failure and not target.exists():
            raise BadInput(failure)
        file.truncate(0)
        try:
            yield
        except BadInput as error:
            file.write(str(error))
            raise
        # The target is there for good, so it no longer matters that a newcomer would not wait for this lock.
        path.unlink(missing_ok=True)


def _fetch_from_any(
    addresses: Sequence[str], target: Path, verify: Callable[[Path], object], open_bar: OpenBar
) -> None:
    partial = _Partial(target)
    failures = []
    for address in addresses:
        try:
            _receive_all(address, partial, open_bar)
            _verify(partial, verify)
        except _Failed as failure:
            failures.append(f"{address}: {failure}")
        else:
            partial.publish(target)
            return
    raise BadInput(
        f"--download: cannot fetch {target.name} from {'; nor from '.join(failures)}. Fetch it by other means and give "
        "the file with --data-dir"
    )


def _verify(partial: "_Partial", verify: Callable[[Path], object]) -> None:
    try:
        verify(partial.path)
    except BadInput as error:
        partial.remove()
        raise _Failed(str(error)) from None


# --- one address -------------------------------------------------------------------------------------------------


class _Failed(Exception):
    """An address does not work; the message is the reason."""


class _Refused(_Failed):
    """The server answers, and with an error."""


class _Broken(_Failed):
    """The connection was lost when part of the file had come."""


def _receive_all(address: str, partial: "_Partial", open_bar: OpenBar) -> None:
    """Connects until the partial file is complete. Raises _Failed."""
    for connection in range(1, _MAX_CONNECTIONS + 1):
        try:
            return _receive(address, partial, open_bar)
        except _Broken:
            if connection == _MAX_CONNECTIONS:
                raise


def _receive(address: str, partial: "_Partial", open_bar: OpenBar) -> None:
    """Appends what one connection brings to the partial file. Raises _Broken when it was not all."""
    origin = partial.origin(address)
    if origin is not None and origin.num_bytes == partial.num_bytes:
        return
    response, received = _ask(address, origin, partial.num_bytes)
    with response:
        total = None if response.length is None else received + response.length
        if received == 0:
            partial.start(_Origin(address, _validator(response), total))
        with partial.append() as file, open_bar(address, received, total) as bar:
            for block in _blocks(response):
                file.write(block)
                bar.update(len(block))
                received += len(block)
    if total is not None and received < total:
        raise _Broken(f"the connection broke after {received} of {total} bytes")


def _ask(address: str, origin: "_Origin | None", num_bytes: int) -> tuple[http.client.HTTPResponse, int]:
    """The file, or the rest of it; and how many bytes come before what the answer holds.

    origin: of the num_bytes bytes that are here; None if they are not of this file.
    """
    if origin is not None and 0 < num_bytes < (origin.num_bytes or num_bytes + 1):
        headers = {"Range": f"bytes={num_bytes}-"}
        if origin.validator is not None:
            headers["If-Range"] = origin.validator
        with suppress(_Refused):  # such as 416, from a server whose file is now shorter
            response = _open(address, headers)
            if response.status == 200:
                return response, 0
            if _goes_on(response, num_bytes, origin.num_bytes):
                return response, num_bytes
            response.close()
    return _open(address, {}), 0


def _goes_on(response: http.client.HTTPResponse, start: int, total: int | None) -> bool:
    """Whether an answer holds the bytes from start on, of a file that is as long as it was."""
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
    return found is not None and int(found[1]) == start and (total is None or found[2] in ("*", str(total)))


def _validator(response: http.client.HTTPResponse) -> str | None:
    """What identifies this version of the file to the server (RFC 9110, section 13.1.5); weak tags will not do."""
    tag = response.headers.get("ETag")
    return tag if tag and not tag.startswith("W/") else response.headers.get("Last-Modified")


def _blocks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while True:
        try:
            block = response.read(_BLOCK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise _Broken(f"the connection broke: {_reason(error)}") from None
        if not block:
            return
        yield block


def _open(address: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
    request = urllib.request.Request(address, headers={"User-Agent": "lockstep", **headers})
    _require_safe(address, came_from=address)
    try:
        return urllib.request.build_opener(_SafeRedirects).open(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        raise _Refused(f"HTTP status {error.code} ({http.client.responses.get(error.code, 'unknown')})") from None
    except urllib.error.URLError as error:
        raise _Failed(_reason(error.reason)) from None
    except (OSError, http.client.HTTPException) as error:
        raise _Failed(_reason(error)) from None


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        _require_safe(newurl, came_from=req.full_url)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _require_safe(address: str, came_from: str) -> None:
    url = urllib.parse.urlsplit(address)
    on_this_machine = all(urllib.parse.urlsplit(a).hostname in _LOOPBACK for a in (address, came_from))
    if url.scheme != "https" and not (url.scheme == "http" and on_this_machine):
        raise _Failed(f"leads to {address!r}, which is not https")


def _reason(error: BaseException | str) -> str:
    """One line, whatever the server sent."""
    text = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    return " ".join(text.split())


# --- what is there of the file -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Origin:
    """Where a partial file comes from. num_bytes: of the whole file, if the server said."""

    address: str
    validator: str | None
    num_bytes: int | None


class _Partial:
    """The file while it is incomplete or unverified, and a note of its origin."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(f"{target.name}.partial")
        self._note = target.with_name(f"{target.name}.partial.json")

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def origin(self, address: str) -> _Origin | None:
        """None when nothing is here that came from this address."""
        try:
            origin = _Origin(**json.loads(self._note.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None
        return origin if origin.address == address else None

    def start(self, origin: _Origin) -> None:
        """Forgets what is there."""
        self.remove()
        self._note.write_text(json.dumps(asdict(origin)))

    def append(self) -> IO[bytes]:
        return open(self.path, "ab")

    def remove(self) -> None:
        # The bytes go first: without them a note is harmless.
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)

    def publish(self, target: Path) -> None:
        """Gives the file its name, in a way that survives a loss of power."""
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())
        self.path.rename(target)
        self._note.unlink(missing_ok=True)
        flush_path(target.parent)
