"""Runs in processes of their own: one at a time in each slot, and none more after a failure."""

import functools
import itertools
import json
import os
import signal
import sys
import time

import pytest

from trainer.commands.several import Job, run_jobs
from trainer.parallel.launch import Launcher


def note_slot(path, status):
    """What a job does here instead of a run."""
    started = time.time()
    time.sleep(0.5)
    path.write_text(json.dumps([os.environ["SLOT"], started, time.time()]))
    print("to standard output")
    print(f"{path.stem} is done", file=sys.stderr)
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


def job(folder, number, status):
    path = folder / str(number)
    return Job(path.name, path, number, None, (), {}, functools.partial(note_slot, path.with_suffix(".json"), status))


def run_all(folder, slots, statuses):
    """(names of those that ended well, exit statuses of the others)"""
    jobs = [job(folder, i, status) for i, status in statuses]
    found = {}
    with Launcher() as launcher:
        for _, ended in run_jobs(launcher, jobs, [{"SLOT": slot} for slot in slots]):
            found |= {job.name: status for job, status in ended}
    failures = {name: status for name, status in found.items() if status != 0}
    return sorted(found.keys() - failures.keys()), failures


@pytest.mark.slow
def test_nothing_new_starts_after_a_failure(tmp_path, capfd):
    assert run_all(tmp_path, "a", enumerate([0, 7, 0])) == (["0"], {"1": 7})
    assert not (tmp_path / "2.json").exists()
    assert job(tmp_path, 1, 7).failure_message(7) == f"error: {tmp_path / '1'}: ended with status 7\n1 is done"
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "0.stderr").read_text() == "0 is done\n"
    assert run_all(tmp_path, "a", [(3, -signal.SIGKILL)]) == ([], {"3": 137})
    message = job(tmp_path, 3, -9).failure_message(137)
    assert message.startswith(f"error: {tmp_path / '3'}: was stopped by signal 9; the same command goes on")


@pytest.mark.slow
def test_a_slot_has_one_run_at_a_time(tmp_path):
    assert run_all(tmp_path, "ab", enumerate([0] * 5)) == (list("01234"), {})
    intervals = sorted(json.loads((tmp_path / f"{i}.json").read_text()) for i in range(5))
    assert {slot for slot, _, _ in intervals} == {"a", "b"}
    for (slot, _, end), (next_slot, start_of_next, _) in itertools.pairwise(intervals):
        assert slot != next_slot or end <= start_of_next
