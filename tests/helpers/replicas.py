"""Replacement for nn.DataParallel on machines without GPUs, and a function that trains with any strategy."""

import threading
from pathlib import Path

import torch
from torch import nn

from tests.conftest import WEIGHTED, load
from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.manifest import Retention
from trainer.commands.build import build_run, build_task, open_run, set_up_torch
from trainer.commands.parse import parse
from trainer.config import refuse
from trainer.loop.evaluate import evaluate, metrics_of
from trainer.loop.train import train
from trainer.parallel.data_parallel import DataParallel, SummedReplicas


class ThreadedReplicas(SummedReplicas):
    """Imitates nn.DataParallel on CPU threads.

    Like torch's scatter, splits each tensor into chunks along dim 0, uses as many replicas as the shortest list of
    chunks has, and passes other values to all replicas. Threads start without the caller's autocast.
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
    def __init__(self, num_replicas):
        super().__init__([torch.device("cpu")] * num_replicas)

    def evaluation_module(self, net):
        return ThreadedReplicas(net, self.num_replicas)


def trained(strategy, directory: Path, *more: str):
    argv = ["--task", WEIGHTED, "--epochs", "2", "--dtype", "float64", "--save-dir", str(directory),
            "--num-threads", "1", *more]  # fmt: skip
    flags, problems = parse(argv, several_devices=False)
    refuse(problems)
    set_up_torch(flags, strategy.group)
    run_directory = RunDirectory(directory, Retention(3), print)
    run_directory.acquire()
    run, notes = build_run(flags, build_task(flags), strategy, run_directory)
    open_run(run, notes, flags, argv)
    train(run)
    test = metrics_of(run.task, run.group, {"test": evaluate(run, "test")})
    run.close()
    run_directory.release()
    return load(directory / "last.pth"), test
