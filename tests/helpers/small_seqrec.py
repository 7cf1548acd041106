"""Small data for sequential recommendation: interactions of a few users, and a task with batches."""

import numpy as np
import torch

from tasks.seqrec import SeqrecFlags, SeqrecTask
from trainer.commands.build import assemble_run, build_task, prepare_training
from trainer.commands.parse import parse
from trainer.loading.order import SampleKeys
from trainer.parallel.strategy import SingleDevice

CPU = torch.device("cpu")
KINDS = ("hr", "ndcg", "mrr")
SMALL = ["--hidden-units", "8", "--num-heads", "2", "--maxlen", "6", "--time-span", "9"]
MHC = ["--mhc", "--mhc-sinkhorn-iters", "3"]
NUM_USERS, NUM_ITEMS = 40, 130


def histories():
    """Returns items and times of each user: 1 to 15 interactions, some with repeated items or equal times."""
    rng = np.random.default_rng(0)
    counts = [1, 2, 3, 3, 14, *rng.integers(3, 15, NUM_USERS - 5).tolist()]
    flat = np.concatenate([rng.permutation(NUM_ITEMS) + 1, rng.integers(1, NUM_ITEMS + 1, sum(counts) - NUM_ITEMS)])
    items = [part.tolist() for part in np.split(flat, np.cumsum(counts)[:-1])]
    for row in items[4:12]:  # test or validation targets that occur earlier in the history
        row.insert(len(row) - row[0] % 2, row[0])
    return items, [rng.choice([0, 1, 3, 50], len(row)).cumsum().tolist() for row in items]


ITEMS, TIMES = histories()


def write_interactions(path):
    lines = [
        f"{user} {item} {time}\n" for user, row in enumerate(ITEMS) for item, time in zip(row, TIMES[user], strict=True)
    ]
    path.write_text("user item time\n" + "".join(lines))
    return path


def assembled(argv, *more):
    flags, problems = parse([*argv, "--dtype", "float64", *more], several_devices=False)
    assert problems == []
    run = assemble_run(flags, build_task(flags), SingleDevice(CPU))
    prepare_training(flags, run.task, run.learner, run.plan.orders, run.memory)
    return run


def make_task(cache_dir, **settings):
    """Creates the task for generated data."""
    config = SeqrecFlags(**{"hidden_units": 8, "maxlen": 20, "dropout": 0.0} | settings)
    assert config.problems() == []
    return SeqrecTask(config, seed=0, cache_dir=cache_dir)


def make_batch(task, split="train", index=range(0, 200, 6)):
    keys = SampleKeys(np.array(index), epoch=0)
    return task.collate(task.splits()[split].__getitems__(keys), keys)
