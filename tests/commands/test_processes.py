"""Runs in processes of their own: one at a time in each place, and none more after a failure."""

import functools
import itertools
import json
import os
import signal
import sys
import time

import pytest

from trainer.commands.processes import Child, run_children
from trainer.parallel.signals import StopRequest


def note_place(path, status):
    """What a child does here instead of a run."""
    started = time.time()
    time.sleep(0.5)
    path.write_text(json.dumps([os.environ["PLACE"], started, time.time()]))
    print("to standard output")
    print(f"{path.stem} is done", file=sys.stderr)
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


def run_all(folder, places, statuses):
    """(names of those that ended well, failures)"""
    children = [Child(folder / str(i), functools.partial(note_place, folder / f"{i}.json", s)) for i, s in statuses]
    ended = []
    slots = [{"PLACE": place} for place in places]
    failures = run_children(
        children, slots, StopRequest(), lambda running: None, lambda child: ended.append(child.directory.name)
    )
    return sorted(ended), failures


@pytest.mark.slow
def test_nothing_new_starts_after_a_failure(tmp_path, capfd):
    ended, (failure,) = run_all(tmp_path, "a", enumerate([0, 7, 0]))
    assert ended == ["0"] and not (tmp_path / "2.json").exists()
    assert failure.status == 7
    assert failure.message() == f"error: {tmp_path / '1'}: ended with status 7\n1 is done"
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "0.stderr").read_text() == "0 is done\n"
    _, (failure,) = run_all(tmp_path, "a", [(3, -signal.SIGKILL)])
    assert failure.status == 137
    assert failure.message().startswith(f"error: {tmp_path / '3'}: was stopped by signal 9; the same command goes on")


@pytest.mark.slow
def test_a_place_has_one_run_at_a_time(tmp_path):
    assert run_all(tmp_path, "ab", enumerate([0] * 5)) == (list("01234"), [])
    intervals = sorted(json.loads((tmp_path / f"{i}.json").read_text()) for i in range(5))
    assert {place for place, _, _ in intervals} == {"a", "b"}
    for (place, _, end), (next_place, start_of_next, _) in itertools.pairwise(intervals):
        assert place != next_place or end <= start_of_next
