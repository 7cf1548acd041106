"""Out of memory on the device: smaller micro-batches for the same global batch.

The step rule is exact for any split of a global batch, so the run learns what it would have learnt.
"""

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TypeVar

import torch
from torch import nn

from trainer.common.errors import UserError
from trainer.loading.batches import Batch, BatchLoader
from trainer.loading.order import SampleKeys
from trainer.loop.memory_advice import advice
from trainer.loop.memory_limit import MEMORY, MemoryLimit
from trainer.loop.plan import BatchSplit, split_batch
from trainer.loop.run import Run
from trainer.loop.torch_optimizers import moments_of
from trainer.loop.windows import WeightedBatch, Window, weighted
from trainer.parallel.errors import RestartNeeded
from trainer.parallel.module_state import leaving_no_trace

T = TypeVar("T")

OPTIMIZER = "the optimizer"
"""The activity in which smaller micro-batches do not help: what they take is free again by then."""
_SINGLE = "with a single sample per forward"


_OTHER_LACKS = re.compile(r"_STATUS_\w*ALLOC\w*_FAILED|CUDA (driver )?error: out of memory|Cuda failure.*out of memory")
"""What cuBLAS, cuDNN, the driver and NCCL say, whose errors have no type of their own."""


def lacks_memory(error: RuntimeError) -> bool:
    """Whether it says that the device, or what computes on it, found no room."""
    return isinstance(error, torch.OutOfMemoryError) or _OTHER_LACKS.search(str(error)) is not None


# --- training ----------------------------------------------------------------------------------------------------


def train_within_memory(run: Run, window: Window, step: Callable[[Sequence[WeightedBatch]], T]) -> T:
    """step(micro-batches of the window), cut into as many as it takes.

    A step that did not fit is redone as if it had not been tried. Where other processes take part in it, it cannot be:
    RestartNeeded is raised. Raises UserError when not even one sample fits.
    """
    while True:
        try:
            # Batches loaded before memory got short are too large.
            is_short = run.memory_limit.batch_size is not None
            size = run.batches[window.step.phase].micro_batch_size
            return step(resplit(window.micro_batches, size) if is_short else window.micro_batches)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            if run.parallel.activity.name == OPTIMIZER:
                raise _hopeless(run, "for the moments of the optimizer") from None
        # Outside of the handler, because the frames of the exception hold what is to be freed.
        _forget_attempt(run)
        _halve(run, window.step.phase)


def resplit(batches: Sequence[WeightedBatch], size: int) -> Sequence[WeightedBatch]:
    """The same micro-batches with at most so many samples in one."""
    return [part for batch in batches for part in _parts(batch, size)]


def _parts(weighted_batch: WeightedBatch, size: int) -> list[WeightedBatch]:
    batch, is_placeholder = weighted_batch.batch, weighted_batch.num_samples == 0
    if len(batch["weight"]) <= size:
        return [weighted_batch]
    cuts = [slice(start, start + size) for start in range(0, len(batch["weight"]), size)]
    return [weighted({name: tensor[cut] for name, tensor in batch.items()}, is_placeholder) for cut in cuts]


def _forget_attempt(run: Run) -> None:
    run.learner.objective.zero_grad(set_to_none=True)
    run.learner.buffers.undo()
    free_memory()


def free_memory() -> None:
    """Frees what only refers to itself, and gives the device what torch keeps of it for later."""
    gc.collect()
    torch.cuda.empty_cache()  # nothing where no GPU is in use


def _halve(run: Run, phase: int) -> None:
    """Goes on with half the samples per forward of all phases, since one has no room, and says so."""
    before, (batches, limit) = run.batches[phase], _with_half(run, phase)
    after = batches[phase]
    account = f"out of memory in {run.parallel.activity} with {before.batch_size} samples per forward"
    change = _change(before, after)
    if run.parallel.is_launched:
        raise RestartNeeded(
            f"{account}: the same command goes on from the last checkpoint with {change}", asdict(limit)
        )
    run.batches = batches
    _remember(run, limit)
    sparing = f"--batch-size {after.batch_size} --global-batch-size {after.global_batch_size} spares the attempt"
    run.log.say(f"{account[0].upper()}{account[1:]}: going on with {change}; {sparing}.")


def _with_half(run: Run, phase: int) -> tuple[tuple[BatchSplit, ...], MemoryLimit]:
    """The same global batches with half the samples per forward. Raises UserError when a single one did not fit."""
    _refuse_single(run, run.batches[phase].batch_size)
    devices = run.parallel.num_devices, run.parallel.world_size
    batches = tuple(
        split_batch(-(-split.batch_size // 2), 1, split.global_batch_size, *devices) for split in run.batches
    )
    return batches, replace(run.memory_limit, batch_size=batches[0].batch_size)


def _refuse_single(run: Run, size: int) -> None:
    """Raises UserError for so many samples, of which there is no half."""
    if size == 1:
        raise _hopeless(run, _SINGLE)


def _change(before: BatchSplit, after: BatchSplit) -> str:
    steps = f"{after.grad_accum_steps} accumulation steps instead of {before.grad_accum_steps}"
    return f"{after.batch_size}, and {steps} for the same global batch of {after.global_batch_size}"


def _hopeless(run: Run, what: str, batch_size: str = "a smaller --batch-size cannot help") -> UserError:
    rank, world_size = run.parallel.rank, run.parallel.world_size
    where = f"rank {rank} of {world_size} is " if world_size > 1 else ""
    return UserError(
        f"{where}out of memory in {run.parallel.activity} {what}: {batch_size}; {advice(run)}; or take a smaller "
        "model, --amp bf16, or a device with more memory; earlier checkpoints are intact"
    )


def _remember(run: Run, limit: MemoryLimit) -> None:
    """For this run and, where this process holds the directory, for its next start."""
    run.memory_limit = limit
    if run.directory.is_held:
        run.directory.write_json(MEMORY, asdict(limit))


# --- evaluation --------------------------------------------------------------------------------------------------


def evaluate_within_memory(
    run: Run, batch: WeightedBatch, forward: Callable[[Batch], T]
) -> list[tuple[WeightedBatch, T]]:
    """Each part of a batch with forward(part); a single part unless memory is short.

    The parts add up to the whole, whatever they are, so each process does this by itself. Where others wait for it
    within its forward, RestartNeeded is raised.
    """
    while True:
        try:
            return [(part, forward(part.batch)) for part in _parts(batch, run.eval_micro_batch_size)]
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
        free_memory()
        before = run.memory_limit.samples_per_eval_forward
        _refuse_single(run, before)
        smaller = -(-before // 2)
        limit = replace(run.memory_limit, eval_batch_size=smaller)
        if run.parallel.exchanges_in_forward:
            account = f"out of memory in {run.parallel.activity} with {before} samples per forward"
            change = f"the same command goes on from the last checkpoint with {smaller}"
            raise RestartNeeded(f"{account}: {change}", asdict(limit))
        _remember(run, limit)
        run.log.say(
            f"Out of memory in {run.parallel.activity} with {before} samples per forward: going on with {smaller}. "
            f"--eval-batch-size {smaller} spares the attempt."
        )


# --- before the first step ---------------------------------------------------------------------------------------


@contextmanager
def refusing_lack_of_memory(run: Run, samples_per_forward: int) -> Iterator[None]:
    """Around the first forward and backward, of so few samples. Raises UserError where these find no room."""
    run.parallel.activity.enter("the first forward and backward")
    try:
        yield
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        if samples_per_forward == 1:
            raise _hopeless(run, _SINGLE) from None
        what = f"with {samples_per_forward} samples per forward"
        raise _hopeless(run, what, "--batch-size 1 tries a single one") from None


def dry_run(run: Run) -> None:
    """Tries a forward and a backward of the largest micro-batch of each phase, and halves it until it fits everywhere.

    Nothing is left of it. All processes call it. Raises UserError when not even one sample fits. A model whose forward
    has exchanges with other processes is left out: one that finds no room would leave the others waiting.
    """
    if run.parallel.exchanges_in_forward:
        return
    if any(isinstance(module, nn.SyncBatchNorm) for module in run.learner.net.modules()):
        return
    while (phase := _first_too_large(run)) is not None:
        before = run.batches[phase]
        run.batches, run.memory_limit = _with_half(run, phase)
        run.parallel.on_main(lambda: _remember(run, run.memory_limit))
        change = _change(before, run.batches[phase])
        run.log.say(f"{before.batch_size} samples per forward do not fit into memory: training with {change}.")


def _first_too_large(run: Run) -> int | None:
    """The first phase whose largest micro-batch finds no room on some process."""
    run.parallel.activity.enter("the rehearsal of the largest batch")
    gpus = [run.parallel.device] if run.parallel.device.type == "cuda" else []
    with leaving_no_trace(run.learner.objective), torch.random.fork_rng(gpus):
        failures = [not _fits(run, phase) for phase in range(len(run.task.phases))]
    found = run.parallel.sum(torch.tensor(failures, dtype=torch.float64)).nonzero().flatten().tolist()
    return found[0] if found else None


def _fits(run: Run, phase: int) -> bool:
    fits = True
    try:
        _forward_and_backward(run, phase)
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        fits = False
    run.learner.objective.zero_grad(set_to_none=True)
    free_memory()
    return fits


def _forward_and_backward(run: Run, phase: int) -> None:
    """With the gradients of an earlier micro-batch and the moments in memory."""
    name = run.task.phases[phase]
    held = [torch.empty_like(p) for p in moments_of(run.learner.optimizers[name], only_to_come=True)]
    last_epoch = max(0, run.plan.num_steps - 1) // run.plan.steps_per_epoch  # where samples have grown, if ever
    index = run.task.largest_samples(name, last_epoch, run.batches[phase].micro_batch_size)
    loader = BatchLoader(run.task.training_data(name), run.task.collate)
    (batch,) = loader([SampleKeys(index, last_epoch, phase)])
    net = run.learner.enter(name)
    net.train()
    for _ in range(2):
        with run.parallel.gradient_sync(net, enabled=False):
            run.learner.precision.backward(net(run.parallel.to_device(batch), name)["loss"], 1.0)
    del held
