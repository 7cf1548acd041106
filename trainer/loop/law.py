"""Whether an objective keeps the first law: what it returns for parts of a batch adds up to what it returns for all.

A mean in the place of a sum breaks it, and so does a loss that couples the samples of a batch. Training would not fail,
but learn something else with each other number of devices or of samples per forward.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from trainer.common.errors import UserError
from trainer.common.torch_private import BATCH_NORMS
from trainer.loading.batches import Batch, Collate, KeyedDataset, gathered
from trainer.loading.order import SampleKeys
from trainer.loop.contract import check_outputs
from trainer.loop.evaluate import start_evaluation
from trainer.loop.learner import Learner
from trainer.loop.module_state import leaving_no_trace
from trainer.loop.totals import training_forward
from trainer.parallel.strategy import Strategy
from trainer.task import Task, validation_sets

NUM_SAMPLES, NUM_PARTS = 4, 2
SLOW_S = 0.05
"""A forward that takes longer is not repeated: a start shall not."""
MEAN, PERHAPS = (0.85, 1.15), (0.6, 1.9)
"""What parts add up to, of `NUM_PARTS` times the whole, if it is a mean; and where a random forward may hide one."""
NUM_SEEDS, MOST_S = 16, 0.5
"""Draws whose sum shows which it is, if all of them take no longer."""
CLOSE = {torch.float64: 1e-8, torch.float32: 1e-3}
CLOSE_IN_HALVES = 5e-2
"""How far, of its size, a sum may be off by rounding."""
ADVICE = (
    "return sums over the samples, with reduction='sum'; a number that is no sum over them, such as a penalty, times "
    "batch['weight'].sum()"
)

NUM_ROWS, MORE_IN_HALVES, LESS_TWICE = 16, 1.25, 1.6
"""Rows of a joint loss that are tried. One that its halves exceed together by the first factor, and that grows by less
than the second with each sample twice, looks like a mean: a sum over rows that are compared is larger than its halves
together, and doubles."""

Sums = Mapping[str, Tensor]


def check_sums(task: Task, learner: Learner, strategy: Strategy, no_limit: bool = False) -> list[str]:
    """Lines about sums that depend on how a batch is divided. Raises UserError for means, and for shapes that do.

    Some samples of each phase, and of a data set that is evaluated, go through the objective as a whole and in halves.
    Nothing is learned, and no generator moves. no_limit: also where forwards are slow. All processes call it.
    """
    remarks: list[str] = []
    if learner.objective.coupled:
        return remarks
    is_joint = learner.objective.is_joint
    for index, phase in enumerate(task.phases):
        where = training_forward(learner.objective, phase)  # which has returned sums already
        learner.enter(phase)
        halves = _Halves(
            task.training_data(phase), task.collate, index, strategy, NUM_ROWS if is_joint else NUM_SAMPLES
        )
        remarks += _of_mode(where, learner, strategy, halves, no_limit, partial(_forward, learner.net, phase))
    splits = task.splits()
    split = next(iter([*validation_sets(splits), "test"]))
    if split in splits and not is_joint:
        where = f"{type(learner.objective).__name__}.forward(batch) in eval mode"
        halves = _Halves(splits[split], task.collate, 0, strategy)
        remarks += _of_mode(where, learner, strategy, halves, no_limit, learner.net, evaluates=True)
    return remarks


def _forward(net: nn.Module, phase: str, batch: Batch) -> Mapping[str, object]:
    found: Mapping[str, object] = net(batch, phase)
    return found


class _Halves:
    """The first samples of a data set, on the device: whole, and in parts of equal size."""

    def __init__(
        self, dataset: KeyedDataset, collate: Collate, phase: int, strategy: Strategy, most: int = NUM_SAMPLES
    ) -> None:
        self.num_samples = min(most, len(dataset)) // NUM_PARTS * NUM_PARTS
        for_gpu = strategy.device.type == "cuda"

        def batch(index: np.ndarray) -> Batch:
            keys = SampleKeys(index, 0, phase, few_lengths=for_gpu)
            found = gathered(dataset, collate, keys)
            return {name: tensor.to(strategy.device) for name, tensor in found.items()}

        index = np.arange(self.num_samples)
        self.whole = batch(index) if self.num_samples else {}
        self.parts = [batch(part) for part in np.split(index, NUM_PARTS)] if self.num_samples else []


def _of_mode(
    where: str,
    learner: Learner,
    strategy: Strategy,
    halves: _Halves,
    no_limit: bool,
    forward: Callable[[Batch], Mapping[str, object]],
    evaluates: bool = False,
) -> list[str]:
    if not halves.num_samples:
        return []
    objective = learner.objective
    modes = [(module, module.training) for module in objective.modules()]

    def sums(batch: Batch, seed: int) -> dict[str, Tensor]:
        strategy.seed_dropout(0, 0, 0, seed, 0, same_everywhere=True)
        outputs = forward({name: tensor.clone() for name, tensor in batch.items()})  # which it may change
        check_outputs(objective, outputs)
        return {name: value.detach() for name, value in outputs.items() if isinstance(value, Tensor)}

    try:
        with leaving_no_trace(objective), strategy.keeping_generators(), torch.set_grad_enabled(not evaluates):
            objective.train(not evaluates)
            for module in objective.modules():
                if isinstance(module, BATCH_NORMS):  # which couples samples by design
                    module.eval()
            if evaluates:
                start_evaluation(objective, learner.precision, strategy)
            started = time.perf_counter()
            whole = sums(halves.whole, 0)
            seconds = strategy.group.on_main(lambda: time.perf_counter() - started)
            if seconds > SLOW_S and not no_limit:
                return []
            if objective.is_joint:
                return _joint_mean(where, whole, halves, sums)
            has_time = no_limit or seconds * NUM_SEEDS * (1 + NUM_PARTS) < MOST_S
            return _compared(where, learner, whole, halves, sums, has_time)
    finally:
        for module, mode in modes:
            module.training = mode


def _joint_mean(where: str, whole: Sums, halves: _Halves, sums: Callable[[Batch, int], Sums]) -> list[str]:
    """A line about a loss of all rows that looks like a mean over them; for certain only who wrote it knows."""
    batch, loss = halves.whole, float(whole["loss"])
    twice = float(sums({name: torch.cat([value, value]) for name, value in batch.items()}, 0)["loss"])
    in_halves = float(_added([sums(part, 0) for part in halves.parts])["loss"])
    if not (0 < MORE_IN_HALVES * loss < in_halves and twice < LESS_TWICE * loss):
        return []
    return [
        f"{where}: 'loss' is {loss:.5g} for {halves.num_samples} samples, {twice:.5g} with each of them twice, and "
        f"{in_halves:.5g} for the same in {NUM_PARTS} halves, as of a mean. It must be a sum over the rows, for the "
        "trainer divides it by their weight: a mean times the number of rows, or with reduction='sum'."
    ]


def _compared(
    where: str,
    learner: Learner,
    whole: Sums,
    halves: _Halves,
    sums: Callable[[Batch, int], Sums],
    has_time: bool,
) -> list[str]:
    """has_time: for many forwards, where they are random."""
    parts = [sums(part, 0) for part in halves.parts]
    for part in parts:
        _require_same_shapes(where, whole, part, halves.num_samples)

    def means(bounds: tuple[float, float], whole: Sums, parts: Sequence[Sums]) -> list[str]:
        return [name for name, value in whole.items() if _is_mean(value, [part[name] for part in parts], bounds)]

    totals, close = _added(parts), _closeness(learner)
    differ = [
        name for name, value in whole.items() if value.is_floating_point() and _differs(value, totals[name], close)
    ]
    found = means(PERHAPS, whole, parts)
    if not differ and not found:
        return []
    again = sums(halves.whole, 1)
    if any(not torch.equal(value, again.get(name, value)) for name, value in whole.items()):
        differ = []
        if found and has_time:
            seeds = range(2, 2 + NUM_SEEDS)
            whole = _added([sums(halves.whole, seed) for seed in seeds])
            parts = [_added([sums(part, NUM_SEEDS + seed) for seed in seeds]) for part in halves.parts]
        found = means(MEAN, whole, parts) if has_time else []
    else:
        found = means(MEAN, whole, parts)
    for name in [*found, *differ][:1]:
        account = (
            f"{where}: {name!r} is {_number(whole[name])} for {halves.num_samples} samples, but "
            f"{_number(_added(parts)[name])} for the same in {NUM_PARTS} halves"
        )
        if name in found:
            raise UserError(f"{account}, as of a mean; {ADVICE}")
        return [
            f"{account}, so what is learned depends on --batch-size and the number of devices. If it is no sum over "
            f"the samples, {ADVICE}. If it compares samples, write `outputs` and `joint_loss`; see docs/own_task.md."
        ]
    return []


def _require_same_shapes(where: str, whole: Sums, part: Sums, num_samples: int) -> None:
    """Raises UserError for a name or a shape that depends on the batch."""
    for name, value in whole.items():
        if name not in part:
            raise UserError(f"{where}: returns {name!r} for some batches and not for others")
        if part[name].shape != value.shape:
            raise UserError(
                f"{where}: returns {name!r} of shape {tuple(value.shape)} for {num_samples} samples and "
                f"{tuple(part[name].shape)} for half of them: a sum over samples has no dimension of them"
            )


def _closeness(learner: Learner) -> float:
    if learner.precision.autocast_dtype is not None:
        return CLOSE_IN_HALVES
    return CLOSE.get(learner.precision.dtype, CLOSE_IN_HALVES)


def _total(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.double() for part in parts]).sum(0)


def _added(several: Sequence[Sums]) -> dict[str, Tensor]:
    return {name: _total([sums[name] for sums in several]) for name in several[0]}


def _is_mean(whole: Tensor, parts: Sequence[Tensor], bounds: tuple[float, float]) -> bool:
    size, total = float(whole.double().sum()), float(_total(parts).sum())
    least, most = bounds
    return size != 0 and least <= total / (NUM_PARTS * size) <= most


def _differs(whole: Tensor, total: Tensor, close: float) -> bool:
    size = torch.maximum(whole.abs().max(), total.abs().max()) if whole.numel() else whole.new_zeros(())
    return bool((whole - total).abs().max() > close * size) if whole.numel() else False


def _number(value: Tensor) -> str:
    return f"{float(value.double().sum()):.5g}"
