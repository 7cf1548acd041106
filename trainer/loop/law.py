"""Checks that an objective's sums over the parts of a batch add up to its sums over the whole batch.

The check finds losses that are means instead of sums, and losses that couple samples. With these losses, results would
depend on the number of devices and on the samples per forward pass.
"""

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.common.errors import UserError
from trainer.common.torch_private import BATCH_NORMS
from trainer.loading.batches import Batch, Collate, KeyedDataset, gathered
from trainer.loading.order import SampleKeys
from trainer.loop.evaluate import start_evaluation
from trainer.loop.learner import Learner
from trainer.loop.module_state import leaving_no_trace
from trainer.loop.totals import forward_name, require_sums
from trainer.parallel.group import Group
from trainer.parallel.strategy import Strategy
from trainer.task import Sums, Task, validation_sets

NUM_SAMPLES, NUM_PARTS = 4, 2
SHARE_OF_START, LEAST_S = 0.04, 0.07
"""Limit of the check's CPU time: a fraction of the process's CPU time before the check, and a minimum in seconds."""
MEAN, PERHAPS = (0.85, 1.15), (0.6, 1.9)
"""Ranges of (parts' sum) / (`NUM_PARTS` * batch's sum) that show a mean, or suggest a mean in a random forward."""
NUM_SEEDS, MOST_S = 16, 0.5
SEEDS_OF_WHOLE, SEEDS_OF_PARTS = range(2, 2 + NUM_SEEDS), range(2 + NUM_SEEDS, 2 + 2 * NUM_SEEDS)
"""Sums of random forwards are added over these seeds if `MOST_S` seconds suffice."""
CLOSE = {torch.float64: 1e-8, torch.float32: 1e-3}
CLOSE_IN_HALVES = 5e-2
"""Tolerances of sums, relative to their largest value: by parameter dtype, and for autocast and half precision."""
ADVICE = (
    "return sums over the samples, with reduction='sum'; multiply a number that is not a sum over samples, such as a "
    "penalty, by batch['weight'].sum()"
)
ADVICE_IF_COUPLED = (
    f"if it is not a sum over the samples, {ADVICE}; if it compares samples, write `outputs` and `joint_loss`; "
    "see docs/own_task.md"
)
ON_ROWS = (
    "let a sample's number depend on this sample alone, not on the batch or its size; a loss that compares samples "
    "needs a task with `joint_loss`, as docs/own_task.md shows"
)

JOINT_MONITOR = (
    "val/loss is the sum of the joint losses of single evaluation batches, so the best epoch depends on "
    "--eval-batch-size and the number of processes; let the task's `monitor` name another metric."
)

NUM_ROWS, MORE_IN_HALVES, LESS_TWICE = 16, 1.25, 1.6
"""Number of samples and two factors for checking a joint loss. The loss looks like a mean if the losses of two halves
together exceed the first factor times the loss, and duplicating all samples multiplies it by less than the second."""


def check_sums(task: Task, learner: Learner, no_limit: bool = False, first_s: float = 0.0) -> list[str]:
    """Returns messages about sums that depend on how a batch is split. Raises UserError if a "sum" is a mean.

    Runs a few samples of each phase and of an evaluated data set through the objective, as a whole and in halves,
    without side effects. no_limit: whether to check slow models too. first_s: CPU seconds of the slowest phase's first
    forward pass. All processes must call this function.
    """
    objective, strategy, remarks = learner.objective, learner.strategy, list[str]()
    clock = _Clock(strategy.group, not no_limit, first_s)
    for index, phase in enumerate(task.phases):
        dataset = task.training_data(phase)
        learner.enter(phase)
        num_samples = min(NUM_ROWS if objective.is_joint else NUM_SAMPLES, len(dataset))
        batches = _batches(dataset, task.collate, num_samples, index, strategy)
        remarks += _of_mode(learner, phase, batches, clock)
    splits = task.splits()
    split = next(iter([*validation_sets(splits), "test"]))
    if split != "test" and objective.is_joint and task.monitor[0] == "val/loss":
        remarks.append(JOINT_MONITOR)
    if split in splits and not objective.is_joint:
        batches = _batches(splits[split], task.collate, min(NUM_SAMPLES, len(splits[split])), 0, strategy)
        remarks += _of_mode(learner, None, batches, clock)
    return remarks


class _Clock:
    """Limits the check's CPU time, which, unlike elapsed time, does not depend on other load.

    first_s: CPU seconds of a first forward pass. All processes must call `allows`, whose result rank 0 decides.
    """

    def __init__(self, group: Group, has_limit: bool, first_s: float) -> None:
        self._group, self._has_limit, self._started = group, has_limit, time.process_time()
        self._limit_s = max(LEAST_S, SHARE_OF_START * self._started)
        self.of_forward = first_s / 2 if group.device.type == "cpu" else 0.0  # on a GPU the check times a forward

    def spent(self) -> float:
        return time.process_time() - self._started

    def allows(self, num_forwards: int, limit_s: float = 0.0) -> bool:
        """Returns whether `num_forwards` forward passes fit into the limit. limit_s: limit, or 0 for the default."""
        most = limit_s or self._limit_s
        return self._group.on_main(lambda: not self._has_limit or self.spent() + num_forwards * self.of_forward < most)


def _batches(
    dataset: KeyedDataset, collate: Collate, num_samples: int, phase: int, strategy: Strategy
) -> Iterator[Batch]:
    """Yields batches on the device: the first half of `num_samples` samples, all samples, and the second half."""
    device, half = strategy.device, num_samples // NUM_PARTS
    for start, end in ((0, half), (0, 2 * half), (half, 2 * half)) if half else ():
        keys = SampleKeys(np.arange(start, end), 0, phase, few_lengths=device.type == "cuda")
        yield {name: tensor.to(device) for name, tensor in gathered(dataset, collate, keys).items()}


def _of_mode(learner: Learner, phase: str | None, batches: Iterator[Batch], clock: _Clock) -> list[str]:
    """Returns messages about the data and sums of a phase, or of the evaluation if phase is None."""
    first = next(batches, None) if clock.allows(2 * NUM_PARTS if phase is None else 1) else None
    if first is None:
        return []
    objective, strategy, trains = learner.objective, learner.strategy, phase is not None
    if objective.coupled:
        return _of_data(phase, first, next(batches), strategy.group)
    with leaving_no_trace(objective), strategy.preserving_rng_states(), torch.set_grad_enabled(trains):
        objective.train(trains)
        for module in objective.modules():
            if isinstance(module, BATCH_NORMS):  # batch norm couples samples by design
                module.eval()
        if not trains:
            start_evaluation(objective, learner.precision, strategy)
        before = clock.spent()
        parts = [_sums(learner, phase, first)]
        clock.of_forward = clock.spent() - before
        if not clock.allows(2 * NUM_PARTS - 1):  # counted in forwards of half the samples
            return []
        whole, other = batches
        if found := _of_data(phase, first, whole, strategy.group):
            return found
        total = _sums(learner, phase, whole)
        parts.append(_sums(learner, phase, other))
        if objective.is_joint:
            twice = _sums(learner, phase, {name: torch.cat([value, value]) for name, value in whole.items()})
            return _joint_mean(forward_name(objective, phase), len(whole["weight"]), total, parts, twice)
        return _compared(learner, phase, [whole, first, other], total, parts, clock)


def _of_data(phase: str | None, first: Batch, whole: Batch, group: Group) -> list[str]:
    """Returns a message if samples of rank 0, which decides for all, differ between a batch and its first half."""
    size = len(first["weight"])
    pairs = [(name, one, whole[name][:size]) for name, one in first.items() if one.layout == torch.strided]
    # NaN equals nothing, itself included
    differ = group.on_main(lambda: [name for name, a, b in pairs if a.shape == b.shape and ((a != b) & (a == a)).any()])
    return [
        f"{'Evaluation' if phase is None else 'Training'} data: {name!r} of the same samples differs when they "
        "are read again in another batch, so results depend on how a batch is split, and a resumed run learns "
        "something else; let the data draw random numbers as section 2 of docs/own_task.md describes."
        for name in differ[:1]
    ]


def _sums(learner: Learner, phase: str | None, batch: Batch, seed: int = 0) -> dict[str, Tensor]:
    """Runs a forward pass and returns its sums. seed: seed of dropout and other random numbers."""
    learner.strategy.seed_dropout(0, 0, 0, seed, 0, same_everywhere=True)
    own = {name: tensor.clone() for name, tensor in batch.items()}  # a forward may change its batch
    outputs = learner.net(own) if phase is None else learner.net(own, phase)
    require_sums(outputs, learner.objective, phase)
    return {name: value.detach() for name, value in outputs.items() if isinstance(value, Tensor)}


def _joint_mean(where: str, num_samples: int, whole: Sums, parts: Sequence[Sums], twice: Sums) -> list[str]:
    """Returns a message if a joint loss looks like a mean over samples; raises no error, because it may be a sum."""
    loss, double, in_halves = (float(sums["loss"]) for sums in (whole, twice, _added(parts)))
    if not (0 < MORE_IN_HALVES * loss < in_halves and double < LESS_TWICE * loss):
        return []
    return [
        f"{where}: 'loss' is {loss:.5g} for {num_samples} samples, {double:.5g} if each sample occurs twice, and "
        f"{in_halves:.5g} as the sum of {NUM_PARTS} halves, as if it were a mean. It must be a sum over the rows, "
        "because the trainer divides it by their weight: use reduction='sum', or multiply the mean by the row count."
    ]


def _compared(
    learner: Learner, phase: str | None, batches: Sequence[Batch], whole: Sums, parts: Sequence[Sums], clock: _Clock
) -> list[str]:
    """Returns a message if the sums of a batch's parts do not add up to the sums of the batch.

    batches: the whole batch and its parts. whole, parts: their sums. Raises UserError if a sum is a mean.
    """
    where, num_samples = forward_name(learner.objective, phase), len(batches[0]["weight"])
    for part in parts:
        _require_same_shapes(where, whole, part, num_samples)
    total, precision = _added(parts), learner.precision
    close = CLOSE_IN_HALVES if precision.autocast_dtype else CLOSE.get(precision.dtype, CLOSE_IN_HALVES)
    differ = [name for name, value in whole.items() if _differs(value, total[name], close)]
    means = _means(whole, total, PERHAPS)
    if not differ and not means:
        return []
    again = _sums(learner, phase, batches[0], seed=1)
    if any(not torch.equal(value, again.get(name, value)) for name, value in whole.items()):
        # Sums of a random forward differ by chance; only a mean still shows in sums over many seeds.
        if not means or not clock.allows(2 * NUM_PARTS * NUM_SEEDS, MOST_S):
            return []
        whole = _added([_sums(learner, phase, batches[0], seed) for seed in SEEDS_OF_WHOLE])
        total = _added([_sums(learner, phase, part, seed) for part in batches[1:] for seed in SEEDS_OF_PARTS])
        means, differ = _means(whole, total, MEAN), []
    elif means:  # a count may look like a mean by chance, but only a mean stays the same if all samples occur twice
        twice = _sums(learner, phase, {name: torch.cat([value, value]) for name, value in batches[0].items()})
        means = [name for name in _means(whole, total, MEAN) if name in _means(twice, total, MEAN)]
    if not means and not differ:
        return []
    name = [*means, *differ][0]
    one, both = (f"{float(value[name].double().sum()):.5g}" for value in (whole, total))
    account = f"{where}: {name!r} is {one} for {num_samples} samples, but {both} as the sum of {NUM_PARTS} halves"
    advice, advice_on_mean = (ON_ROWS, ON_ROWS) if learner.objective.given_as else (ADVICE_IF_COUPLED, ADVICE)
    if means:
        raise UserError(f"{account}, as if it were a mean; {advice_on_mean}")
    return [f"{account}, so results depend on --batch-size and the number of devices: {advice}."]


def _require_same_shapes(where: str, whole: Sums, part: Sums, num_samples: int) -> None:
    for name, value in whole.items():
        if name not in part:
            raise UserError(f"{where}: returns {name!r} only for some batches; return it for all batches")
        if part[name].shape != value.shape:
            raise UserError(
                f"{where}: returns {name!r} of shape {tuple(value.shape)} for {num_samples} samples and "
                f"{tuple(part[name].shape)} for half of them; sum it over the samples"
            )


def _added(several: Sequence[Sums]) -> dict[str, Tensor]:
    return {name: torch.stack([sums[name].double() for sums in several]).sum(0) for name in several[0]}


def _means(whole: Sums, total: Sums, bounds: tuple[float, float]) -> list[str]:
    """Returns the names of sums whose parts add up to about `NUM_PARTS` times the whole."""
    sizes = {name: float(value.double().sum()) for name, value in whole.items()}
    least, most = bounds
    return [
        name for name, size in sizes.items() if size and least <= float(total[name].sum()) / (NUM_PARTS * size) <= most
    ]


def _differs(whole: Tensor, total: Tensor, close: float) -> bool:
    if not whole.is_floating_point() or not whole.numel():
        return False
    return bool((whole - total).abs().max() > close * torch.maximum(whole.abs().max(), total.abs().max()))
