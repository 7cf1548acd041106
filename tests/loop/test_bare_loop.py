"""A run matches a bare loop, written by hand with torch's own optimizers, in float64.

Ranks that agree with each other could all be wrong. The bare loop shares only the order of samples with the trainer.
"""

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conftest import ROOT, assert_same_bits, cut_back, load
from tests.helpers.forks import folder_of_world, main_of_rank
from tests.helpers.replicas import ReplicasOnCpu
from tests.helpers.replicas import trained as train_on_replicas
from tests.helpers.token_task import NUM_TRAIN, Classifier, Samples
from tests.helpers.weights import difference
from trainer.flags import OptimizerName
from trainer.loading.order import EpochOrder

FILE = ROOT / "tests" / "helpers" / "token_task.py"
EPOCHS, GLOBAL_BATCH, LR, WARMUP, MAX_NORM, DECAY = 3, 18, 0.02, 0.6, 0.2, 0.05  # the last batch is a single sample
EMA_DECAY = 0.8
STEPS = -(-NUM_TRAIN // GLOBAL_BATCH)
MID_EPOCH = 8
FLAGS = [
    "--epochs", EPOCHS, "--global-batch-size", GLOBAL_BATCH, "--lr", LR, "--warmup-epochs", WARMUP, "--max-grad-norm",
    MAX_NORM, "--weight-decay", DECAY, "--dtype", "float64", "--num-threads", 1, "--device", "cpu",
    "--save-every-steps", MID_EPOCH, "--keep-checkpoints", 0,
]  # fmt: skip


# --- the bare loop -----------------------------------------------------------------------------------------------


def groups_of(model):
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def sparse_and_dense(model, make=torch.optim.AdamW, **settings):
    groups = groups_of(model)
    del groups[0]["params"][0]
    groups[1]["weight_decay"] = groups[0]["weight_decay"] = DECAY
    return [make(groups, **settings), torch.optim.SparseAdam([model.embedding.weight])]


def layer_wise(model):
    return [
        torch.optim.AdamW(
            [
                {"params": model.head.parameters(), "weight_decay": DECAY, "scale": 1.0},
                {"params": model.hidden.parameters(), "weight_decay": DECAY, "betas": (0.5, 0.9), "scale": 0.1},
            ]
        )
    ]


def own(model):
    matrices, vectors = groups_of(model)
    return [torch.optim.RMSprop([matrices]), torch.optim.Adamax([vectors])]


def cosine(progress, step):
    return 0.5 * (1 + math.cos(math.pi * (progress - WARMUP) / (EPOCHS - WARMUP)))


def linear(progress, step):
    """Decays linearly to a tenth of the peak."""
    return 1 - 0.9 * (progress - WARMUP) / (EPOCHS - WARMUP)


def wsd(progress, step):
    """Decays in the last fifth of the run."""
    return 1.0 if progress < 2.4 else 1 - math.sqrt((progress - 2.4) / 0.6)


@dataclass(frozen=True)
class Case:
    """optimizers: builds a model's optimizers. factor: scales the learning rate, given completed epochs and steps."""

    task: str
    flags: tuple
    optimizers: Callable
    factor: Callable = cosine
    has_warmup: bool = True


def one(kind, **settings):
    return lambda model: [kind(groups_of(model), **settings)]


adamw = one(torch.optim.AdamW)
CASES = {
    "adamw": Case(
        "Tokens", ("--betas", 0.8, 0.95, "--eps", 1e-6), one(torch.optim.AdamW, betas=(0.8, 0.95), eps=1e-6)
    ),
    "adam": Case("Tokens", ("--optimizer", "adam"), one(torch.optim.Adam)),
    "sgd": Case("Tokens", ("--optimizer", "sgd"), one(torch.optim.SGD)),
    "momentum": Case("Tokens", ("--optimizer", "sgd", "--momentum", 0.9), one(torch.optim.SGD, momentum=0.9)),
    "nesterov": Case(
        "Tokens", ("--optimizer", "sgd", "--momentum", 0.9, "--nesterov"),
        one(torch.optim.SGD, momentum=0.9, nesterov=True),
    ),
    "sparse": Case("Sparse", (), sparse_and_dense),
    "sparse sgd": Case(
        "Sparse", ("--optimizer", "sgd", "--momentum", 0.9),
        functools.partial(sparse_and_dense, make=torch.optim.SGD, momentum=0.9),
    ),
    "layer-wise": Case("LayerWise", (), layer_wise),
    "own optimizers": Case("OwnOptimizers", (), own),
    "linear": Case("Tokens", ("--schedule", "linear", "--min-lr", LR / 10), adamw, linear),
    "constant": Case("Tokens", ("--schedule", "constant"), adamw, lambda progress, step: 1.0),
    "wsd": Case("Tokens", ("--schedule", "wsd"), adamw, wsd),
    "own schedule": Case(
        "OwnSchedule", (), adamw, lambda progress, step: 1 - step / (EPOCHS * STEPS), has_warmup=False
    ),
}  # fmt: skip


def test_every_optimizer_has_a_case():
    """Except Muon, which computes in bfloat16; tests/loop/test_optimizers.py compares it."""
    assert {*get_args(OptimizerName)} - {"muon"} <= CASES.keys()


def clip(params):
    """Clips gradients like torch.nn.utils.clip_grad_norm_, which does not support sparse gradients."""
    if not any(p.grad.is_sparse for p in params):
        return nn.utils.clip_grad_norm_(params, MAX_NORM)
    for p in params:
        p.grad = p.grad.coalesce() if p.grad.is_sparse else p.grad
    norm = sum((p.grad.to_dense() ** 2).sum() for p in params).sqrt()
    for p in params:
        p.grad *= (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
    return norm


@dataclass
class Learnt:
    """Result of the bare loop. average: weights averaged with decay EMA_DECAY. num_clipped, num_skipped: steps."""

    weights: dict
    average: list
    num_clipped: int = 0
    num_skipped: int = 0


def learnt(case, bad_sample=-1):
    """Trains by the bare loop, which skips steps with a bad sample."""
    torch.manual_seed(0)
    data, model = Samples(NUM_TRAIN, 0), Classifier(sparse=case.task == "Sparse").double()
    optimizers = case.optimizers(model)
    params = list(model.parameters())
    found = Learnt(model.state_dict(), [p.detach().clone() for p in params])
    tokens, label, count = map(torch.from_numpy, (data.tokens, data.label, data.count))
    step = num_updates = 0
    for epoch in range(EPOCHS):
        order = torch.from_numpy(EpochOrder(0, epoch, 0, NUM_TRAIN).take(0, NUM_TRAIN))
        for index in order.split(GLOBAL_BATCH):
            losses = F.cross_entropy(model(tokens[index]), label[index], reduction="none")
            model.zero_grad()
            ((losses * count[index]).sum() / count[index].double().sum()).backward()
            start = step % STEPS * GLOBAL_BATCH
            progress = epoch + (start + start + len(index)) // 2 / NUM_TRAIN
            warms_up = case.has_warmup and progress < WARMUP
            factor = progress / WARMUP if warms_up else case.factor(progress, step)
            # The norm includes gradients of parameters that no optimizer trains.
            found.num_clipped += float(clip(params)) > MAX_NORM
            step += 1
            if bad_sample in index:
                found.num_skipped += 1
                continue
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = LR * factor * group.get("scale", 1.0)
                optimizer.step()
            decay = min(EMA_DECAY, (1 + num_updates) / (10 + num_updates))
            found.average = [decay * a + (1 - decay) * p.detach() for a, p in zip(found.average, params, strict=True)]
            num_updates += 1
    return found


# --- the same by the trainer -------------------------------------------------------------------------------------


def argv_of(name, accumulation, world_size):
    case = CASES[name]
    size = GLOBAL_BATCH // (world_size * accumulation)
    return ["--task", f"{FILE}:{case.task}", *FLAGS, "--batch-size", size, *case.flags]


def run_all(environment, keys, folder):
    """Trains every case on one rank, and resumes it in the middle of an epoch."""
    return max(run_twice(environment, *key, folder / name_of(*key)) for key in keys)


def run_twice(environment, name, accumulation, place):
    status = run_once(environment, name, accumulation, place)
    if environment.rank == 0:  # the other ranks wait for rank 0
        entries = json.loads((place / "manifest.json").read_text())["checkpoints"]
        (middle,) = [i for i, entry in enumerate(entries) if entry["step"] == MID_EPOCH]
        assert entries[middle]["samples"] > 0
        cut_back(place, entries[: middle + 1], again(place))
    return status or run_once(environment, name, accumulation, again(place))


def run_once(environment, name, accumulation, place):
    return main_of_rank(environment, argv_of(name, accumulation, environment.world_size), place)


def name_of(name, accumulation):
    return f"{name} {accumulation}"


def again(place):
    return place.with_name(f"{place.name} again")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Returns the folder of the runs of some cases, which are trained once per world size."""

    @functools.cache
    def of_size(world_size, keys):
        return folder_of_world(functools.partial(run_all, keys=keys), world_size, tmp_path_factory.mktemp("world"))

    return of_size


def check(folder, name, accumulation):
    place = folder / name_of(name, accumulation)
    expected = learnt(CASES[name])
    assert expected.num_clipped > 0
    assert difference(load(place / "final.pth")["model"], expected.weights) < 1e-9
    assert_same_bits(load(place / "final.pth"), load(again(place) / "final.pth"))


ALL = tuple((name, accumulation) for name in CASES for accumulation in (1, 3))
ACCUMULATED = tuple((name, 3) for name in CASES)
FEW = tuple((name, 3) for name in ("momentum", "sparse", "own optimizers"))


@pytest.mark.parametrize("key", ACCUMULATED, ids=CASES)
def test_one_device_matches_a_bare_loop(key, world):
    check(world(1, ACCUMULATED), *key)


@pytest.mark.parametrize("key", FEW, ids=str)
def test_two_processes_match_a_bare_loop(key, world):
    check(world(2, FEW), *key)


@pytest.mark.slow
@pytest.mark.parametrize("key", ALL, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_case_matches_a_bare_loop_at_every_world_size(world_size, key, world):
    check(world(world_size, ALL), *key)


@pytest.mark.parametrize("name", ["momentum", "sparse"])
def test_a_run_that_skips_nonfinite_steps_matches_a_bare_loop(name, run_here, tmp_path):
    """The first step is skipped too, before the optimizer has moments."""
    bad = int(EpochOrder(0, 0, 0, NUM_TRAIN).take(0, 1)[0])
    expected = learnt(CASES[name], bad)
    assert expected.num_skipped == EPOCHS
    more = ("--on-nonfinite", "skip", "--bad-sample", bad, "--ema-decay", EMA_DECAY)
    out, _ = run_here(*argv_of(name, 3, 1), "--save-dir", tmp_path, *more)
    assert "Skipped: the loss is not finite in optimizer step 1 (epoch 1)" in out
    state = load(tmp_path / "final.pth")
    assert state["skipped_steps"] == EPOCHS
    assert difference(state["training_model"], expected.weights) < 1e-9
    average = dict(zip(state["model"], expected.average, strict=True))
    assert difference(state["model"], average) < 1e-9


def test_data_parallel_learns_from_sparse_gradients(tmp_path):
    train_on_replicas(ReplicasOnCpu(2), tmp_path, *map(str, argv_of("sparse", 3, 1)))
    assert difference(load(tmp_path / "last.pth")["model"], learnt(CASES["sparse"]).weights) < 1e-9


def test_no_two_cases_learn_the_same_weights():
    """A case with the same weights as another would prove nothing."""
    weights = {name: learnt(case).weights for name, case in CASES.items()}
    for name, its in weights.items():
        for other, theirs in weights.items():
            assert name == other or difference(its, theirs) > 1e-6, (name, other)
