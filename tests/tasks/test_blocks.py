"""Tests the modules that `Task.blocks` returns for the built-in tasks."""

import pytest
import torch

from trainer.commands.build import build_task, example_batch
from trainer.commands.parse import parse
from trainer.loop import blocks as loop_blocks
from trainer.loop.contract import check_blocks

HAR = ["--model", "harnet", "--num-members", "2"]
HAR_BLOCKS = ["network.encoder", "network.heads.0", "network.heads.1"]
SPEECH = ["--task", "speech", "--num-blocks", "2"]
SMALL_LMU = ["--model", "lmu", "--num-layers", "2", "--hidden-size", "16", "--num-heads", "2"]
SMALL = ["--task", "seqrec", "--hidden-units", "8", "--maxlen", "8"]


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (HAR, HAR_BLOCKS),
        ([*HAR, "--mode", "flatten"], HAR_BLOCKS),
        (["--model", "tinyhar"], ["network.encoder", "network.channel_attention", "network.lstm"]),
        (["--model", "deepconvlstm"], ["network.encoder", "network.lstm1", "network.lstm2"]),
        ([*SMALL, "--no-time", "--num-blocks", "3"], ["blocks.0", "blocks.1", "blocks.2"]),
        (SMALL, ["blocks.0", "blocks.1"]),
        ([*SMALL, "--mhc"], ["blocks.0", "blocks.1"]),
        (SPEECH, ["encoder.blocks.0", "encoder.blocks.1"]),
        ([*SPEECH[:2], *SMALL_LMU], ["encoder.blocks.0", "encoder.blocks.1"]),
        (["--task", "tabular"], ["blocks.0", "blocks.1", "last_block"]),
    ],
)  # fmt: skip
def test_blocks_are_submodules_called_in_order(argv, names, cache_dir):
    flags, problems = parse([*argv, "--cache-dir", str(cache_dir)], several_devices=False)
    assert problems == []
    task = build_task(flags)
    objective = task.build_objective()
    model = objective.model
    blocks = task.blocks(model)
    assert all(block is model.get_submodule(name) for name, block in zip(names, blocks, strict=True))
    check_blocks(task, model)
    called = []
    for name, block in zip(names, blocks, strict=True):
        block.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    torch.manual_seed(0)
    objective(example_batch(task, 0, 2))
    assert called == names


def test_lightgcns_propagation_is_not_compiled(cache_dir, monkeypatch):
    """Compiled, it would be split at each sparse product."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(loop_blocks, "BACKEND", "aot_eager")
    flags, _ = parse(["--task", "kgat", "--model", "kg-lightgcn", "--cache-dir", str(cache_dir)], several_devices=False)
    task = build_task(flags)
    objective, batch = task.build_objective(), example_batch(task, 0, 4)
    expected = objective(batch)["loss"]
    loop_blocks.compile_units([objective])
    counters.clear()
    torch.testing.assert_close(objective(batch)["loss"], expected)
    assert 0 < counters["stats"]["unique_graphs"] <= 3
