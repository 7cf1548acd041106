"""The gradient of a step equals the gradient of one mean over all loss terms, however samples are divided."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tasks.har import HarFlags, HarTask
from tasks.kgat import KgatFlags, KgatTask
from tasks.seqrec import SeqrecFlags, SeqrecTask
from tasks.speech import SpeechFlags, SpeechTask
from tests.helpers.forks import folder_of_world
from tests.helpers.weighted_task import Weighted, WeightedFlags
from trainer.flags import DeviceFlags, MultiDeviceFlags
from trainer.loading.batches import weighted
from trainer.loading.order import SampleKeys, split_global_batch
from trainer.loading.workers import BatchLoader
from trainer.loop.ema import ExponentialMovingAverage
from trainer.loop.learner import Learner
from trainer.loop.precision import Precision, in_precision
from trainer.loop.totals import without_counting
from trainer.loop.train import train_step
from trainer.parallel import ddp, process_group
from trainer.parallel.ddp import Replicated
from trainer.parallel.process_group import ProcessGroup
from trainer.parallel.strategy import SingleDevice
from trainer.task import PerSample

CPU = torch.device("cpu")
GLOBAL_BATCH_SIZES = (23, 12, 2, 1)  # 23 is prime; 2 and 1 leave some of 3 ranks without samples
NUM_STEPS = 100
DROPOUT_KEY = (0, 0, 0, 0)

SEQREC = {"hidden_units": 8, "maxlen": 12, "dropout": 0.0, "l2_emb": 0.01}
KGAT = {
    "model": "kgat",
    "embed_dim": 8,
    "layer_dims": (8, 4),
    "relation_dim": 5,
    "dropout": 0.2,
    "node_dropout": 0.2,
}  # dropout is possible, because the objective has same_masks
SPEECH = {"num_mels": 12, "width": 8, "num_blocks": 1, "channels": 2, "memory_size": 4, "theta": 4.0, "dropout": 0.0}
TASKS = {
    "weighted": (Weighted, WeightedFlags(), "train"),
    "har": (HarTask, HarFlags(dropout=0.0, hidden_dims=(8,)), "train"),
    "seqrec": (SeqrecTask, SeqrecFlags(**SEQREC, mhc=True, mhc_sinkhorn_iters=3), "train"),
    "seqrec-bce": (SeqrecTask, SeqrecFlags(**SEQREC, loss="bce", no_time=True), "train"),
    "seqrec-sampled": (
        SeqrecTask, SeqrecFlags(**SEQREC, loss="sampled", num_negatives=20, no_time=True), "train"
    ),
    "kgat-cf": (KgatTask, KgatFlags(**KGAT), "cf"),
    "kgat-kg": (KgatTask, KgatFlags(**KGAT), "kg"),
    "speech": (SpeechTask, SpeechFlags(**SPEECH), "train"),
}  # fmt: skip


def build(name, cache_dir, strategy, dtype=torch.float64):
    """Returns a task, its objective, learner and loader, and what else a step of its phase needs."""
    task_class, config, phase = TASKS[name]
    task = task_class(config, seed=0, cache_dir=cache_dir)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    objective = task.build_objective().to(CPU, dtype)
    precision = Precision("off", dtype, CPU)
    net = in_precision(objective, precision)
    learner = Learner(objective, net, strategy, precision, 0.0, ExponentialMovingAverage(objective.model, decay=0))
    trained = [p for group in task.param_groups(objective, phase) for p in group["params"]]
    learner.set_trained({phase: trained})
    learner.nets[phase] = strategy.wrap(net)
    loader = BatchLoader([task.training_data(phase)], task.collate)
    return SimpleNamespace(
        task=task, phase=phase, strategy=strategy, objective=objective, learner=learner, trained=trained, loader=loader
    )


def seed_dropout(parts):
    """Seeds dropout as `train_step` does for the first micro-batch, and with `same_masks` for all micro-batches."""
    parts.strategy.seed_dropout(*DROPOUT_KEY, 0, same_everywhere=parts.objective.same_masks)


def one_step(parts, samples, accumulation, optimizer):
    world_size = parts.strategy.group.world_size
    micro_batch_size = -(-len(samples) // (world_size * accumulation))
    keys = split_global_batch(samples, (parts.strategy.group.rank, world_size), micro_batch_size, epoch=1)
    window = [weighted(batch, its.placeholder) for batch, its in zip(parts.loader(keys), keys, strict=True)]
    (total,) = parts.strategy.group.start_sum([sum(each.weight for each in window)])()
    parts.learner.optimizers[parts.phase] = [optimizer]
    learning_rate = optimizer.param_groups[0]["lr"]
    train_step(parts.learner, parts.phase, window, total, DROPOUT_KEY, learning_rate)


def gradients_of_step(parts, samples, accumulation):
    captured = []
    optimizer = torch.optim.SGD(parts.trained, lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: captured.extend(p.grad.clone() for p in parts.trained))
    one_step(parts, samples, accumulation, optimizer)
    return torch.cat([gradient.flatten() for gradient in captured])


def weights_after_run(parts, accumulation):
    optimizer = torch.optim.AdamW(parts.trained, lr=1e-3, fused=True)
    rng = np.random.default_rng(0)
    for _ in range(NUM_STEPS):
        samples = rng.permutation(parts.task.num_samples(parts.phase))[: rng.integers(1, 30)]
        one_step(parts, samples, accumulation, optimizer)
    return torch.cat([p.detach().flatten() for p in parts.trained])


def measure(strategy, accumulation, cache_dir):
    found = {}
    for name in TASKS:
        parts = build(name, cache_dir, strategy)
        for size in GLOBAL_BATCH_SIZES:
            found[name, size] = gradients_of_step(parts, np.arange(size) * 3, accumulation)
    found["weights"] = weights_after_run(build("weighted", cache_dir, strategy), accumulation)
    return found


def in_process(environment, folder, cache_dir, way):
    """Saves the measurements of one rank. way: "ring" or "overlap" exchanges gradients as for larger models."""
    torch.set_num_threads(1)
    if way == "ring":
        process_group.DIRECT_BYTES = 0
    if way == "overlap":
        ddp.OVERLAP_BYTES = 0
    strategy = Replicated(ProcessGroup(environment, MultiDeviceFlags(multi_gpu="ddp"), DeviceFlags(device="cpu")))
    found = {accumulation: measure(strategy, accumulation, cache_dir) for accumulation in (1, 3)}
    found["sum"] = strategy.group.sum(
        torch.randn(999, generator=torch.Generator().manual_seed(environment.rank)).double()
    )
    torch.save(found, folder / f"rank{environment.rank}.pt")
    strategy.group.close()
    return 0


@pytest.fixture(scope="module")
def reference(cache_dir):
    """Returns the flat gradient of one forward and backward pass over the whole batch, by task and size."""
    gradients = {}
    for name in TASKS:
        parts = build(name, cache_dir, SingleDevice(CPU))
        for size in GLOBAL_BATCH_SIZES:
            (batch,) = parts.loader([SampleKeys(np.arange(size) * 3, epoch=1)])
            parts.objective.zero_grad()
            batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
            seed_dropout(parts)
            (parts.objective(batch, parts.phase)["loss"] / batch["weight"].sum()).backward()
            gradients[name, size] = torch.cat([p.grad.flatten() for p in parts.trained])
    return gradients


@pytest.fixture(scope="module")
def reference_weights(cache_dir):
    return weights_after_run(build("weighted", cache_dir, SingleDevice(CPU)), 1)


@pytest.fixture(
    scope="module",
    params=[
        "world1",
        "world3",
        "world2-overlap",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("world2", "world3-ring")),
    ],
)
def world(request, tmp_path_factory, cache_dir):
    """Returns the measurements of every rank, by number of accumulation steps."""
    name, _, way = request.param.partition("-")
    size = int(name.removeprefix("world"))
    if size == 1:
        return [{a: measure(SingleDevice(CPU), a, cache_dir) for a in (1, 3)}]
    folder = tmp_path_factory.mktemp(request.param)
    process = functools.partial(in_process, cache_dir=cache_dir, way=way)
    folder_of_world(process, size, folder)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(size)]


def relative_difference(a, b):
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradients_equal_the_gradient_of_one_full_batch(world, reference, accumulation):
    for found in world:
        for case, gradient in reference.items():
            assert relative_difference(found[accumulation][case], gradient) < 1e-12, case


@pytest.mark.parametrize("accumulation", [1, 3])
def test_weights_after_100_steps_agree(world, reference_weights, accumulation):
    for found in world:
        assert relative_difference(found[accumulation]["weights"], reference_weights) < 1e-9


def test_a_sum_has_the_same_bits_on_every_rank(world):
    """Ranks with different sums could decide differently about early stopping."""
    for found in world[1:]:
        assert torch.equal(found["sum"], world[0]["sum"])


def test_mean_of_means_fails_by_orders_of_magnitude(cache_dir, reference):
    """Averaging the means of micro-batches is the usual rule, and here the negative control."""
    parts = build("weighted", cache_dir, SingleDevice(CPU))
    parts.objective.zero_grad()
    keys = split_global_batch(np.arange(23) * 3, (0, 1), 8, epoch=1)
    for batch in parts.loader(keys):
        batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
        (parts.objective(batch)["loss"] / batch["weight"].sum() / len(keys)).backward()
    gradient = torch.cat([p.grad.flatten() for p in parts.objective.parameters()])
    assert relative_difference(gradient, reference["weighted", 23]) > 1e-3


def test_sums_and_weights_are_additive(cache_dir):
    for name in TASKS:
        parts = build(name, cache_dir, SingleDevice(CPU))
        net = parts.learner.nets[parts.phase]
        for split, dataset in {
            "train": parts.task.training_data(parts.phase),
            "val": parts.task.splits()["val"],
        }.items():
            net.train(split == "train")
            if split == "val":
                parts.objective.start_evaluation()
            loader = BatchLoader([dataset], parts.task.collate)
            samples = np.arange(min(24, len(dataset)))
            found = []
            for index in (samples, *np.split(samples, [5, 7])):
                batch = loader.one(SampleKeys(index, epoch=1))
                seed_dropout(parts)
                found.append(net(batch, parts.phase) | {"weight": batch["weight"].sum()})
            whole, *others = found
            for key, value in whole.items():
                if isinstance(value, PerSample):
                    value, total = value.values, torch.cat([part[key].values for part in others])
                else:
                    total = sum(part[key] for part in others)
                torch.testing.assert_close(total, value, rtol=1e-12, atol=1e-12, msg=f"{name} {key}")


def test_a_placeholder_batch_is_replaced_not_multiplied_by_zero():
    """Zero times infinity would be NaN on all ranks."""
    loss = torch.tensor(float("inf"), requires_grad=True)
    sums = without_counting({"loss": loss * 2, "hits": torch.tensor(3)})
    sums["loss"].backward()
    assert (sums["loss"].item(), sums["hits"].item(), loss.grad.item()) == (0.0, 0, 0.0)
