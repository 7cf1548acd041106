"""Ranks whose weights drift apart are detected and named, and such weights are not saved."""

import json
import os
import re

import pytest
import torch
from torch import nn

from tests.conftest import ROOT
from tests.helpers import forks
from trainer.common.errors import UserError
from trainer.logs.run_log import SilentLog
from trainer.loop.lockstep import Fingerprint, Lockstep, num_words
from trainer.loop.progress import Progress
from trainer.parallel.devices import LAG_STEPS, DeviceQueue
from trainer.parallel.group import Group
from trainer.parallel.strategy import Strategy

CPU = torch.device("cpu")
# An epoch has 9 steps on 3 processes and 13 on 2, and ends with a checkpoint.
RUN = [
    "--task", f"{ROOT / 'tests' / 'helpers' / 'drifting_task.py'}:Drifting", "--device", "cpu", "--num-threads", 1,
    "--batch-size", 4, "--lr", 0.01, "--max-steps", 26,
]  # fmt: skip
EVERY = ["--lockstep-every"]


def member(rank):
    return rf"rank {rank} \(process \d+ on {re.escape(os.uname().nodename)}, cpu\)"


@pytest.fixture
def drifted(environment, tmp_path):
    """Runs a group whose ranks drift apart; returns its exit statuses, its output and the saved steps."""

    def run(drift, *more, world_size=2, form="ddp"):
        argv = ["--multi-gpu", form, *RUN, "--save-dir", tmp_path / "run", *more]
        output = tmp_path / "out.txt"
        statuses = forks.run_group(argv, world_size, environment | {"LOCKSTEP_DRIFT": drift}, output)
        manifest = tmp_path / "run" / "manifest.json"
        entries = json.loads(manifest.read_text())["checkpoints"] if manifest.exists() else []
        return statuses, output.read_text(), [entry["step"] for entry in entries]

    return run


def assert_told(output, step, since, where, guilty, others):
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    before = rf" \(equal after step {since}\)" if since else ""
    assert re.match(
        f"error: the ranks are no longer in lockstep: after optimizer step {step}{before} {where} differs on "
        f"{guilty} from {others}; ",
        error,
    ), error
    assert "Traceback" not in output


def test_one_flipped_bit_on_one_of_three_ranks_is_detected(drifted):
    statuses, output, saved = drifted("bit 1 12", *EVERY, 4, "--save-every-steps", 5, world_size=3)
    assert_told(output, 12, 10, r"model\.layers\.4\.weight", member(1), f"{member(0)} and {member(2)}")
    assert statuses == [2, 2, 2]
    assert saved == [5, 9, 10]


def test_a_parameter_changed_in_forward_is_detected_before_the_save(drifted):
    statuses, output, saved = drifted("forward 1 5", *EVERY, 1000)
    assert_told(output, 13, None, r"model\.layers\.1\.bias", member(0), member(1))
    assert (statuses, saved) == ([2, 2], [])


@pytest.mark.slow
def test_ranks_are_not_compared_if_unwanted(drifted):
    assert drifted("bit 1 5", *EVERY, 0)[::2] == ([0, 0], [13, 26])


def test_buffers_that_differ_between_ranks_are_reported_once(drifted):
    statuses, output, saved = drifted("buffer", *EVERY, 2)
    assert (statuses, saved) == ([0, 0], [13, 26])
    assert output.count("may differ between ranks") == 1
    assert "The values of model.seen may differ between ranks, because forward passes update them.\n" in output


@pytest.mark.slow
def test_a_changed_constant_buffer_is_refused(drifted):
    statuses, output, saved = drifted("table 0 5", *EVERY, 2)
    assert_told(output, 6, 4, r"model\.table", member(0), member(1))
    assert (statuses, saved) == ([2, 2], [])


@pytest.mark.slow
def test_a_difference_between_unlike_ranks_is_reported_once(drifted):
    statuses, output, saved = drifted("bit-threads 1 5", *EVERY, 2)
    assert (statuses, saved) == ([0, 0], [13, 26])
    assert output.count("After optimizer step 6 the ranks are not bit-identical: model.layers.4") == 1
    assert "1 thread(s); " in output


@pytest.mark.slow
def test_differing_copies_of_a_shard_are_detected(drifted):
    more = [*EVERY, 2, "--shard-size", 2]
    statuses, output, _ = drifted("part 3 5", *more, world_size=4, form="fsdp")
    assert statuses == [2] * 4
    assert_told(output, 6, 4, r"model\.layers\.4\.bias", member(1), member(3))


def test_shards_without_copies_are_reported(drifted):
    statuses, output, _ = drifted("forward 1 2", *EVERY, 2, "--max-steps", 4, form="fsdp")
    assert statuses == [0, 0]
    assert "Every process has a different shard of the model" in output


# --- the parts ---------------------------------------------------------------------------------------------------


TENSORS = {
    "float32": torch.randn(5, 7),
    "float64": torch.randn(3).double(),
    "bfloat16": torch.randn(3).bfloat16(),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.arange(3),
    "a number": torch.tensor(2.5),
    "none": torch.empty(0),
    "other strides": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "large": torch.randn(70_000),
}


@pytest.fixture
def fingerprint():
    return Fingerprint(num_words(TENSORS.values()), CPU)


def hash_of(fingerprint, tensors):
    return int(fingerprint.of(tensors))


@pytest.mark.parametrize("name", [name for name, tensor in TENSORS.items() if tensor.numel()])
def test_every_bit_changes_the_digest(name, fingerprint):
    tensors = {key: tensor.clone() for key, tensor in TENSORS.items()}
    before = hash_of(fingerprint, tensors.values())
    memory = tensors[name].view(-1).view(torch.uint8) if tensors[name].is_contiguous() else None
    memory = tensors[name].untyped_storage() if memory is None else memory
    places = [0, len(memory) // 2, len(memory) - 1]
    for place in places:
        for bit in range(8):
            memory[place] ^= 1 << bit
            assert hash_of(fingerprint, tensors.values()) != before
            memory[place] ^= 1 << bit
    assert hash_of(fingerprint, tensors.values()) == before


def test_positions_and_signs_change_the_digest(fingerprint):
    """A plain sum would not detect all of these changes, nor would a sum of products whose high bits overflow."""
    values = torch.randn(70_000)
    before = hash_of(fingerprint, [values])
    for first, second in ((0, 1), (0, 69_999), (32_767, 32_768), (5, 5 + 2**15)):
        swapped, negated = values.clone(), values.clone()
        swapped[[first, second]] = values[[second, first]]
        negated[[first, second]] *= -1
        assert before not in (hash_of(fingerprint, [swapped]), hash_of(fingerprint, [negated]))


class Pair(Group):
    """Simulates a second process, which has the hashes of this process plus `wrong`."""

    world_size = 2
    wrong = 0

    def __init__(self, device):
        super().__init__(device)
        self.compared = 0

    def sum(self, values):
        self.compared += 1
        return torch.stack([values[0], values[0] + self.wrong])

    def all_gather_object(self, value):
        return [value, value._replace(hashes=[own + self.wrong for own in value.hashes])]


def test_ranks_on_gpus_are_compared_some_steps_later(monkeypatch):
    """Comparisons that are in flight at the same time complete in order."""
    monkeypatch.setattr("trainer.loop.lockstep.queue_of", lambda device: DeviceQueue(LAG_STEPS))
    strategy, progress = Strategy(Pair([CPU])), Progress()
    lockstep = Lockstep(nn.Linear(3, 3), strategy, every=10)
    lockstep.begin(progress)
    when = []
    for progress.step in range(1, 101):
        before = strategy.group.compared
        lockstep.after_step(progress, None, SilentLog())
        when += [progress.step] * (strategy.group.compared - before)
    assert when == [LAG_STEPS + step for step in range(10, 69, 10)]
    strategy.group.wrong, progress.step = 1, 10 + when[-1]
    with pytest.raises(UserError, match=r"after optimizer step 70 \(equal after step 60\) weight and 1 more"):
        lockstep.after_step(progress, None, SilentLog())
