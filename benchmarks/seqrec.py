"""Sequential recommendation in the forms shipped here, against the forms that public PyTorch implementations use.

    python benchmarks/seqrec.py

Three parts, each in one process on the same data and threads, the two sides in turns; each figure is the median of the
ratios of neighbouring turns, and a missed target is printed as missed. The references are in seqrec_reference.py.

tisasrec: a training step (forward, binary cross-entropy with one negative, backward, Adam) on one ready batch without
    padding. Both sides get the same items, targets and negatives; the reference gets its intervals ready-made, this
    project's makes them from the times in the step. Beforehand both give the same scores with equal weights.
sasrec: a training step with the sampling of its batch. Public code moves its sampler to other processes, which hides
    it only where cores are idle; here both sides sample in the process that trains, and the step alone is reported too.
    The reference has an output projection in its attention, which this project's has not.
evaluation: HR@10 and NDCG@10 among 100 negatives for every user, once with SASRec and once with TiSASRec, in batches as
    the trainer makes them. This project's side ranks among all items too. The reference is timed on a random sample of
    the users and scaled to all: every one of its forwards has the same size. Its intervals are one tensor operation,
    where public code has a loop over pairs in Python.

Peak memory of a step is that of the whole process, as the kernel counts it (VmHWM), less what it held before: each side
runs its step in a fresh process, after a tiny step that loads libraries and makes the optimizer's moments, and with the
high-water mark reset in between. That needs Linux; elsewhere it is not measured.

The data have the numbers of MovieLens-1M and random items, or are those of --data-dir.
"""

import argparse
import copy
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.seqrec_reference import (
    PythonSampler,
    Query,
    ReferenceModel,
    ReferenceSasRec,
    ReferenceTiSasRec,
    Sizes,
    adam,
    evaluate_users,
    interval_matrix,
    training_step,
)
from data.interactions.reader import Interactions, load_interactions
from models.sequential.sasrec import SASRec, SequentialRecommender
from models.sequential.tisasrec import TiSASRec
from trainer.commands.build import build_task, set_up_torch
from trainer.commands.flags import Flags
from trainer.commands.parse import parse
from trainer.config import refuse
from trainer.loading.batches import Batch
from trainer.loading.order import EpochOrder, SampleKeys, evaluation_keys, split_global_batch
from trainer.parallel.base import SingleDevice
from trainer.task import Objective, Task

K_CORE = 5
TISASREC_BATCH_SIZE, SASREC_BATCH_SIZE = 32, 128
USERS_PER_TURN = 50
SPEED_TARGETS = {"tisasrec": 45, "sasrec": 4, "evaluation of sasrec": 20, "evaluation of tisasrec": 40}
MEMORY_TARGET = 0.25
LARGEST_DIFFERENCE = 1e-10


@dataclass(frozen=True)
class Setting:
    """What every process of the benchmark works with."""

    data: Path
    cache_dir: Path
    num_threads: int

    def interactions(self) -> Interactions:
        return load_interactions(self.data, K_CORE, self.cache_dir)

    def flags(self, *model_flags: str) -> Flags:
        """The command line of a run of the trainer."""
        argv = [
            "--task", "seqrec", "--data-dir", str(self.data), "--cache-dir", str(self.cache_dir),
            "--k-core", str(K_CORE), "--device", "cpu", "--num-threads", str(self.num_threads),
            *size_flags(Sizes(num_items=0)), "--loss", "bce", "--eval-negatives", "parity", *model_flags,
        ]  # fmt: skip
        flags, problems = parse(argv, several_devices=False)
        refuse(problems)
        return flags

    def shipped(self, *model_flags: str) -> tuple[Task, Objective]:
        """The task and its objective, in train mode, as the command line builds them."""
        flags = self.flags(*model_flags)
        set_up_torch(flags, SingleDevice(torch.device("cpu")))
        torch.manual_seed(0)
        task = build_task(flags)
        return task, task.build_objective().train()


def size_flags(sizes: Sizes) -> list[str]:
    values = {
        "--maxlen": sizes.maxlen, "--hidden-units": sizes.width, "--num-blocks": sizes.num_blocks,
        "--num-heads": sizes.num_heads, "--dropout": sizes.dropout, "--time-span": sizes.time_span,
    }  # fmt: skip
    return [str(word) for pair in values.items() for word in pair]


# The data


def write_interactions(path: Path) -> None:
    """Lines of `user item time` with MovieLens-1M's numbers of users and items and its distribution of lengths."""
    num_users, num_items, shortest, median, mean, longest = 6040, 3416, 18, 94, 165, 2290
    rng = np.random.default_rng(0)
    spread = np.sqrt(2 * np.log((mean - shortest) / (median - shortest)))  # of a log-normal with that mean and median
    lengths = shortest + np.exp(rng.normal(np.log(median - shortest), spread, num_users))
    with open(path, "w") as file:
        for user, length in enumerate(np.minimum(lengths, longest).astype(int).tolist(), start=1):
            items = rng.permutation(num_items)[:length] + 1
            times = 978_300_000 + np.cumsum(np.exp(rng.normal(3, 2, length))).astype(np.int64)
            file.writelines(f"{user} {i} {t}\n" for i, t in zip(items.tolist(), times.tolist(), strict=True))


def histories(interactions: Interactions, leave_out: int) -> list[list[int]]:
    """Each user's items as Python lists, without the last ones."""
    bounds = zip(interactions.offsets[:-1], interactions.offsets[1:], strict=True)
    return [interactions.items[start : end - leave_out].tolist() for start, end in bounds]


# Timing


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


@contextmanager
def public_settings() -> Iterator[None]:
    """Lets the reference run as public code does: without deterministic algorithms, which have their price."""
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)


def take_turns(
    part: str, reference: Callable[[], object], lockstep: Callable[[], object], repeats: int, steps_per_turn: int,
    reference_scale: float = 1.0,
) -> dict:  # fmt: skip
    """Median seconds of both sides, and the median ratio.

    steps_per_turn: steps of this project's side in each turn; the slow side runs one.
    reference_scale: what one action of the reference is multiplied by to be as much work as the other side's.
    """
    with public_settings():
        reference()
    lockstep()
    turns = []
    for _ in range(repeats):
        with public_settings():
            slow = seconds(reference) * reference_scale
        turns.append((slow, statistics.median(seconds(lockstep) for _ in range(steps_per_turn))))
    ratio = statistics.median(slow / fast for slow, fast in turns)
    slow, fast = (statistics.median(side) for side in zip(*turns, strict=True))
    return {
        "reference_s": round(slow, 4),
        "lockstep_s": round(fast, 5),
        "ratio": round(ratio, 2),
        "ratios": [round(slow / fast, 2) for slow, fast in turns],
        "target": SPEED_TARGETS[part],
        "met": ratio >= SPEED_TARGETS[part],
    }


# Both sides' training steps


def shipped_adam(task: Task, objective: Objective) -> torch.optim.Optimizer:
    groups = task.param_groups(objective, "train")
    groups = [group | {"weight_decay": 0.0} for group in groups]
    return torch.optim.AdamW(groups, lr=1e-3, betas=task.defaults["betas"], fused=True)


def shipped_step(objective: Objective, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    sums = objective(batch, "train")
    (sums["loss"].sum() / batch["weight"].sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


def shipped_batch(task: Task, split: str, keys: SampleKeys) -> Batch:
    return task.collate(task.splits()[split].__getitems__(keys), keys)


def batch_without_padding(task: Task, batch_size: int) -> Batch:
    train = task.splits()["train"]
    full = np.flatnonzero(train.num_terms(np.arange(len(train))) == Sizes(0).maxlen)
    return shipped_batch(task, "train", SampleKeys(full[:batch_size], epoch=0))


def reference_inputs(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Items, positives and negatives of a batch without padding."""
    return batch["items"].numpy(), batch["targets"].numpy(), batch["negatives"][..., 0].numpy()


def first_steps(batch: Batch, num_rows: int, num_steps: int) -> Batch:
    """The beginnings of a few rows of a batch without padding."""
    short = {name: tensor[:num_rows] for name, tensor in batch.items()}
    short = {name: tensor[:, :num_steps] if tensor.dim() > 1 else tensor for name, tensor in short.items()}
    return short | {"length": torch.full((num_rows,), num_steps), "weight": torch.full((num_rows,), float(num_steps))}


# Equality


@torch.no_grad()
def with_equal_weights(
    model: SequentialRecommender, reference: ReferenceModel
) -> tuple[SequentialRecommender, ReferenceModel]:
    """Copies of both in float64, without dropout; biases and gains, too, are random, so that each of them matters."""
    model, reference = copy.deepcopy(model).double().eval(), copy.deepcopy(reference).double().eval()
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    copy_weights(model, reference)
    return model, reference


@torch.no_grad()
def copy_weights(source: SequentialRecommender, target: ReferenceModel) -> None:
    """Gives the reference the weights of a model of this project; those that it has beyond them do nothing."""
    target.item_table.load_state_dict(source.items.state_dict())
    target.last_norm.load_state_dict(source.norm.state_dict())
    if isinstance(source, TiSASRec) and isinstance(target, ReferenceTiSasRec):
        for kind, tables in (("position", target.position_tables), ("interval", target.interval_tables)):
            for table, part in zip(tables, ("keys", "values"), strict=True):
                table.load_state_dict(getattr(source, f"{kind}_{part}").state_dict())
    if isinstance(source, SASRec) and isinstance(target, ReferenceSasRec):
        target.position_table.load_state_dict(source.position_embedding.state_dict())
    blocks = zip(source.blocks, target.attention_norms, target.attentions, target.ffn_norms, target.ffns, strict=True)
    for block, attention_norm, attention, ffn_norm, ffn in blocks:
        attention_norm.load_state_dict(block.attention_connection.norm.state_dict())
        ffn_norm.load_state_dict(block.feed_forward_connection.norm.state_dict())
        for conv, linear in ((ffn.conv1, block.feed_forward.layers[0]), (ffn.conv2, block.feed_forward.layers[3])):
            conv.weight.copy_(linear.weight.unsqueeze(-1))
            conv.bias.copy_(linear.bias)
        copy_projections(block.attention.projections, attention)


def copy_projections(source: torch.nn.Module, target: torch.nn.Module) -> None:
    layers = (source.query, source.key, source.value)
    biases = [torch.zeros_like(source.query.bias) if layer.bias is None else layer.bias for layer in layers]
    if isinstance(target, torch.nn.MultiheadAttention):
        target.in_proj_weight.copy_(torch.cat([layer.weight for layer in layers]))
        target.in_proj_bias.copy_(torch.cat(biases))
        target.out_proj.weight.copy_(torch.eye(len(target.out_proj.weight)))
        target.out_proj.bias.zero_()
        return
    for to, layer, bias in zip((target.q, target.k, target.v), layers, biases, strict=True):
        to.weight.copy_(layer.weight)
        to.bias.copy_(bias)


@torch.no_grad()
def check_training(model: SequentialRecommender, reference: ReferenceModel, batch: Batch) -> float:
    """Both sides' scores of targets and negatives in a batch without padding."""
    model, reference = with_equal_weights(model, reference)
    states = model.encode(batch["items"], batch["length"], batch.get("times"))
    ours = [(states * model.items(batch[name].view(states.shape[:2]))).sum(-1) for name in ("targets", "negatives")]
    theirs = reference(*reference_inputs(batch), reference_intervals(batch))
    difference = float((torch.stack(ours) - torch.stack(theirs)).abs().max())
    return equal(difference)


def equal(difference: float) -> float:
    """Ends the program unless this difference of scores, in float64 with equal weights, is rounding."""
    print(f"  scores with equal weights, float64: largest difference {difference:.1e}", flush=True)
    if not difference < LARGEST_DIFFERENCE:
        sys.exit("the two sides are not the same function")
    return difference


def reference_intervals(batch: Batch) -> Tensor | None:
    return interval_matrix(batch["times"], Sizes(0).time_span) if "times" in batch else None


# The parts


def tisasrec(setting: Setting, repeats: int) -> dict:
    task, objective = setting.shipped()
    batch = batch_without_padding(task, TISASREC_BATCH_SIZE)
    reference = ReferenceTiSasRec(Sizes(setting.interactions().num_items)).train()
    difference = check_training(objective.model, reference, first_steps(batch, 4, Sizes(0).maxlen))
    slow = partial(training_step, reference, adam(reference), *reference_inputs(batch), reference_intervals(batch))
    fast = partial(shipped_step, objective, shipped_adam(task, objective), batch)
    result = take_turns("tisasrec", slow, fast, repeats, steps_per_turn=10)
    return result | {"largest_score_difference": difference} | memory(setting)


def sasrec(setting: Setting, repeats: int) -> dict:
    task, objective = setting.shipped("--no-time")
    interactions = setting.interactions()
    reference = ReferenceSasRec(Sizes(interactions.num_items)).train()
    difference = check_training(objective.model, reference, batch_without_padding(task, 4))
    sampler = PythonSampler(histories(interactions, 2), interactions.num_items, Sizes(0).maxlen, seed=0)
    reference_adam, our_adam = adam(reference), shipped_adam(task, objective)
    keys = training_keys(len(task.splits()["train"]))
    next_reference_batch = partial(sampler.next_batch, SASREC_BATCH_SIZE)

    def next_batch() -> Batch:
        return shipped_batch(task, "train", next(keys))

    result = take_turns(
        "sasrec",
        lambda: training_step(reference, reference_adam, *next_reference_batch()),
        lambda: shipped_step(objective, our_adam, next_batch()),
        3 * repeats,
        steps_per_turn=2,
    )
    sampling = [statistics.median(seconds(draw) for _ in range(5)) for draw in (next_reference_batch, next_batch)]
    step_ratio = (result["reference_s"] - sampling[0]) / (result["lockstep_s"] - sampling[1])
    return result | {
        "largest_score_difference": difference,
        "reference_sampling_s": round(sampling[0], 4),
        "lockstep_sampling_s": round(sampling[1], 5),
        "ratio_without_sampling": round(step_ratio, 2),
    }


def training_keys(num_samples: int) -> Iterator[SampleKeys]:
    """Whole batches for ever, in the order of the trainer."""
    for epoch in count():
        order = EpochOrder(0, epoch, 0, num_samples)
        for start in range(0, num_samples - SASREC_BATCH_SIZE + 1, SASREC_BATCH_SIZE):
            samples = order.take(start, start + SASREC_BATCH_SIZE)
            yield from split_global_batch(samples, (0, 1), SASREC_BATCH_SIZE, epoch)


def evaluation(setting: Setting, repeats: int) -> dict:
    return {model: evaluation_of(model, setting, repeats) for model in ("sasrec", "tisasrec")}


def evaluation_of(model: str, setting: Setting, repeats: int) -> dict:
    task, objective = setting.shipped(*(["--no-time"] if model == "sasrec" else []))
    interactions = setting.interactions()
    sizes = Sizes(interactions.num_items)
    reference = (ReferenceSasRec(sizes) if model == "sasrec" else ReferenceTiSasRec(sizes)).eval()
    test = task.splits()["test"]
    rows = shipped_batch(task, "test", SampleKeys(np.arange(len(test)), epoch=0))
    difference = check_evaluation(objective, reference, rows)
    users = queries_of(rows, test.users, histories(interactions, 2), with_times=model == "tisasrec")
    random = np.random.RandomState(0)

    def some_users() -> None:
        chosen = random.choice(len(users), USERS_PER_TURN, replace=False)
        evaluate_users(reference, [users[i] for i in chosen], sizes, random)

    result = take_turns(
        f"evaluation of {model}",
        some_users,
        lambda: evaluate_all(task, objective.eval(), setting.flags().batch.eval_batch_size),
        repeats,
        steps_per_turn=1,
        reference_scale=len(users) / USERS_PER_TURN,
    )
    return result | {
        "largest_score_difference": difference,
        "num_users": len(users),
        "reference_users_timed": USERS_PER_TURN * repeats,
    }


def queries_of(rows: Batch, users: np.ndarray, train_items: list[list[int]], with_times: bool) -> list[Query]:
    """What the reference evaluates, in the form of Python lists."""
    lengths = rows["length"].tolist()
    items, times = (
        [row[:n] for row, n in zip(rows[name].tolist(), lengths, strict=True)] for name in ("items", "times")
    )
    targets = rows["target"].tolist()
    return [
        Query(items[i], times[i] if with_times else None, targets[i], train_items[user])
        for i, user in enumerate(users.tolist())
    ]


@torch.no_grad()
def check_evaluation(objective: Objective, reference: ReferenceModel, rows: Batch) -> float:
    """Both sides' scores of the candidates of some users without padding."""
    full = torch.nonzero(rows["length"] == Sizes(0).maxlen).squeeze(1)[:4]
    rows = {name: tensor[full] for name, tensor in rows.items()}
    model, reference = with_equal_weights(objective.model, reference)
    ours = model(rows["items"], rows["length"], rows.get("times")).gather(1, rows["candidates"])
    items, candidates = rows["items"].numpy(), rows["candidates"].numpy()
    intervals = [None] * len(full) if "times" not in rows else reference_intervals(rows).unsqueeze(1)
    theirs = [reference.predict(items[i : i + 1], candidates[i], intervals[i]) for i in range(len(full))]
    difference = float((ours - torch.cat(theirs)).abs().max())
    return equal(difference)


@torch.no_grad()
def evaluate_all(task: Task, objective: Objective, batch_size: int) -> dict[str, float]:
    """The metrics of the test set, as the trainer computes them."""
    totals: dict[str, Tensor] = {}
    for keys in evaluation_keys(len(task.splits()["test"]), (0, 1), batch_size):
        batch = shipped_batch(task, "test", keys)
        for name, value in (objective(batch) | {"weight": batch["weight"].sum()}).items():
            totals[name] = totals.get(name, 0.0) + value.double()
    return task.summarise(totals)


# Memory


def memory(setting: Setting) -> dict:
    """Peak memory of one TiSASRec training step of each side."""
    if not Path("/proc/self/clear_refs").exists():
        return {"reference_peak_mib": None, "lockstep_peak_mib": None, "memory_ratio": None}
    peaks = {}
    for side in ("reference", "lockstep"):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            peaks[side] = fresh.submit(step_memory, setting, side).result()
    ratio = peaks["lockstep"] / peaks["reference"]
    return {f"{side}_peak_mib": round(peak / 2**20, 1) for side, peak in peaks.items()} | {
        "memory_ratio": round(ratio, 3),
        "memory_target": MEMORY_TARGET,
        "memory_met": ratio <= MEMORY_TARGET,
    }


def step_memory(setting: Setting, side: str) -> int:
    """Bytes by which a TiSASRec training step raises this process's peak."""
    task, objective = setting.shipped()
    batch = batch_without_padding(task, TISASREC_BATCH_SIZE)
    tiny = first_steps(batch, 2, 8)
    if side == "lockstep":
        optimizer = shipped_adam(task, objective)
        steps = [partial(shipped_step, objective, optimizer, data) for data in (tiny, batch)]
    else:
        torch.use_deterministic_algorithms(False)
        model = ReferenceTiSasRec(Sizes(setting.interactions().num_items)).train()
        optimizer = adam(model)
        steps = [
            partial(training_step, model, optimizer, *reference_inputs(data), reference_intervals(data))
            for data in (tiny, batch)
        ]
    steps[0]()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in use
    before = peak_memory()
    steps[1]()
    return peak_memory() - before


def peak_memory() -> int:
    """The most memory that this process has held since the last reset, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


# The command line


def report(part: str, result: dict) -> None:
    if part == "evaluation":
        for model, of_model in result.items():
            print(f"  {model}, {of_model['num_users']} users, the reference's seconds scaled", end=" ")
            print(f"from {of_model['reference_users_timed']} random ones:")
            report_speed(of_model)
        return
    report_speed(result)
    if part == "sasrec":
        print(
            f"  of these, sampling: {result['reference_sampling_s']} s and {result['lockstep_sampling_s']} s;", end=" "
        )
        print(f"without it {result['ratio_without_sampling']} times faster")
    elif result["memory_ratio"] is not None:
        print(f"  peak memory of the step: reference {result['reference_peak_mib']} MiB,", end=" ")
        print(f"Lockstep {result['lockstep_peak_mib']} MiB: {result['memory_ratio']} of it", end=" ")
        print(f"(target: at most {MEMORY_TARGET}, {'met' if result['memory_met'] else 'MISSED'})")


def report_speed(result: dict) -> None:
    print(f"  reference {result['reference_s']} s, Lockstep {result['lockstep_s']} s:", end=" ")
    print(f"{result['ratio']} times faster (target: at least {result['target']},", end=" ")
    print("met)" if result["met"] else "MISSED)", flush=True)


def main() -> None:
    parts = {"tisasrec": tisasrec, "sasrec": sasrec, "evaluation": evaluation}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=parts, help="only this one (default: all)")
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads(), help="CPU threads of both sides")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each side; three times as many for sasrec")
    parser.add_argument("--data-dir", type=Path, help="interactions to use instead of generated ones")
    args = parser.parse_args()
    results: dict = {"num_threads": args.num_threads, "torch": torch.__version__, "data": str(args.data_dir)}
    with tempfile.TemporaryDirectory() as folder:
        data = args.data_dir or Path(folder) / "interactions.txt"
        if args.data_dir is None:
            results["data"] = "generated"
            write_interactions(data)
        setting = Setting(data, Path(folder) / "cache", args.num_threads)
        for name in [args.part] if args.part else parts:
            print(name, flush=True)
            results[name] = parts[name](setting, args.repeats)
            report(name, results[name])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
