"""The tests do not depend on how pytest was started."""

import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from trainer.failure.signals import STOP_SIGNALS


def test_a_process_that_a_test_starts_ignores_no_stop_signal():
    code = f"import signal; print([n for n in {[*map(int, STOP_SIGNALS)]} if signal.getsignal(n) is signal.SIG_IGN])"
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert started.stdout == "[]\n"


@pytest.mark.slow
def test_signals_reach_processes_although_pytest_ignores_them():
    def ignore():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    test = f"{__file__}::{test_a_process_that_a_test_starts_ignores_no_stop_signal.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    inner = subprocess.run(command, cwd=ROOT, preexec_fn=ignore, capture_output=True, text=True, timeout=120)
    assert inner.returncode == 0, inner.stdout + inner.stderr
