"""What a run has learnt about the memory of its device, so that its next start need not learn it again."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trainer.checkpoint.records import read_json
from trainer.checkpoint.schema import first_schema_error, optional, record, text, whole
from trainer.loop.plan import BatchFlags, BatchSplit, split_batch

MEMORY = "memory.json"
_SIZE = whole(at_least=1)
FORMAT = record(
    {"device": text(), "asked_batch_size": _SIZE},
    {"asked_eval_batch_size": optional(_SIZE), "batch_size": optional(_SIZE), "eval_batch_size": optional(_SIZE)},
    closed=True,
)
"""Of that file."""


@dataclass(frozen=True)
class MemoryLimit:
    """What is known not to fit. It holds for one kind of device, and for the flags that it was found with.

    batch_size, eval_batch_size: samples per device per forward that are left to try; None where nothing failed.
    """

    device: str
    asked_batch_size: int
    asked_eval_batch_size: int | None
    batch_size: int | None = None
    eval_batch_size: int | None = None

    @staticmethod
    def unknown(flags: BatchFlags, device: torch.device) -> "MemoryLimit":
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return MemoryLimit(name, flags.batch_size, flags.eval_batch_size)

    def remembered(self, folder: Path, say: Callable[[str], None] = lambda line: None) -> "MemoryLimit":
        """This one with what an earlier start wrote into the run directory, if that is about the same.

        say: gets a line about a damaged file.
        """
        path = folder / MEMORY
        written = read_json(path, say)
        schema_error = first_schema_error([FORMAT], written) if written else None
        if schema_error is not None:
            say(f"{path} is damaged: {schema_error}.")
            return self
        asked = ("device", "asked_batch_size", "asked_eval_batch_size")
        if any(written.get(name) != getattr(self, name) for name in asked):
            return self
        return replace(self, batch_size=written.get("batch_size"), eval_batch_size=written.get("eval_batch_size"))

    @property
    def samples_per_eval_forward(self) -> int:
        """Of one device."""
        return self.eval_batch_size or self.asked_eval_batch_size or self.asked_batch_size

    def applied(self, batches: tuple[BatchSplit, ...], num_devices: int, world_size: int) -> tuple[BatchSplit, ...]:
        """The splits of all phases: no more samples per forward of the first one than fit, of others in proportion."""
        asked = batches[0].batch_size
        if self.batch_size is None or self.batch_size >= asked:
            return batches
        sizes = [-(-split.batch_size * self.batch_size // asked) for split in batches]
        return tuple(
            split_batch(size, 1, split.global_batch_size, num_devices, world_size)
            for size, split in zip(sizes, batches, strict=True)
        )

    def note(self) -> list[str]:
        """What the user is told at a start that an earlier one has taught something."""
        known = {"": self.batch_size, " in evaluation": self.eval_batch_size}
        return [
            f"At most {size} samples per forward{where}: more did not fit into the memory of {self.device} before. "
            f"Another --batch-size, or deleting {MEMORY}, tries anew."
            for where, size in known.items()
            if size is not None
        ]
