"""Strategies for multi-device training (values of `--multi-gpu`), and their features."""

from dataclasses import dataclass
from typing import Literal

FormName = Literal["dp", "ddp", "fsdp"]


@dataclass(frozen=True)
class Form:
    """Features of a multi-device strategy.

    has_processes: runs one process per device, which a launcher may start. shards: each process has only shards of
    parameters.
    """

    name: FormName
    help: str
    has_processes: bool = True
    shards: bool = False


FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        Form("dp", "one process for all GPUs (DataParallel)", has_processes=False),
        Form("ddp", "one process per device (DDP), faster than dp"),
        Form(
            "fsdp",
            "one process per device with sharded parameters (fully_shard), for models too large for one GPU",
            shards=True,
        ),
    )
}


HELP = "multi-device strategy; " + "; ".join(f"{form.name}: {form.help}" for form in FORMS.values())
PER_PROCESS = tuple(form.name for form in FORMS.values() if form.has_processes)
SHARDING = tuple(form.name for form in FORMS.values() if form.shards)
USUAL: FormName = "ddp"
"""Strategy that messages recommend, and that `fit` uses under a launcher by default."""
