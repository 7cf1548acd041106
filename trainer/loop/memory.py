"""Handles out-of-memory errors: retries a step with smaller micro-batches for the same global batch.

Gradients are exact for any split of a global batch, so a smaller micro-batch does not change what the run learns.
"""

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.format import first_schema_error, integer, optional, record, text
from trainer.checkpoint.manifest import read_json
from trainer.common.errors import UserError
from trainer.common.tensors import local_shards
from trainer.failure.errors import RestartNeeded
from trainer.loading.batches import WeightedBatch, gathered, weighted
from trainer.loading.order import SampleKeys
from trainer.loop.learner import Learner
from trainer.loop.module_state import leaving_no_trace
from trainer.loop.optimizers import moments_of
from trainer.loop.plan import BatchSplit, Plan, split_batch
from trainer.task import Task, training_streams

T = TypeVar("T")

OPTIMIZER = "the optimizer"
"""Name of the weight update as an activity. Smaller micro-batches do not help here: activations are already freed."""
MEMORY = "memory.json"
_SIZE = integer(at_least=1)
FORMAT = record({"device": text(), "asked_batch_size": _SIZE}, {"batch_size": optional(_SIZE)})
OUT_OF_MEMORY = "Out of memory: continuing without CUDA graphs."
_SINGLE = "with a single sample per forward pass"
_OTHER_LACKS = re.compile(
    r"_STATUS_\w*ALLOC\w*_FAILED|CUFFT_ALLOC_FAILED|CUDA (driver )?error: out of memory|Cuda failure.*out of memory"
    r"|Triton Error \[CUDA\]: out of memory"
)
"""Matches out-of-memory messages of libraries and the driver, which have no exception type of their own."""


def lacks_memory(error: RuntimeError) -> bool:
    """Returns whether an error is an out-of-memory error of CUDA, or of a library such as cuBLAS, cuFFT or NCCL."""
    return isinstance(error, torch.OutOfMemoryError) or _OTHER_LACKS.search(str(error)) is not None


def free_memory() -> None:
    """Collects garbage and empties PyTorch's cache of device memory."""
    gc.collect()
    torch.cuda.empty_cache()  # no effect without a GPU


@dataclass(frozen=True)
class MemoryLimit:
    """Limit on samples per forward after out-of-memory errors, for one kind of device and one `--batch-size`.

    asked_batch_size: value of `--batch-size`. batch_size: maximum samples per forward on a device; None if unlimited.
    """

    device: str
    asked_batch_size: int
    batch_size: int | None = None

    def remembered(self, folder: Path, say: Callable[[str], None]) -> "MemoryLimit":
        """Returns the limit stored in the run directory for the same device and `--batch-size`, or else this limit.

        say: called with a message if the stored limit is damaged.
        """
        written = read_json(folder / MEMORY, say, schema_error=partial(first_schema_error, [FORMAT]))
        is_same = all(written.get(name) == getattr(self, name) for name in ("device", "asked_batch_size"))
        return replace(self, batch_size=written.get("batch_size")) if is_same else self

    def note(self) -> list[str]:
        """Returns a list with a message about the limit, or [] if there is none."""
        if self.batch_size is None:
            return []
        return [
            f"At most {self.batch_size} samples per forward pass, because more did not fit into the memory of "
            f"{self.device} earlier. To retry, change --batch-size or delete {MEMORY}."
        ]


class MemoryGuard:
    """Keeps a run within device memory by splitting batches into smaller micro-batches.

    splits: current split of each phase's global batches. limit: limit found so far. directory: run directory, where
    the limit is stored for the next start.
    """

    def __init__(
        self,
        splits: tuple[BatchSplit, ...],
        limit: MemoryLimit,
        learner: Learner,
        directory: RunDirectory,
    ) -> None:
        self.splits, self.limit = splits, limit
        self._learner, self._strategy, self._directory = learner, learner.strategy, directory

    def apply(self, limit: MemoryLimit) -> None:
        """Applies a limit to the first phase, and reduces the other phases' batch sizes in proportion."""
        self.limit, fits, asked = limit, limit.batch_size, self.splits[0].batch_size
        if fits is not None and fits < asked and not self._strategy.num_parts:
            self.splits = self._resized(lambda size: -(-size * fits // asked))

    # --- training ------------------------------------------------------------------------------------------------

    def require_hope(self, error: RuntimeError) -> None:
        """Re-raises errors other than out-of-memory errors. Raises UserError if smaller micro-batches cannot help."""
        if not lacks_memory(error):
            raise error
        if self._strategy.group.activity.name == OPTIMIZER:
            raise self._hopeless("for the moments of the optimizer") from None

    def make_room(self, phase: int, say: Callable[[str], None]) -> None:
        """Undoes a step that ran out of memory, and frees CUDA graphs.

        If there are no graphs, halves the micro-batch size. If a launcher must restart all processes, always halves it
        and raises RestartNeeded. Raises UserError if a single sample does not fit.
        """
        self._learner.objective.zero_grad(set_to_none=True)
        self._learner.buffers.undo()
        if self._learner.release() and not self._strategy.group.is_launched:
            free_memory()
            say(OUT_OF_MEMORY)
            return
        free_memory()
        group, before = self._strategy.group, self.splits[phase].batch_size
        account = f"out of memory in {group.activity} with {before} samples per forward pass"
        change = self._halve(phase)
        if group.is_launched:
            again = f"{account}: the same command resumes from the last checkpoint with {change}"
            raise RestartNeeded(again, asdict(self.limit))
        self._remember()
        sparing = "--batch-size {0.batch_size} --global-batch-size {0.global_batch_size}".format(self.splits[phase])
        say(f"{account[0].upper()}{account[1:]}: retrying with {change}; in new runs, {sparing} avoids such a failure.")

    def _halve(self, phase: int) -> str:
        """Halves samples per forward in all phases; returns a description of the change to `phase`.

        Raises UserError if `--parts` was given, or if a single sample did not fit into memory.
        """
        before, num_parts = self.splits[phase], self._strategy.num_parts
        if num_parts:
            advice = f"--parts {num_parts} fixes the size of parts; use a lower --batch-size, or more --parts"
            raise self._hopeless(f"with parts of {before.batch_size} samples", advice)
        if before.batch_size == 1:
            raise self._hopeless(_SINGLE)
        self.splits = self._resized(lambda size: -(-size // 2))
        self.limit = replace(self.limit, batch_size=self.splits[0].batch_size)
        after = self.splits[phase]
        steps = f"{after.grad_accum_steps} accumulation steps instead of {before.grad_accum_steps}"
        return f"{after.batch_size}, and {steps} for the same global batch of {after.global_batch_size}"

    def _resized(self, size_of: Callable[[int], int]) -> tuple[BatchSplit, ...]:
        devices = self._strategy.num_devices, self._strategy.group.world_size
        return tuple(split_batch(size_of(own.batch_size), 1, own.global_batch_size, *devices) for own in self.splits)

    def _remember(self) -> None:
        if self._directory.lock is not None:
            self._directory.write_json(MEMORY, asdict(self.limit))

    def _hopeless(self, what: str, advice: str = "a smaller --batch-size cannot help") -> UserError:
        """Returns the error for a model too large for memory. Its message states the memory use without activations."""
        rank, world_size = self._strategy.group.rank, self._strategy.group.world_size
        where = f"rank {rank} of {world_size} is " if world_size > 1 else ""
        trained = {p for params in self._learner.params.values() for p in params}
        moments = [p for several in self._learner.optimizers.values() for p in moments_of(several)]
        held = local_shards([*self._learner.objective.parameters(), *trained, *moments])
        size = sum(tensor.numel() * tensor.itemsize for tensor in held)
        readable = f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.2g} MiB"
        activity = self._strategy.group.activity
        return UserError(
            f"{where}out of memory in {activity} {what}: {advice}; this model's parameters, gradients and moments "
            f"take {readable} of each device; --multi-gpu fsdp shards them, --grad-checkpointing stores fewer "
            "activations; or use a smaller model, --amp bf16, or a device with more memory; earlier checkpoints are "
            "intact"
        )

    # --- without a retry ---------------------------------------------------------------------------------

    @contextmanager
    def refusing_lack(self, samples_per_forward: int, advice: str) -> Iterator[None]:
        """Context that converts out-of-memory errors to UserError. advice: flag that reduces samples per forward."""
        try:
            yield
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            if samples_per_forward == 1:
                raise self._hopeless(_SINGLE) from None
            raise self._hopeless(f"with {samples_per_forward} samples per forward pass", advice) from None

    # --- before the first step -----------------------------------------------------------------------------------

    def dry_run(self, task: Task, plan: Plan, say: Callable[[str], None]) -> None:
        """Tries each phase's largest micro-batch before training, and halves it until it fits on all processes.

        All processes must call this method. Raises UserError if a single sample does not fit. Skips models whose
        forward runs collectives, because other processes would wait for a process that runs out of memory.
        """
        modules = self._learner.net.modules()
        if self._strategy.exchanges_in_forward or any(isinstance(module, nn.SyncBatchNorm) for module in modules):
            return
        while (phase := self._first_too_large(task, plan)) is not None:
            before = self.splits[phase].batch_size
            change = self._halve(phase)
            self._strategy.group.on_main(self._remember)
            say(f"{before} samples per forward pass do not fit into memory: training with {change}.")

    def _first_too_large(self, task: Task, plan: Plan) -> int | None:
        """Returns the first phase whose largest micro-batch does not fit on at least one process, or None."""
        self._strategy.group.activity.enter("the dry run of the largest batch")
        with leaving_no_trace(self._learner.objective), self._strategy.preserving_rng_states():
            failures = [not self._fits(task, plan, phase) for phase in range(len(task.phases))]
        found = self._strategy.group.sum(torch.tensor(failures, dtype=torch.float64)).nonzero().flatten().tolist()
        return found[0] if found else None

    def _fits(self, task: Task, plan: Plan, phase: int) -> bool:
        fits = True
        try:
            self._forward_and_backward(task, plan, phase)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            fits = False
        self._learner.objective.zero_grad(set_to_none=True)
        free_memory()
        return fits

    def _forward_and_backward(self, task: Task, plan: Plan, phase: int) -> None:
        """Runs a phase's forward and backward pass twice: with optimizer states in memory, then with gradients too."""
        name, learner = task.phases[phase], self._learner
        held = [torch.empty_like(p) for p in moments_of(learner.optimizers[name], only_to_come=True)]
        last_epoch = max(0, plan.num_steps - 1) // plan.steps_per_epoch  # if samples grow, they are largest at the end
        if name in training_streams(task):  # finding the largest samples of the last epoch would read the whole stream
            last_epoch = 0
        index = task.largest_samples(name, last_epoch, self.splits[phase].micro_batch_size)
        keys = SampleKeys(index, last_epoch, phase, few_lengths=self._strategy.device.type == "cuda")
        batch = gathered(task.training_data(name), task.collate, keys)
        net = learner.enter(name)
        net.train()
        for _ in range(2):
            with self._strategy.gradient_sync(net, enabled=False):
                learner.precision.backward(net(self._strategy.to_device(batch), name)["loss"], 1.0)
        del held


def resplit(batches: Sequence[WeightedBatch], size: int) -> Sequence[WeightedBatch]:
    """Splits micro-batches into smaller micro-batches of at most `size` samples."""
    return [part for batch in batches for part in _parts(batch, size)]


def _parts(weighted_batch: WeightedBatch, size: int) -> list[WeightedBatch]:
    batch, is_placeholder = weighted_batch.batch, weighted_batch.num_samples == 0
    if len(batch["weight"]) <= size:
        return [weighted_batch]
    cuts = [slice(start, start + size) for start in range(0, len(batch["weight"]), size)]
    return [weighted({name: tensor[cut] for name, tensor in batch.items()}, is_placeholder) for cut in cuts]
