"""Running statistics of batch norms cover the real samples of all processes, and are the same after a resume."""

import pytest
import torch
from torch import nn

from tests.conftest import ROOT, assert_same_bits, launcher, load
from tests.helpers.normed_task import Normed, NormedFlags
from tests.helpers.replicas import ReplicasOnCpu
from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.manifest import Retention
from trainer.commands.build import build_run, build_task
from trainer.commands.parse import parse
from trainer.common.errors import UserError
from trainer.loading.order import EpochOrder, SampleKeys, num_micro_batches
from trainer.loading.workers import BatchLoader
from trainer.loop.buffers import Buffers
from trainer.loop.contract import leaves_a_single_sample
from trainer.loop.schedule import lr_factor
from trainer.parallel.strategy import SingleDevice

NORMED = f"{ROOT / 'tests' / 'helpers' / 'normed_task.py'}:Normed"
EPOCHS, LR, SIZE = 2, 0.05, 2
TINY = ["--task", NORMED, "--epochs", EPOCHS, "--lr", LR, "--batch-size", SIZE, "--dtype", "float64",
        "--num-threads", 1, "--device", "cpu"]  # fmt: skip


class BareLoop:
    """Plain training loop that runs the processes one after another, each from the statistics before the step."""

    def __init__(self, world_size, whole):
        self.task = Normed(NormedFlags(), seed=0, cache_dir=None)
        torch.manual_seed(0)
        self.objective = self.task.build_objective().double().train()
        self.norm = self.objective.model[1]
        self.world_size, self.whole = world_size, whole
        vectors = [p for p in self.objective.parameters() if p.dim() < 2]
        matrices = [p for p in self.objective.parameters() if p.dim() >= 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.01)

    def step(self, samples, learning_rate):
        before = self.norm.running_mean.clone(), self.norm.running_var.clone()
        changes, num_forwards = [], num_micro_batches(len(samples), self.world_size, SIZE)
        for rank in range(self.world_size):
            self.norm.running_mean.copy_(before[0])
            self.norm.running_var.copy_(before[1])
            own = samples[rank :: self.world_size]
            for start in range(0, len(own), SIZE):
                self.backward(own[start : start + SIZE], len(samples))
            means = self.norm.running_mean - before[0], self.norm.running_var - before[1]
            changes += [(change * len(own) / len(samples)) for change in means]
        self.norm.running_mean.copy_(before[0] + sum(changes[0::2]))
        self.norm.running_var.copy_(before[1] + sum(changes[1::2]))
        self.norm.num_batches_tracked.fill_(self.num_tracked + num_forwards)
        torch.nn.utils.clip_grad_norm_(self.objective.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, samples, num):
        keys = SampleKeys(samples, 0)
        (batch,) = BatchLoader([self.task.splits()["train"]], self.task.collate)([keys])
        batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
        (self.objective(batch)["loss"] / num).backward()

    def weights(self):
        num, self.num_tracked = 13, 0
        for epoch in range(EPOCHS):
            order = EpochOrder(0, epoch, 0, num).take(0, num)
            for start in range(0, num, self.whole):
                end = min(start + self.whole, num)
                progress = epoch + (start + end) // 2 / num
                self.step(order[start:end], LR * lr_factor(progress, EPOCHS / 10, EPOCHS, 0.0))
                self.num_tracked = int(self.norm.num_batches_tracked)
        return self.objective.model.state_dict()


@pytest.mark.parametrize(("world_size", "whole"), [(1, 6), (2, 5), pytest.param(3, 4, marks=pytest.mark.slow)])
def test_statistics_cover_all_processes(world_size, whole, command, tmp_path):
    """Steps accumulate, and ranks have unequal shares. In a last step of one sample, other ranks have placeholders."""
    command(*launcher(world_size), *TINY, "--global-batch-size", whole, "--save-dir", tmp_path)
    found, expected = load(tmp_path / "final.pth")["model"], BareLoop(world_size, whole).weights()
    assert found.keys() == expected.keys()
    assert found["1.num_batches_tracked"] > 0
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_a_run_resumes_bit_identically_from_an_extra_save(command, tmp_path):
    run = [*launcher(2), *TINY, "--dtype", "float32", "--global-batch-size", 4]
    command(*run, "--save-dir", tmp_path / "whole")
    saving = ["--save-every-steps", 1, "--keep-checkpoints", 0]
    command(*run, *saving, "--save-dir", tmp_path / "saving")
    assert_same_bits(load(tmp_path / "whole" / "final.pth"), load(tmp_path / "saving" / "final.pth"))
    middle = tmp_path / "saving" / "checkpoint_0_0_8.pth"
    command(*run, "--resume-from", middle, "--save-dir", tmp_path / "resumed")
    assert_same_bits(load(tmp_path / "whole" / "final.pth"), load(tmp_path / "resumed" / "final.pth"))


def test_a_placeholder_leaves_no_trace_in_running_statistics():
    norm = nn.BatchNorm1d(2)
    statistics = Buffers(nn.Sequential(norm))
    norm(torch.randn(8, 2))
    before = norm.running_mean.clone(), norm.running_var.clone()
    for num_samples, is_same in ((0, True), (8, False)):
        with statistics.of_samples(num_samples):
            output = norm(torch.randn(8, 2, requires_grad=True))
        output.sum().backward()
        assert torch.equal(norm.running_mean, before[0]) == torch.equal(norm.running_var, before[1]) == is_same
    assert int(norm.num_batches_tracked) == 3


# --- single samples ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (
            ["--batch-size", "4"],
            [
                "--batch-size 4: the last step of an epoch, with 1 sample(s),",
                "drop this step with --drop-last, or use",
            ],
        ),
        (
            ["--batch-size", "6", "--grad-accum-steps", "2"],
            ["the last step of an epoch, with 1 sample(s),", "--drop-last"],
        ),
        (["--batch-size", "1"], ["--batch-size 1: a step of an epoch, with 1 sample(s),", "use another size"]),
        (
            ["--batch-size", "2", "--global-batch-size", "5"],
            ["a step of an epoch, with 5 sample(s),", "use another size"],
        ),
    ],
)
def test_a_single_sample_for_batch_norm_is_refused_in_one_sentence(more, parts, cli, tmp_path):
    status, _, err = cli(*TINY, "--num-steps", 1, *more, "--save-dir", tmp_path)
    assert (status, len(err)) == (2, 1)
    assert all(part in err[0] for part in parts), err
    assert ("--drop-last" in err[0]) == ("last step" in err[0])


@pytest.mark.parametrize(
    "more",
    [
        ["--num-steps", 3, "--batch-size", 1],
        ["--num-steps", 1, "--batch-size", 4, "--drop-last"],
        ["--num-steps", 1, "--batch-size", 4, "--num-train", 14],
    ],
)
def test_steps_in_which_batch_norm_has_several_values_are_accepted(more, cli, tmp_path):
    assert cli(*TINY, *more, "--save-dir", tmp_path)[0] == 0


def test_a_single_sample_on_a_replica_is_refused(tmp_path):
    for num_train, is_refused in ((16, False), (15, True)):
        argv = [*TINY, "--num-steps", 1, "--num-train", num_train, "--save-dir", tmp_path / str(num_train)]
        flags, problems = parse([*map(str, argv)], several_devices=False)
        assert problems == []
        directory = RunDirectory(tmp_path / str(num_train), Retention(3), print)
        try:
            build_run(flags, build_task(flags), ReplicasOnCpu(2), directory)
        except UserError as error:
            assert is_refused
            assert "the last step of an epoch, with 3 sample(s)," in str(error)
        else:
            assert not is_refused


@pytest.mark.parametrize(
    ("world_size", "whole", "micro_batch_size", "expected"),
    [(1, 9, 4, True), (1, 10, 4, False), (2, 3, 4, True), (2, 5, 4, False), (2, 8, 3, True), (2, 9, 4, True),
     (3, 2, 2, True), (3, 12, 2, False), (3, 14, 4, True), (3, 16, 5, True), (3, 16, 6, False)],
)  # fmt: skip
def test_a_single_sample_is_detected_on_any_rank(world_size, whole, micro_batch_size, expected):
    strategy = SingleDevice(torch.device("cpu"))
    strategy.group.world_size = world_size
    assert leaves_a_single_sample(strategy, whole, micro_batch_size) == expected
