"""What to say to a user whose model is too large for a device: what it takes, and what would take less."""

from collections.abc import Iterable

from torch import Tensor

from trainer.loop.run import Run
from trainer.loop.torch_optimizers import moments_of
from trainer.parallel.parts import local_shards

NUMBERS_OF_DEVICES = (2, 4, 8)


def advice(run: Run) -> str:
    """What the model takes of each device with all that training keeps of it, and by which flags it would be less."""
    learner = run.learner
    trained = {p for params in learner.params.values() for p in params}
    moments = [p for several in learner.optimizers.values() for p in moments_of(several)]
    held = [*learner.objective.parameters(), *trained, *moments]
    whole, own = _bytes_of(held), _bytes_of(local_shards(held))
    account = f"parameters, gradients and moments of this model take {_readable(own)} of each device"
    if own < whole:
        ways = [f"{_readable(whole)} in all are divided among more by --nproc or --shard-size"]
    else:
        parts = ", ".join(f"{_readable(whole / n)} on each of {n}" for n in NUMBERS_OF_DEVICES)
        ways = [f"--multi-gpu fsdp divides them ({parts})"]
    split = run.batches[0]
    ways += [
        "--grad-checkpointing keeps less for the backward",
        f"more accumulation than {split.grad_accum_steps} x {split.batch_size} samples for a global batch of "
        f"{split.global_batch_size} does not help",
    ]
    return f"{account}; {'; '.join(ways)}"


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _readable(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2g} MiB"
