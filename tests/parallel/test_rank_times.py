"""A slow rank is named once, with its slow phase. Ranks with equal work are not named."""

import os
import re
import time

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import ROOT
from tests.helpers import forks
from trainer.failure.heartbeat import EXCHANGE
from trainer.logs.run_log import SilentLog
from trainer.loop import rank_times
from trainer.loop.progress import Progress
from trainer.loop.rank_times import NUM_REPORTS, OWN, REPORT_EVERY, SENT, RankTimes, slow_ranks
from trainer.parallel import ddp
from trainer.parallel.group import Group

RUN = [
    "--task", f"{ROOT / 'tests' / 'helpers' / 'uneven_task.py'}:Uneven", "--device", "cpu", "--num-threads", 1,
    "--batch-size", 2, "--lr", 0.01, "--num-train", 1000,
]  # fmt: skip
SLOW = (
    r"Rank {} \(process \d+ on {}, cpu\) is slow: .*\. "
    r"Most of the difference is in {}: (\S+) ms instead of (\S+) ms\. "
)


def report_often():
    """Shortens the report interval of a started process, so that a test needs few steps."""
    rank_times.REPORT_EVERY = 4
    return lambda: None


def report_often_and_overlap():
    ddp.OVERLAP_BYTES = 0
    return report_often()


@pytest.fixture
def trained(environment, tmp_path):
    """Trains a group in which one rank is slow; returns its output."""

    def run(slow, *more, world_size=2, prepare=report_often):
        argv = ["--multi-gpu", "ddp", *RUN, "--save-dir", tmp_path / "run", *more]
        variables = environment | {"LOCKSTEP_SLOW": slow}
        statuses = forks.run_group(argv, world_size, variables, tmp_path / "out.txt", prepare, timeout_s=300)
        output = (tmp_path / "out.txt").read_text()
        assert statuses == [0] * world_size, output
        return output

    return run


def assert_named(output, rank, phase):
    """Asserts that one line names the rank, with the times of its slow phase in milliseconds."""
    (line,) = [line for line in output.splitlines() if " is slow: " in line]
    match = re.match(SLOW.format(rank, re.escape(os.uname().nodename), phase), line)
    assert match, line
    own, usual = map(float, match.groups())
    assert own > max(1e3 * LONG, 1.3 * usual)


LONG = 0.1
"""Delay in seconds: more than a loaded machine adds to a step of another rank."""


def test_a_rank_that_loads_slowly_is_named(trained, tmp_path):
    output = trained(f"data 1 {LONG}", "--max-steps", 24)
    assert_named(output, 1, "data loading")
    events = EventAccumulator(str(tmp_path / "run" / "logs")).Reload()
    (event,) = events.Tensors("ranks/text_summary")
    assert event.tensor_proto.string_val[0].decode() in output


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("prepare", [report_often, report_often_and_overlap])
def test_a_rank_that_computes_slowly_is_named(phase, prepare, trained):
    """Gradients are exchanged after the backward pass, or within it by DistributedDataParallel."""
    assert_named(trained(f"{phase} 0 {LONG}", "--max-steps", 24, prepare=prepare), 0, phase)


@pytest.mark.slow
def test_one_of_three_ranks_is_named(trained):
    assert_named(trained(f"backward 2 {LONG}", "--max-steps", 24, world_size=3), 2, "backward")


@pytest.mark.slow
def test_no_rank_is_named_in_a_thousand_steps_of_equal_work(trained):
    assert " is slow: " not in trained("nowhere 0 0", "--max-steps", 1000, prepare=None)


# --- the parts ---------------------------------------------------------------------------------------------------


def test_a_rank_is_slow_only_if_it_is_slow_in_every_report():
    """The reports are about 8 ranks with equal but noisy work, one of which then takes twice as long."""
    rng = np.random.default_rng(0)
    own = rng.lognormal(0, 0.2, (200, NUM_REPORTS, 8, len(OWN)))
    assert not any(slow_ranks(reports, 1.3) for reports in own)
    own[:, :, 5] *= 2
    assert sum(slow_ranks(reports, 1.3) == [5] for reports in own) > 180
    own[:, 3, 5] /= 2
    assert sum(slow_ranks(reports, 1.3) == [5] for reports in own) < 20


def test_the_slow_one_of_two_ranks_is_named():
    even, odd = [0.0, 0.010, 0.010], [0.001, 0.015, 0.011]
    assert slow_ranks(np.array([[even, odd]]), 1.3) == [1]
    assert slow_ranks(np.array([[even, odd]]), 1.4) == []


class First(Group):
    """Rank 0 of 3."""

    world_size = 3

    def start_sum(self, values):
        self.sent = values
        return lambda: values

    def all_gather_object(self, value):
        return [value, "the second", "the third"]


def test_work_between_steps_is_not_counted():
    first = First([torch.device("cpu")])
    times = RankTimes(first)
    times.begin(Progress())
    for _ in range(2):
        times.resume()
        for activity in ("forward", EXCHANGE):
            first.activity.enter(activity)
            time.sleep(0.01)
        times.pause()
        first.activity.enter(EXCHANGE)
        time.sleep(0.2)
    times.after_step(Progress(step=REPORT_EVERY), None, SilentLog())
    seconds = dict(zip(SENT, first.sent[: len(SENT)], strict=True))
    assert 0.02 <= seconds["forward"] < 0.2 and 0.02 <= seconds[EXCHANGE] < 0.2
    assert seconds["data loading"] == seconds["backward"] == 0


def test_a_process_is_named_once():
    times = RankTimes(First([torch.device("cpu")]))
    usual, slow = [0.1, 0.5, 0.4, 0.9], [0.1, 2.5, 0.5, 0.0]
    reports = [times.judge(np.array([*usual, *slow, *usual]).reshape(3, -1)) for _ in range(3 * NUM_REPORTS)]
    ((account,),) = [found for found in reports if found]
    assert reports.index([account]) == NUM_REPORTS - 1
    assert account == (
        f"Rank 1 (the second) is slow: 31 ms per step without waiting, against a median of 10 ms, over the "
        f"last {NUM_REPORTS * REPORT_EVERY} steps. Most of the difference is in forward: 25 ms instead of 5 ms. "
        f"The rank that waits longest waits 9 ms per step."
    )
    assert len(times.judge(np.array([*usual, *usual, *slow]).reshape(3, -1))) == 0
    for _ in range(NUM_REPORTS - 2):
        assert times.judge(np.array([*usual, *usual, *slow]).reshape(3, -1)) == []
    assert "Rank 2 (the third) is slow" in times.judge(np.array([*usual, *usual, *slow]).reshape(3, -1))[0]
