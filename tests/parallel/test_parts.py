"""With `--parts`, any number of devices trains the same bits as a bare loop that adds gradients in a binary tree."""

import functools
import hashlib
import json
import math
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from tests.conftest import ROOT, cut_back, load, read_metrics, results_of
from tests.helpers import forks
from tests.helpers.forks import folder_of_world, main_of_rank
from tests.helpers.parted_task import Parted, PartedFlags
from trainer.commands.build import set_up_torch
from trainer.commands.parse import parse
from trainer.commands.planning import arrange_batches
from trainer.common.errors import UserError
from trainer.loading.order import EpochOrder, SampleKeys
from trainer.loading.workers import BatchLoader
from trainer.loop.parts import TreeSum, add_grads, take_grads
from trainer.parallel import process_group
from trainer.parallel.flat_gradients import FlatGradients
from trainer.parallel.group import Group
from trainer.parallel.strategy import SingleDevice, Strategy

FILE = ROOT / "tests" / "helpers" / "parted_task.py"
NUM_PARTS, SIZE, EPOCHS, LR, MAX_NORM = 16, 3, 3, 0.02, 1.0
WHOLE = NUM_PARTS * SIZE
MID_EPOCH = 3
"""Optimizer step. Every epoch has two, the second with 5 samples, so that most of its parts are empty."""
FLAGS = [
    "--epochs", EPOCHS, "--batch-size", SIZE, "--parts", NUM_PARTS, "--lr", LR, "--device", "cpu", "--log-interval", 2,
    "--save-every-steps", MID_EPOCH, "--keep-checkpoints", 0,
]  # fmt: skip
EXACT = ["--schedule", "constant", "--warmup-epochs", 0, "--max-grad-norm", MAX_NORM]
CASES = {
    "one phase": ["--task", f"{FILE}:Parted", *EXACT],
    "two phases": [
        "--task", f"{FILE}:InTurns", "--amp", "bf16", "--ema-decay", 0.9, "--optimizer", "sgd", "--momentum", 0.9,
        "--max-grad-norm", 0.05,
    ],
}  # fmt: skip


# --- the bare loop -----------------------------------------------------------------------------------------------


def in_tree(values):
    """Returns the sum of the values in a binary tree, in which None adds nothing."""
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    found = [each for each in (in_tree(values[:half]), in_tree(values[half:])) if each is not None]
    return found[0] + found[1] if len(found) == 2 else (found or [None])[0]


def learnt():
    """Returns the model's state dict after plain float32 steps of torch's AdamW, and the number of clipped steps."""
    task = Parted(PartedFlags(), seed=0, cache_dir=None)
    torch.manual_seed(0)
    objective = task.build_objective().train()
    model, loader = objective.model, BatchLoader([task.splits()["train"]], task.collate)
    strategy, num_train = SingleDevice(torch.device("cpu")), task.config.num_train
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    params = [p for group in groups for p in group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
    num_clipped = 0
    for epoch in range(EPOCHS):
        order = EpochOrder(0, epoch, 0, num_train).take(0, num_train)
        for start in range(0, num_train, WHOLE):
            samples = order[start : start + WHOLE]
            keys = [SampleKeys(samples[part::NUM_PARTS], epoch) for part in range(min(NUM_PARTS, len(samples)))]
            batches = list(loader(keys))
            total = math.fsum(math.fsum(batch["weight"].tolist()) for batch in batches)
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            grads, changes = [], []
            for part, batch in enumerate(batches):
                for name, buffer in model.named_buffers():
                    buffer.copy_(before[name])
                strategy.seed_dropout(0, epoch, 0, start, part, same_everywhere=True)
                loss = objective(batch)["loss"]
                loss.backward(torch.tensor(1 / total))
                grads.append([p.grad for p in params])
                model.zero_grad()
                statistics = [model.norm.running_mean - before["norm.running_mean"]]
                statistics += [model.norm.running_var - before["norm.running_var"]]
                changes.append([each * len(batch["weight"]) for each in statistics])
                if part == 0:
                    first = model.queue.clone(), model.num_forwards.clone()
            lacking = [None] * (NUM_PARTS - len(batches))
            for parameter, *own in zip(params, *grads, strict=True):
                parameter.grad = in_tree([*own, *lacking])
            for name, *own in zip(("running_mean", "running_var"), *changes, strict=True):
                change = in_tree([*own, *lacking]) / len(samples)
                getattr(model.norm, name).copy_(before[f"norm.{name}"] + change)
            model.norm.num_batches_tracked.copy_(before["norm.num_batches_tracked"] + len(batches))
            model.queue.copy_(first[0])
            model.num_forwards.copy_(first[1])
            num_clipped += bool(nn.utils.clip_grad_norm_(params, MAX_NORM) > MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict(), num_clipped


def test_one_device_matches_a_bare_loop_bit_identically(run_here, tmp_path):
    out, _ = run_here(*CASES["one phase"], *FLAGS, "--save-dir", tmp_path)
    assert f"; each device runs {NUM_PARTS} forward/backward pass(es) per step and stores 5 gradient(s)." in out
    expected, num_clipped = learnt()
    found = load(tmp_path / "last.pth")["model"]
    assert num_clipped > 0
    assert {name: digest(value) for name, value in found.items()} == {n: digest(v) for n, v in expected.items()}


def test_absent_samples_change_no_bit():
    """A part without a gradient, or a process without parts, does not even change the sign of a zero."""
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1, dtype=torch.complex64))]
    flat, tree, sent = FlatGradients(params), TreeSum(add_grads), []
    real, imaginary = torch.tensor([-0.0, 1.0]), torch.tensor([complex(-0.0, -0.0)])
    for grads in ([real.clone(), imaginary], [None, None], [real, None]):
        for parameter, grad in zip(params, grads, strict=True):
            parameter.grad = grad
        tree.add(take_grads(params))
        assert [p.grad for p in params] == [None, None]
    for parameter, grad in zip(params, tree.total(), strict=True):
        parameter.grad = grad
    assert digest([p.grad for p in params]) == digest([2 * real, imaginary])
    for parameter in params:
        parameter.grad = None
    flat.sum(lambda values: sent.append(values.clone()))
    assert all(torch.signbit(values.flatten()[:2]).all() and not values.any() for values in sent) and len(sent) == 2
    assert [p.grad for p in params] == [None, None]


# --- several devices ---------------------------------------------------------------------------------------------


@contextmanager
def attributes(owner, **others):
    before = {name: vars(owner)[name] for name in others}
    for name, value in others.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def in_order_of_rank():
    """Puts neighbouring parts on different devices, so that the order of sums depends on the number of devices."""

    def shards(self):
        return [(part, NUM_PARTS) for part in range(self.group.rank, NUM_PARTS, self.group.world_size)]

    return attributes(Strategy, shards=property(shards))


def accumulated():
    """Adds the parts of a device into one gradient, one after another."""

    def add(self, value):
        self.waiting = [(0, self._add(self.waiting[0][1], value) if self.waiting else value)]

    return attributes(TreeSum, add=add)


BROKEN = {"in order of rank": in_order_of_rank, "accumulated": accumulated}


def run_all(environment, folder, before):
    """Trains every case on one rank. before: folder of a world whose runs it also resumes in the middle of an epoch."""
    status = 0
    for name in CASES:
        with attributes(process_group, DIRECT_BYTES=0) if name == "two phases" else nullcontext():  # exchanges slices
            status |= run_once(environment, name, folder / name)
        if before is not None:
            if environment.rank == 0:  # the other ranks wait for rank 0
                cut_back(before / name, up_to_mid_epoch(before / name), folder / f"{name} resumed")
            status |= run_once(environment, name, folder / f"{name} resumed")
    for name, broken in BROKEN.items():
        with broken():
            status |= run_once(environment, "one phase", folder / name, "--epochs", 2)
    return status


def up_to_mid_epoch(place):
    """Returns the manifest's entries up to the mid-epoch checkpoint."""
    entries = json.loads((place / "manifest.json").read_text())["checkpoints"]
    (middle,) = [i for i, entry in enumerate(entries) if entry["step"] == MID_EPOCH and entry["samples"] > 0]
    return entries[: middle + 1]


def run_once(environment, name, place, *more):
    return main_of_rank(environment, [*CASES[name], *FLAGS, *more], place)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns the folder of the runs by world size. Worlds of 2 and 1 also resume runs of twice as many processes."""
    found = {}
    for world_size in (4, 2, 1):
        run = functools.partial(run_all, before=found.get(2 * world_size))
        found[world_size] = folder_of_world(run, world_size, tmp_path_factory.mktemp("world"))
    return found


def digest(value):
    """Returns the SHA-256 of the bytes of a tensor, or of a nested state."""
    sha = hashlib.sha256()

    def add(part):
        if isinstance(part, torch.Tensor):
            sha.update(part.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for name, item in part.items():
                add(name)
                add(item)
        elif isinstance(part, list | tuple):
            for item in part:
                add(item)
        else:
            sha.update(repr(part).encode())

    add(value)
    return sha.hexdigest()


def digests(folder):
    """Returns the digests of what a run has learnt and logged, by name."""
    state = load(folder / "last.pth")
    learnt = ("model", "training_model", "optimizers", "best", "totals", "position")
    logged = {event: read_metrics(folder, event) for event in ("epoch", "step", "result")}
    kept = {name: state[name] for name in learnt if name in state} | {"metrics": results_of(folder)["metrics"]}
    assert all(logged.values())
    return {name: digest(value) for name, value in (kept | logged).items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_several_devices_train_bit_identically(world_size, case, folders):
    assert digests(folders[world_size] / case) == digests(folders[1] / case)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_resumes_bit_identically_on_half_the_devices(world_size, case, folders):
    assert digests(folders[world_size] / f"{case} resumed") == digests(folders[1] / case)


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("world_size", [2, 4])
def test_another_order_of_summation_is_detected(world_size, broken, folders):
    """Without such a difference, the comparisons above would prove nothing."""
    places = folders[1] / "one phase", folders[world_size] / broken
    right, wrong = (load(place / up_to_mid_epoch(place)[-1]["file"]) for place in places)
    assert digest(wrong["model"]) != digest(right["model"])


TABLES = {
    "har": ["--task", "har", "--num-members", 1],
    "seqrec": ["--task", "seqrec"],
    "kgat": ["--task", "kgat", "--model", "kgat"],
    "speech": ["--task", "speech"],
    "tabular": ["--task", "tabular", "--num-tables", 64, "--num-val-tables", 16],
    "steps left out": [
        "--task",
        f"{ROOT / 'tests' / 'helpers' / 'poisoned_task.py'}:Poisoned",
        "--poisoned",
        5,
        "--poisoned-epoch",
        0,
        "--num-train",
        24,
        "--batch-norm",
        "--on-nonfinite",
        "skip",
        "--log-interval",
        2,
    ],
    "a large model": [*CASES["one phase"], "--wide", 1200],
    "eight processes": [*CASES["one phase"], "--worlds", "1,2,4,8"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_digests_of_every_workload_are_equal(name, command):
    more = ["--max-steps", 4, "--batch-size", 4, "--device", "cpu"]
    out = command("benchmarks/equal_bits.py", *TABLES[name], *more, timeout=900).stdout
    assert json.loads(out.splitlines()[-1])["equal"]


# --- refusals and resumes -----------------------------------------------------------------------------------------


REFUSED = {
    "--parts 3": "--parts 3: must be a power of two",
    "--parts 4 --grad-accum-steps 2": "--parts 4 and --grad-accum-steps 2: cannot be combined",
    "--parts 4 --multi-gpu fsdp": "--parts 4: needs --multi-gpu ddp, as fsdp adds gradients in no fixed order",
    "--parts 4 --multi-gpu dp": "--parts 4: needs --multi-gpu ddp, as dp adds gradients in no fixed order",
    "--parts 4 --multi-gpu ddp --sync-bn": "--parts 4 and --sync-bn: cannot be combined",
}


@pytest.mark.parametrize("words", REFUSED)
def test_incompatible_flags_are_refused(words):
    _, problems = parse(words.split(), several_devices="--multi-gpu" in words)
    assert any(problem.startswith(REFUSED[words]) for problem in problems), problems


@pytest.mark.parametrize(
    ("words", "num_devices", "message"),
    [
        ("--parts 4", 3, "--parts 4: must be divisible by 3, the number of devices"),
        ("--parts 4", 8, "--parts 4: must be divisible by 8, the number of devices"),
        (
            "--parts 4 --global-batch-size 3",
            1,
            "--global-batch-size 3: must be from 4 to 128, because each of 4 parts",
        ),
        ("--parts 2 --global-batch-size 65", 1, "--global-batch-size 65: must be from 2 to 64, because each of 2"),
    ],
)
def test_batches_that_cannot_be_divided_into_parts_are_refused(words, num_devices, message):
    flags, _ = parse(words.split(), several_devices=False)
    strategy = SingleDevice(torch.device("cpu"), flags.batch.parts)
    strategy.group.world_size = num_devices
    with pytest.raises(UserError, match=message):
        arrange_batches(flags, {}, [32], strategy, None)


def test_a_task_order_with_a_batch_that_parts_cannot_hold_is_refused(run_here, tmp_path):
    (tmp_path / "large.py").write_text(
        "import numpy as np\nfrom tests.helpers.parted_task import Parted\n\nclass Large(Parted):\n"
        "    def order(self, phase, epoch, global_batch_size):\n        return [np.arange(40), np.arange(40, 53)]\n"
    )
    argv = ["--task", f"{tmp_path / 'large.py'}:Large", "--batch-size", 8, "--device", "cpu", "--save-dir", tmp_path]
    _, err = run_here(*argv, "--parts", 4, status=2)
    assert "--parts 4: the task's order has a global batch of 40 samples" in err
    run_here(*argv, "--parts", 8, "--epochs", 1)


def test_sparse_gradients_are_refused(run_here, tmp_path):
    task = f"{ROOT / 'tests' / 'helpers' / 'token_task.py'}:Sparse"
    _, err = run_here("--task", task, "--parts", 2, "--device", "cpu", "--save-dir", tmp_path, status=2)
    assert "--parts: does not support sparse gradients" in err


@pytest.mark.parametrize(("words", "variable", "expected"), [("", None, 1), ("--num-threads 2", None, 2), ("", "4", 4)])
def test_a_process_uses_one_thread_by_default(words, variable, expected, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(4)  # torch reads the variable only when it is imported
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    flags, _ = parse(["--parts", "2", *words.split()], several_devices=False)
    try:
        set_up_torch(flags, Group([torch.device("cpu")]))
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_a_resumed_run_keeps_its_number_of_threads(run_here, tmp_path):
    argv, num_threads = [*CASES["one phase"], *FLAGS, "--save-dir", tmp_path], torch.get_num_threads()
    run_here(*argv, "--epochs", 1)
    _, err = run_here(*argv, "--epochs", 2, "--num-threads", 2, status=2)
    torch.set_num_threads(num_threads)
    assert "--num-threads 2: the checkpoint was trained with 1" in err and "use --num-threads 1" in err


def test_a_run_may_resume_with_and_without_parts(run_here, tmp_path):
    """Each run resumes in the middle of the epoch, with the sums of metrics so far."""
    argv = [*CASES["one phase"], *FLAGS, "--epochs", 1, "--global-batch-size", 16, "--dropout", 0]
    losses, more = [], []
    for parts in (0, 16, 8, 0):
        place = tmp_path / f"{len(losses)}"
        run_here(*argv, "--batch-size", 16, "--parts", parts, "--save-dir", place, *more)
        more = ["--resume-from", place / "checkpoint_0_0_48.pth"]
        losses += [record["train/loss"] for record in read_metrics(place, "epoch")]
    assert len(losses) == 4
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-2)


def test_a_rank_without_samples_updates_under_fp16(run_here, environment, tmp_path):
    argv = [*CASES["one phase"], "--num-train", 1, "--epochs", 2, "--batch-size", 1, "--parts", 2, "--amp", "fp16"]
    run_here(*argv, "--device", "cpu", "--save-dir", tmp_path / "one")
    two, out = ["--multi-gpu", "ddp", *argv, "--device", "cpu", "--save-dir", tmp_path / "two"], tmp_path / "out.txt"
    assert forks.run_group(two, 2, environment, out) == [0, 0], out.read_text()
    one, two = (load(tmp_path / name / "final.pth") for name in ("one", "two"))
    assert all(torch.equal(value, two["model"][name]) for name, value in one["model"].items())
    assert one["scaler"] == two["scaler"]
