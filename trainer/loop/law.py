"""Whether an objective keeps the first law: what it returns for parts of a batch adds up to what it returns for all.

A mean in the place of a sum breaks it, and so does a loss that couples the samples of a batch. Training would not fail,
but learn something else with each other number of devices or of samples per forward.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

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
from trainer.parallel.group import Group
from trainer.parallel.strategy import Strategy
from trainer.task import Task, validation_sets

NUM_SAMPLES, NUM_PARTS = 4, 2
SHARE_OF_START, LEAST_S = 0.04, 0.07
"""Of what the process has computed so far, in seconds of its processors, a check may take this share, or so long."""
MEAN, PERHAPS = (0.85, 1.15), (0.6, 1.9)
"""What parts add up to, of `NUM_PARTS` times the whole, if it is a mean; and where a random forward may hide one."""
NUM_SEEDS, MOST_S = 16, 0.5
"""Draws whose sum shows which it is, if with all of them the check takes no longer."""
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


def check_sums(
    task: Task, learner: Learner, strategy: Strategy, no_limit: bool = False, first_s: float = 0.0
) -> list[str]:
    """Lines about sums that depend on how a batch is divided. Raises UserError for means, and for shapes that do.

    Some samples of each phase, and of a data set that is evaluated, go through the objective as a whole and in halves.
    Nothing is learned, and no generator moves. no_limit: also where forwards are slow. first_s: what
    the slowest first forward of a phase took. All processes call it.
    """
    remarks: list[str] = []
    if learner.objective.coupled:
        return remarks
    is_joint, clock = learner.objective.is_joint, _Clock(strategy.group, not no_limit, first_s)
    for index, phase in enumerate(task.phases):
        where = training_forward(learner.objective, phase)  # which has returned sums already
        learner.enter(phase)
        halves = _Halves(
            task.training_data(phase), task.collate, index, strategy, NUM_ROWS if is_joint else NUM_SAMPLES
        )
        remarks += _of_mode(where, learner, strategy, halves, clock, partial(_forward, learner.net, phase))
    splits = task.splits()
    split = next(iter([*validation_sets(splits), "test"]))
    if split in splits and not is_joint:
        where = f"{type(learner.objective).__name__}.forward(batch) in eval mode"
        halves = _Halves(splits[split], task.collate, 0, strategy)
        remarks += _of_mode(where, learner, strategy, halves, clock, learner.net, evaluates=True)
    return remarks


class _Clock:
    """How long a check may take: time of the processors, which does not depend on what else a machine does.

    first_s: what a first forward took before. What it answers is the main process's; all processes ask.
    """

    def __init__(self, group: Group, has_limit: bool, first_s: float) -> None:
        self._group, self._has_limit, self._started = group, has_limit, time.process_time()
        self._limit_s = max(LEAST_S, SHARE_OF_START * self._started)
        self.of_forward = first_s / 2 if group.device.type == "cpu" else 0.0  # a GPU begins with the first one

    def spent(self) -> float:
        """Seconds since it began, of this process."""
        return time.process_time() - self._started

    def allows(self, num_forwards: int, limit_s: float = 0.0) -> bool:
        """Whether there is time for so many more forwards. limit_s: of the whole check; by default the usual one."""
        most = limit_s or self._limit_s
        return self._group.on_main(lambda: not self._has_limit or self.spent() + num_forwards * self.of_forward < most)


def _forward(net: nn.Module, phase: str, batch: Batch) -> Mapping[str, object]:
    found: Mapping[str, object] = net(batch, phase)
    return found


class _Halves:
    """The first samples of a data set, on the device: whole, and in parts of equal size; made when they are needed."""

    def __init__(
        self, dataset: KeyedDataset, collate: Collate, phase: int, strategy: Strategy, most: int = NUM_SAMPLES
    ) -> None:
        self.num_samples = min(most, len(dataset)) // NUM_PARTS * NUM_PARTS
        self._dataset, self._collate, self._phase, self._strategy = dataset, collate, phase, strategy

    def _batch(self, index: np.ndarray) -> Batch:
        device = self._strategy.device
        keys = SampleKeys(index, 0, self._phase, few_lengths=device.type == "cuda")
        found = gathered(self._dataset, self._collate, keys)
        return {name: tensor.to(device) for name, tensor in found.items()}

    @cached_property
    def whole(self) -> Batch:
        return self._batch(np.arange(self.num_samples))

    @cached_property
    def first(self) -> Batch:
        return self._batch(np.arange(self.num_samples // NUM_PARTS))

    @cached_property
    def others(self) -> list[Batch]:
        """The parts behind the first one."""
        return [*map(self._batch, np.split(np.arange(self.num_samples), NUM_PARTS)[1:])]


def _of_mode(
    where: str,
    learner: Learner,
    strategy: Strategy,
    halves: _Halves,
    clock: _Clock,
    forward: Callable[[Batch], Mapping[str, object]],
    evaluates: bool = False,
) -> list[str]:
    if not halves.num_samples or not clock.allows(2 * NUM_PARTS if evaluates else 1):
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
            before = clock.spent()
            first = sums(halves.first, 0)
            clock.of_forward = clock.spent() - before
            if not clock.allows(2 * NUM_PARTS - 1):  # of halves
                return []
            whole, parts = sums(halves.whole, 0), [first, *(sums(part, 0) for part in halves.others)]
            if objective.is_joint:
                return _joint_mean(where, whole, parts, halves, sums)
            return _compared(
                where, learner, whole, parts, halves, sums, clock.allows(2 * NUM_PARTS * NUM_SEEDS, MOST_S)
            )
    finally:
        for module, mode in modes:
            module.training = mode


def _joint_mean(
    where: str, whole: Sums, parts: Sequence[Sums], halves: _Halves, sums: Callable[[Batch, int], Sums]
) -> list[str]:
    """A line about a loss of all rows that looks like a mean over them; for certain only who wrote it knows."""
    batch, loss = halves.whole, float(whole["loss"])
    twice = float(sums({name: torch.cat([value, value]) for name, value in batch.items()}, 0)["loss"])
    in_halves = float(_added(parts)["loss"])
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
    parts: Sequence[Sums],
    halves: _Halves,
    sums: Callable[[Batch, int], Sums],
    has_time: bool,
) -> list[str]:
    """has_time: for many forwards, where they are random."""
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
            parts = [
                _added([sums(part, NUM_SEEDS + seed) for seed in seeds]) for part in [halves.first, *halves.others]
            ]
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
