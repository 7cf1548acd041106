"""Server process in which torch has simulated GPUs, and which forks for each test.

pytest's own process cannot have simulated GPUs, because torch detects devices only once.
"""

import contextlib
import importlib
import inspect
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.simulated_gpu import library
from tests.helpers.simulated_gpu.machine import GPUS

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 300


class Settings(NamedTuple):
    """Arguments of `on_simulated_gpus`."""

    num_gpus: int
    capability: tuple[int, int]
    may_wait: bool


def run_elsewhere(module: str, test: str, arguments: dict[str, Any], settings: Settings) -> None:
    """Runs a decorated test function in a process with GPUs. Fails if the function fails or makes `GPUS.mistakes()`."""
    if reason := library.why_not():
        pytest.skip(reason)
    server = _server()
    server.send((module, test, arguments, settings))
    if not server.poll(TIMEOUT_S):
        pytest.fail(f"took longer than {TIMEOUT_S} s", pytrace=False)
    printed, account = server.recv()
    print(printed, end="")
    if account:
        pytest.fail(account, pytrace=False)


@cache
def _server() -> Connection:
    here, there = multiprocessing.Pipe()
    # The server ends with this process, which closes its end of the pipe.
    command = [sys.executable, "-m", __package__, str(there.fileno()), str(library.compiled())]
    subprocess.Popen(command, cwd=ROOT, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL)
    there.close()
    return here


# --- in the other process ----------------------------------------------------------------------------------------


def serve(client: Connection) -> None:
    """Forks for each requested test, until the client closes the connection."""
    with contextlib.suppress(EOFError):
        while True:
            asked = client.recv()
            child = os.fork()
            if child == 0:
                _run(client, *asked)
            _, status = os.waitpid(child, 0)
            if status != 0:
                client.send(("", f"the process of the test ended with status {os.waitstatus_to_exitcode(status)}"))


def _run(client: Connection, module: str, test: str, arguments: dict[str, Any], settings: Settings) -> None:
    signal.alarm(TIMEOUT_S)
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(open(os.memfd_create("output"), "r+"))
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        try:
            GPUS.start(output, *settings)
            function = inspect.unwrap(_find(module, test))
            function(**arguments)
            account = "\n".join(GPUS.mistakes())
        except BaseException:
            account = "\n".join([traceback.format_exc(), *GPUS.mistakes()])
        client.send((GPUS.printed(), account))
        os._exit(0)


def _find(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
