"""Public names of the trainer, each imported from its module on first use.

Task files use `Task`, `Objective`, `FlagGroup` and `flag`; scripts use `fit`, `load` and `SavedRun`; logger files use
`Logger`, `LoggedRun` and `Record`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer.common import __version__

if TYPE_CHECKING:
    from trainer.api import SavedRun, fit, load
    from trainer.common.errors import BadInput, UserError
    from trainer.config import FlagGroup, flag
    from trainer.loading.batch_orders import bucketed_batches, even_batches, sharded_batches
    from trainer.loading.batches import Batch, KeyedDataset
    from trainer.loading.cache import cached_arrays
    from trainer.loading.counter_random import normal, random_bits, uniform
    from trainer.loading.on_device import Movable
    from trainer.loading.order import SampleKeys
    from trainer.loading.streams import from_stream
    from trainer.loading.torch_datasets import from_dataset
    from trainer.logs.logger import LoggedRun, Logger, Record
    from trainer.parallel.rows import Gathered, gather
    from trainer.task import At, Baseline, Exported, Objective, Outputs, ParamGroup, PerSample, Picture, Sums, Task

_HOMES = {
    "api": ("SavedRun", "fit", "load"),
    "config": ("FlagGroup", "flag"),
    "loading.batch_orders": ("bucketed_batches", "even_batches", "sharded_batches"),
    "loading.batches": ("Batch", "KeyedDataset"),
    "loading.cache": ("cached_arrays",),
    "loading.counter_random": ("normal", "random_bits", "uniform"),
    "common.errors": ("BadInput", "UserError"),
    "loading.on_device": ("Movable",),
    "loading.order": ("SampleKeys",),
    "loading.streams": ("from_stream",),
    "loading.torch_datasets": ("from_dataset",),
    "logs.logger": ("LoggedRun", "Logger", "Record"),
    "parallel.rows": ("Gathered", "gather"),
    "task": (
        "At",
        "Baseline",
        "Exported",
        "Objective",
        "Outputs",
        "ParamGroup",
        "PerSample",
        "Picture",
        "Sums",
        "Task",
    ),
}

__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
