"""Creates batch loaders, which build batches in this process, in worker processes, or on the GPU."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from trainer.commands.flags import Flags
from trainer.common.errors import UserError
from trainer.flags import RunFlags
from trainer.loading.batches import KeyedDataset
from trainer.loading.on_device import DeviceLoader, Movable, moved, num_bytes
from trainer.loading.order import Position
from trainer.loading.workers import BatchLoader, Workers, shared_memory
from trainer.parallel.group import Group
from trainer.parallel.strategy import Strategy
from trainer.task import Task, training_streams

Loading = tuple[Workers, dict[str, BatchLoader]]
LARGEST_SHARE = 1 / 4
"""Largest fraction of a GPU's free memory that `--data-on auto` uses for data."""
SURELY_FITS = 2**30
"""Size in bytes of data assumed to fit on any GPU, for decisions before CUDA is initialised."""
MOST_WORKERS = 8
"""Most workers that `--num-workers auto` starts: enough for steps of 1.3 ms if building a batch takes 10 ms."""


def start_loading(flags: Flags, task: Task, strategy: Strategy, trains: bool) -> Loading:
    """Creates the CPU loaders of all data sets, and forks workers before CUDA is initialised.

    trains: whether training steps follow. All processes must call this function. Raises UserError if two processes
    share a GPU under NCCL.
    """
    workers = build_workers(flags.run, task, strategy.group, trains)
    loaders = build_loaders(task, workers)
    if strategy.device.type == "cuda":
        with ExitStack() as on_failure:
            on_failure.callback(workers.close)
            workers.start()
            strategy.group.check_devices()
            on_failure.pop_all()
    return workers, loaders


def build_workers(given: RunFlags, task: Task, group: Group, trains: bool) -> Workers:
    """Creates the workers of `--num-workers`. trains: whether training steps follow; otherwise "auto" creates none."""
    for_gpu = group.device.type == "cuda"
    if given.num_workers != "auto":
        return Workers(given.num_workers, for_gpu)
    training = data_by_loader(task)["train"]
    movable = [each for each in training if isinstance(each, Movable)]
    moves = len(movable) == len(training) and given.data_on != "host" and num_bytes(movable) <= SURELY_FITS
    spare = group.num_cores - 1
    # training on the CPU needs all cores, and each worker would read all of a stream
    takes_workers = for_gpu and trains and not moves and not training_streams(task)
    num_workers = max(0, min(MOST_WORKERS, spare)) if takes_workers else 0
    return Workers(num_workers, for_gpu, on_trial=num_workers > 0, room=shared_memory() / group.local_world_size)


def build_loaders(task: Task, workers: Workers) -> dict[str, BatchLoader]:
    """Creates the CPU loaders of all data sets, by split."""
    return {
        name: BatchLoader(datasets, task.collate, workers, trains=name == "train")
        for name, datasets in data_by_loader(task).items()
    }


def loaders_on_device(task: Task, data_on: str, group: Group) -> dict[str, BatchLoader]:
    """Moves data sets to this process's GPU, and returns their loaders. All processes must call this function.

    With `--data-on device`, raises UserError if data cannot be moved.
    """
    if data_on == "host" or group.device.type != "cuda":
        return {}
    sources = data_by_loader(task)
    can_move = {name: parts for name, parts in sources.items() if all(isinstance(part, Movable) for part in parts)}
    stays = [f"{name} ({type(sources[name][0]).__name__})" for name in sources if name not in can_move]
    parts: list[Any] = [part for each in can_move.values() for part in each]
    needed, free = num_bytes(parts), torch.cuda.mem_get_info(group.device)[0]
    if data_on == "device":
        if stays:
            raise UserError(
                f"--data-on device: moves only data of type trainer.Movable, not {', '.join(stays)}; use --data-on auto"
            )
        group.together(lambda: _require_memory(needed, free, group.device))
    elif not all(group.all_gather_object(needed <= LARGEST_SHARE * free)):
        return {}
    there = iter(moved(parts, group.device))
    return {
        name: DeviceLoader([next(there) for _ in each], task.collate, group.device) for name, each in can_move.items()
    }


def data_by_loader(task: Task) -> dict[str, list[KeyedDataset]]:
    """Returns the data sets of each loader: one data set per phase for "train", and one for each other split."""
    evaluated = {name: [dataset] for name, dataset in task.splits().items() if name != "train"}
    return {"train": [task.training_data(phase) for phase in task.phases], **evaluated}


def _require_memory(needed: int, free: int, device: torch.device) -> None:
    if needed > free:
        raise UserError(
            f"--data-on device: the data take {needed / 1e9:.1f} GB, but only {free / 1e9:.1f} GB of {device} are free"
            "; use --data-on host"
        )


def where_data_are(task: Task, loaders: Mapping[str, BatchLoader], data_on: str, device: torch.device) -> list[str]:
    """Returns at most one line, which says which data are on the GPU or why none are."""
    there = [name for name, loader in loaders.items() if isinstance(loader, DeviceLoader)]
    parts: Any = [each for own in data_by_loader(task).values() for each in own if isinstance(each, Movable)]
    if there:
        return [f"Data on {device}: {', '.join(there)}, {num_bytes(parts) / 1e6:.1f} MB. Batches are built on the GPU."]
    if device.type == "cuda" and data_on == "auto" and parts:
        return [f"Data on the host: they would take more than {LARGEST_SHARE:.0%} of the free memory of {device}."]
    if device.type != "cuda" and data_on == "device":
        return ["--data-on device: has no effect without a GPU."]
    return []


def remarks_on_streams(
    task: Task, turns: Sequence[int], position: Position, world_size: int, num_workers: int
) -> list[str]:
    """Returns lines about how each process reads a stream, and how many samples it reads again after a resume."""
    lines = []
    for phase, dataset in training_streams(task).items():
        index = task.phases.index(phase)
        num_again = dataset.num_read_again(index, *position.of_phase(index, bool(turns)))
        name = f"Stream{f' of phase {phase}' if len(task.phases) > 1 else ''}"
        readers = "every worker of " * (num_workers > 0) + ("every process" if world_size > 1 else "this process")
        if world_size > 1 or num_workers:
            lines.append(f"{name}: {readers} reads the whole stream and keeps only the samples of its own batches.")
        if num_again:
            lines.append(f"{name}: resuming first reads {num_again} samples again.")
    return lines
