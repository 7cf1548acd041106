"""Downloads a published file, and verifies it before renaming it to its final name."""

import fcntl
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import BaseHandler, Request, build_opener

from trainer.common.errors import UserError
from trainer.common.files import MOST_WHOLE, flush_path, has_locked

Verify = Callable[[Path], object]
Progress = Callable[[str, int | None, IO[bytes]], AbstractContextManager[Any]]
"""Function that shows a download's progress: (address, bytes or None, file) -> context manager of a file to write."""


def fetch(addresses: Sequence[str], target: Path, verify: Verify, progress: Progress) -> None:
    """Downloads a file unless it exists, and creates its folder. One process downloads while other processes wait.

    addresses: tried in order; addresses and their redirects must use https. verify: raises UserError for a wrong
    file; its argument is the path of the complete download, NAME.partial.

    Raises UserError, and deletes the incomplete file, if no address works or the folder is not writable.
    """
    lock, partial = (target.with_name(f"{target.name}.{suffix}") for suffix in ("lock", "partial"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(lock, "a") as held:  # does not empty the target of a link
            if not has_locked(fcntl.flock, held, fcntl.LOCK_EX):  # another process may download to this name
                partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
            try:
                if not target.exists():
                    _fetch_from_any(addresses, partial, verify, progress)
                    flush_path(partial)
                    partial.rename(target)
                    flush_path(target.parent)
                lock.unlink(missing_ok=True)  # processes that start later find the target
            finally:
                partial.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"--download: cannot write {target}: {reason}; choose another folder with --data-dir") from None


def _fetch_from_any(addresses: Sequence[str], file: Path, verify: Verify, progress: Progress) -> None:
    failures = []
    for address in addresses:
        try:
            _receive(address, file, progress)
            verify(file)
            return
        except (OSError, HTTPException, UserError) as error:
            failures.append(f"{address}: {error.reason if type(error) is URLError else error}")
    advice = "Download the file in another way, and give its path with --data-dir"
    raise UserError(f"--download: cannot download {file.stem} from {'; nor from '.join(failures)}. {advice}")


def _receive(address: str, path: Path, progress: Progress) -> None:
    request = Request(address, headers={"User-Agent": "lockstep"})
    path.unlink(missing_ok=True)  # of a killed download, or a link that another user left in a shared folder
    with build_opener(HttpsOnly).open(request, timeout=30.0) as response, path.open("xb") as file:
        with progress(address, response.length, file) as shown:
            while part := response.read(1 << 16):
                shown.write(part)
                if file.tell() > MOST_WHOLE:
                    raise ConnectionError(f"sends more than {MOST_WHOLE:,} bytes")
        if response.length:
            raise ConnectionError(f"the connection ended {response.length} bytes too early")


class HttpsOnly(BaseHandler):
    """URL handler that refuses protocols other than https, also in redirects; http to localhost is allowed."""

    def _require_this_machine(self, request: Request) -> Request:
        hosts = {urlsplit(request.full_url).hostname, request.origin_req_host}
        if request.type != "http" or not hosts <= {"127.0.0.1", "localhost"}:
            raise URLError(f"redirects to {request.full_url!r}, which is not an https address")
        return request

    http_request = ftp_request = file_request = data_request = _require_this_machine
