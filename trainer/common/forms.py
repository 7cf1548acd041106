"""The forms of running on several devices: what `--multi-gpu` may name, and what each of them can."""

from dataclasses import dataclass
from typing import Literal

FormName = Literal["dp", "ddp", "fsdp"]


@dataclass(frozen=True)
class Form:
    """What a run on several devices can.

    has_processes: whether each device has a process of its own, which a launcher may have started. can_compile: whether
    `--compile` works. shards: whether a process keeps only a part of each parameter; then whole matrices are not there
    for Muon to orthogonalise. takes_sync_bn: whether batch norm can go over the samples of all devices.
    takes_unused: whether parameters that take no part in a forward need `--find-unused-parameters` in a large model.
    """

    name: FormName
    help: str
    has_processes: bool = True
    can_compile: bool = True
    shards: bool = False
    takes_sync_bn: bool = False
    takes_unused: bool = False


FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        Form("dp", "one process drives several GPUs (nn.DataParallel)", has_processes=False, can_compile=False),
        Form("ddp", "one process per device (faster)", takes_sync_bn=True, takes_unused=True),
        Form("fsdp", "so too, each of which keeps a part of the model (for what does not fit)", shards=True),
    )
}


HELP = "; ".join(f"{form.name}: {form.help}" for form in FORMS.values())
PER_PROCESS = tuple(form.name for form in FORMS.values() if form.has_processes)
SHARDING = tuple(form.name for form in FORMS.values() if form.shards)
TAKING_UNUSED = tuple(form.name for form in FORMS.values() if form.takes_unused)
USUAL: FormName = "ddp"
"""The form that messages recommend, and that Python callers get where they name none."""
