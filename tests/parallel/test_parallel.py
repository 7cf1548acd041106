"""DataParallel by a double on CPU, and what the rank variables may say."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.conftest import WEIGHTED, assert_same_bits, largest_difference, load
from trainer.checkpoint.directory import RunDirectory
from trainer.commands.build import build_run, build_task, open_run, set_up_torch
from trainer.commands.flags import parse
from trainer.config import refuse
from trainer.loop.train import evaluate, train
from trainer.parallel.base import SingleDevice
from trainer.parallel.data_parallel import DataParallel, SummedReplicas
from trainer.parallel.devices import MultiDeviceFlags
from trainer.parallel.environment import RankEnvironment, one_process_problems, read_rank_environment


class ThreadedReplicas(SummedReplicas):
    """nn.DataParallel's semantics on CPU threads.

    As torch's scatter does, every tensor is chunked along dim 0, and a list of zip stops at the shortest; other values
    go to all replicas. Threads start without the caller's autocast.
    """

    def __init__(self, module, num_replicas):
        nn.Module.__init__(self)
        self.module = module
        self.num_replicas = num_replicas

    def forward(self, batch, phase="train"):
        chunks = {name: tensor.chunk(self.num_replicas) for name, tensor in batch.items()}
        parts = [dict(zip(chunks, values, strict=True)) for values in zip(*chunks.values(), strict=False)]
        outputs = [None] * len(parts)
        errors = []
        grad_enabled = torch.is_grad_enabled()

        def call(i):
            try:
                with torch.set_grad_enabled(grad_enabled):
                    outputs[i] = self.module(parts[i], phase)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=(i,)) for i in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return self.gather(outputs, torch.device("cpu"))


class ReplicasOnCpu(DataParallel):
    """Replaces only `wrap` and the devices."""

    def __init__(self, num_replicas):
        super().__init__([torch.device("cpu")] * num_replicas)

    def wrap(self, net, example, phase):
        return ThreadedReplicas(net, self.num_replicas)


def trained(parallel, directory: Path, *more: str):
    argv = ["--task", WEIGHTED, "--epochs", "2", "--dtype", "float64", "--save-dir", str(directory),
            "--num-threads", "1", *more]  # fmt: skip
    flags, problems = parse(argv, several_devices=False)
    refuse(problems)
    set_up_torch(flags, parallel)
    run_directory = RunDirectory(directory, 3, print)
    run_directory.acquire()
    run, notes = build_run(flags, build_task(flags), parallel, run_directory)
    open_run(run, notes, flags, argv, run_directory)
    assert train(run)
    test = run.metrics("test", evaluate(run, "test"))
    run.close()
    run_directory.release()
    return load(directory / "last.pth"), test


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_equal_one_device(num_replicas, tmp_path):
    """Uneven chunks, fewer samples than replicas at the end of an epoch, accumulation, evaluation."""
    same_batch = ("--global-batch-size", "12")
    one, test_one = trained(SingleDevice(torch.device("cpu")), tmp_path / "one", *same_batch)
    many, test_many = trained(ReplicasOnCpu(num_replicas), tmp_path / "many", *same_batch, "--batch-size", "2")
    assert largest_difference(one, many) < 1e-9
    assert test_many == pytest.approx(test_one, rel=1e-9)


def test_replicas_enter_autocast_in_their_threads(tmp_path):
    state, _ = trained(ReplicasOnCpu(2), tmp_path / "amp", "--dtype", "float32", "--amp", "bf16", "--epochs", "1")
    plain, _ = trained(ReplicasOnCpu(2), tmp_path / "plain", "--dtype", "float32", "--epochs", "1")
    difference = largest_difference(state, plain)
    assert 0 < difference < 0.1


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_real_data_parallel_equals_one_gpu(tmp_path):
    same_batch = ("--global-batch-size", "12")
    one, _ = trained(SingleDevice(torch.device("cuda", 0)), tmp_path / "one", *same_batch)
    two, _ = trained(DataParallel([torch.device("cuda", i) for i in (0, 1)]), tmp_path / "two", *same_batch)
    assert largest_difference(one, two) < 1e-9


def test_double_on_one_replica_is_the_identity(tmp_path):
    one, _ = trained(SingleDevice(torch.device("cpu")), tmp_path / "one")
    same, _ = trained(ReplicasOnCpu(1), tmp_path / "same")
    assert_same_bits({"model": one["model"]}, {"model": same["model"]})


GOOD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def ddp(**flags):
    return MultiDeviceFlags(multi_gpu="ddp", **flags)


def test_processes_of_a_launcher_must_be_one_run():
    assert "leave it out" in read_rank_environment(GOOD, ddp(nproc=2))[1][0]
    assert (
        "use main_multi_gpu.py --multi-gpu ddp" in read_rank_environment(GOOD, MultiDeviceFlags(multi_gpu="dp"))[1][0]
    )
    assert one_process_problems({}) == one_process_problems(GOOD | {"WORLD_SIZE": "1"}) == []
    assert "use main_multi_gpu.py --multi-gpu ddp" in one_process_problems(GOOD)[0]


def test_rank_variables_are_read():
    assert read_rank_environment({}, ddp()) == (None, [])
    assert read_rank_environment(GOOD, ddp()) == (RankEnvironment(1, 2), [])
    local = GOOD | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read_rank_environment(local, ddp()) == (RankEnvironment(1, 2, 1, 2), [])
    assert read_rank_environment(GOOD, ddp(local_rank=1)) == (RankEnvironment(1, 2, 1), [])


@pytest.mark.parametrize(
    ("changes", "local_rank", "message"),
    [
        ({"RANK": "2"}, None, "RANK=2 must be below WORLD_SIZE=2"),
        ({"RANK": "one"}, None, "RANK=one"),
        ({"WORLD_SIZE": ""}, None, "WORLD_SIZE is not set"),
        ({"MASTER_PORT": ""}, None, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "70000"}, None, "MASTER_PORT=70000"),
        ({"LOCAL_RANK": "0"}, 1, "--local-rank 1 contradicts LOCAL_RANK=0"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, None, "LOCAL_RANK=1 must be below LOCAL_WORLD_SIZE=1"),
        ({"LOCAL_WORLD_SIZE": "3"}, None, "LOCAL_WORLD_SIZE=3 must not exceed WORLD_SIZE=2"),
    ],
)
def test_contradicting_rank_variables_are_named(changes, local_rank, message):
    environment, problems = read_rank_environment(GOOD | changes, ddp(local_rank=local_rank))
    assert environment is None
    assert any(message in problem for problem in problems), problems
