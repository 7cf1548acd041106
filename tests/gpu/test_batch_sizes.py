"""Tests that `profiler.py batch-size` measures each size on an empty GPU."""

from tests.conftest import WEIGHTED
from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus


@on_simulated_gpus(may_wait=True)
def test_memory_is_freed_between_sizes(tmp_path):
    import gc

    from trainer.commands.build import build_task, set_up_torch, start_strategy
    from trainer.commands.parse import parse
    from trainer.profiling.batch_size import BatchSizeFlags, of_size

    argv = ["--task", WEIGHTED, "--num-threads", "1", "--steps", "2", "--settling-steps", "1", "--amp", "fp16"]
    flags, problems = parse([*argv, "--cache-dir", str(tmp_path)], False, BatchSizeFlags)
    assert not problems
    strategy = start_strategy(flags, None)
    set_up_torch(flags, strategy.group)
    task = build_task(flags)
    gc.collect()
    gc.disable()
    before = GPUS.memory_in_use()
    for _ in range(2):
        assert of_size(flags, argv, strategy, task, 8) is not None
        assert GPUS.memory_in_use() == before
