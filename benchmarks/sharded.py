"""Measures a step with --multi-gpu fsdp on CPU processes, relative to hand-written loops with fully_shard and DDP.

    python benchmarks/sharded.py

Two processes run the default model's training step in three variants, which alternate in blocks of steps: a
hand-written loop with `fully_shard` on each block and on the model; Lockstep's step with fsdp; the hand-written loop
with DistributedDataParallel. The script measures wall-clock time, and CPU time, which a busy machine affects less.
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.exchange import (
    bare_step,
    in_turns,
    lockstep_step,
    measured,
    shuffled_batches,
    under_ddp,
)
from tasks.har import HarFlags, HarTask
from trainer.flags import DeviceFlags, MultiDeviceFlags
from trainer.parallel.environment import RankEnvironment
from trainer.parallel.fsdp import Sharded
from trainer.parallel.process_group import ProcessGroup


def sharded(task: HarTask) -> nn.Module:
    objective = task.build_objective()
    for unit in [*task.blocks(objective.model), objective]:
        fully_shard(unit)
    return objective


def measure(environment: RankEnvironment, folder: Path, rounds: int) -> int:
    """Measures all variants in one of the two processes; rank 0 writes median times and ratios."""
    torch.set_num_threads(1)
    group = ProcessGroup(environment, MultiDeviceFlags(multi_gpu="fsdp"), DeviceFlags(device="cpu"))
    strategy = Sharded(group, None, reshards=True)
    task = HarTask(HarFlags(), seed=0, cache_dir=folder)
    batches = shuffled_batches(task, environment.rank)
    steps = {
        "bare fully_shard": bare_step(sharded(task), batches),
        "lockstep fsdp": lockstep_step(task, strategy, batches),
        "bare ddp": bare_step(under_ddp(task.build_objective()), batches),
    }
    means = in_turns(steps, rounds, strategy)
    if strategy.group.is_main:
        ours = means["lockstep fsdp"]
        result = {
            "step ms": {name: round(1e3 * float(of_kind[:, 0].median()), 2) for name, of_kind in means.items()},
            "lockstep fsdp over bare fully_shard": compared(ours, means["bare fully_shard"]),
            "lockstep fsdp over bare ddp": compared(ours, means["bare ddp"]),
        }
        (folder / "result.json").write_text(json.dumps(result))
    strategy.group.close()
    return 0


def compared(ours: Tensor, others: Tensor) -> dict[str, float]:
    """Returns median ratios of neighbouring blocks' wall-clock and CPU times. ours, others: times, (rounds, 2)."""
    clock, processor = (ours / others).median(dim=0).values.tolist()
    return {"time": round(clock, 3), "processor time": round(processor, 3)}


def main() -> None:
    print(json.dumps(measured(measure, __doc__)))


if __name__ == "__main__":
    main()
