"""Tests configs/: each preset parses, trains, and has the global batch that it states."""

import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import ROOT, load
from tests.docs.test_docs import SCRIPTS, commands_in
from tests.helpers import forks
from tests.helpers.small_seqrec import write_interactions
from tests.helpers.uci_har_files import write_layout
from trainer.commands.flags import Flags
from trainer.commands.parse import parse
from trainer.loop import blocks
from trainer.loop.plan import BatchSplit, split_batch
from trainer.parallel import devices

PRESETS = sorted((ROOT / "configs").glob("*/?gpu.toml"))
MEMORY = ROOT / "configs" / "memory.toml"
LAYERS = sorted((ROOT / "configs").glob("*/memory.toml"))
"""Files that save memory for a single workload, given after its preset."""
WHOLE_GRAPH = "kgat"
"""Workload whose batch is not halved to save memory, because each forward pass propagates over the whole graph."""
SHARDED = sorted((ROOT / "configs").glob("*/fsdp.toml"))
PUBLISHED = sorted((ROOT / "configs" / "seqrec").glob("*_published.toml"))
WORKLOADS = {
    "har": lambda folder: ["--data-dir", write_layout(folder / "uci"), "--num-val-subjects", 1, "--epochs", 3],
    "kgat": lambda folder: ["--epochs", 5, "--embed-dim", 8],
    "seqrec": lambda folder: [
        *("--data-dir", write_interactions(folder / "interactions.txt"), "--k-core", 0, "--epochs", 16)
    ],
    "speech": lambda folder: ["--epochs", 10, "--hidden-size", 16, "--num-layers", 1, "--num-heads", 2],
    "tabular": lambda folder: [
        *("--epochs", 5, "--width", 8, "--num-tables", 256, "--num-val-tables", 4),
        *("--max-rows", 64, "--max-features", 3),
    ],
}
"""Functions that write a small data set into a folder and return flags for it. The warm-up fits into the epochs."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def num_gpus(preset: Path) -> int:
    return int(re.fullmatch(r"(\d)gpu", preset.stem)[1])


def parsed(script: str, arguments: list[str]) -> Flags:
    flags, problems = parse(arguments, SCRIPTS[script])
    # The reader has these data, and this machine does not.
    assert [problem for problem in problems if not problem.startswith("--data-dir ")] == []
    return flags


def split_of(flags: Flags, num_devices: int) -> BatchSplit:
    batch = flags.batch
    return split_batch(batch.batch_size, batch.grad_accum_steps, batch.global_batch_size, num_devices, num_devices)


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(devices.torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)


def test_every_workload_has_presets_for_1_2_4_and_8_gpus():
    assert [name_of(path) for path in PRESETS] == [
        f"configs/{workload}/{number}gpu.toml" for workload in WORKLOADS for number in (1, 2, 4, 8)
    ]
    assert [path.parent.name for path in LAYERS] == [path.parent.name for path in SHARDED] == list(WORKLOADS)


@pytest.mark.parametrize("path", [*PRESETS, MEMORY, *LAYERS, *SHARDED, *PUBLISHED], ids=name_of)
def test_the_command_in_a_preset_parses(path):
    ((script, arguments),) = commands_in(path.read_text().replace("#     ", ""))
    assert name_of(path) in arguments
    flags = parsed(script, arguments)
    if path in LAYERS:
        assert flags.blocks.grad_checkpointing
        one_gpu = parsed(script, [argument for argument in arguments if argument != name_of(path)])
        times = 1 if path.parent.name == WHOLE_GRAPH else 2
        assert times * flags.batch.batch_size == one_gpu.batch.batch_size
        assert split_of(flags, 1).global_batch_size == split_of(one_gpu, 1).global_batch_size
    elif path in SHARDED:
        assert (flags.multi.multi_gpu, flags.blocks.compile) == ("fsdp", True)
        four_gpus = parsed(script, [argument for argument in arguments if argument != name_of(path)])
        assert flags.batch == four_gpus.batch
    elif path in PUBLISHED:
        assert (flags.run.task, script) == ("seqrec", "main.py")
    elif path != MEMORY:
        assert flags.run.task == path.parent.name
        assert script == ("main.py" if num_gpus(path) == 1 else "main_multi_gpu.py")


@pytest.mark.parametrize("preset", PRESETS, ids=name_of)
def test_a_preset_has_the_global_batch_it_states(preset):
    text, number = preset.read_text(), num_gpus(preset)
    assert "not measured optima" in text.splitlines()[0]
    total, parts = re.search(r"^# Global batch: (\d+)(?: = (\d+ x \d+))?$", text, re.MULTILINE).groups()
    flags = parsed("main_multi_gpu.py", ["--config", str(preset), "--multi-gpu", "ddp"])
    split = split_of(flags, number)
    assert (split.global_batch_size, split.grad_accum_steps) == (int(total), 1)
    assert (parts is None and number == 1) or parts == f"{number} x {split.batch_size}"
    small = parsed("main_multi_gpu.py", ["--config", str(preset), str(MEMORY), "--multi-gpu", "ddp"])
    for num_devices in (1, 2, 4, 8):
        assert split_of(flags, num_devices).global_batch_size == int(total)
        assert split_of(small, num_devices).global_batch_size == int(total)
    if flags.batch.batch_size == 32:
        assert split_of(small, number) == BatchSplit(16, 16, 2, int(total))


def two_processes(workload, environment, folder, layers=(), more=(), prepare=None):
    """Trains the preset for four GPUs on two CPU processes, in two micro-batches each; returns what they printed."""
    arguments = ["--config", ROOT / "configs" / workload / "4gpu.toml", *layers, "--nproc", 2, "--device", "cpu"]
    arguments += ["--num-threads", 1, *WORKLOADS[workload](folder), *more, "--save-dir", folder / "run"]
    statuses = forks.run_group(arguments, 2, environment, folder / "out", prepare, timeout_s=300)
    out = (folder / "out").read_text()
    assert statuses == [0, 0], out
    assert "x 2 devices x 2 accumulation steps" in out, shlex.join(map(str, arguments))
    return out


@pytest.mark.parametrize(
    "workload",
    [pytest.param(name, marks=[] if name in ("har", "kgat", "seqrec") else pytest.mark.slow) for name in WORKLOADS],
)
def test_two_processes_train_a_preset_for_four_gpus(workload, environment, tmp_path):
    preset = ROOT / "configs" / workload / "4gpu.toml"
    two_processes(workload, environment, tmp_path)
    final, flags = load(tmp_path / "run" / "final.pth"), parsed("main_multi_gpu.py", ["--config", str(preset)])
    assert final["global_batch_sizes"][0] == flags.batch.global_batch_size
    assert final["config"]["--lr"] == flags.learning.lr


def compile_ahead_of_time():
    """Prepares a fork to compile without a C++ compiler."""
    blocks.BACKEND = "aot_eager"
    return lambda: None


@pytest.mark.slow
@pytest.mark.parametrize("layer", SHARDED, ids=name_of)
def test_two_processes_train_a_sharded_model(layer, environment, tmp_path):
    more = ["--num-workers", 0]
    out = two_processes(layer.parent.name, environment, tmp_path, [layer], more, compile_ahead_of_time)
    assert "Fully sharded over gloo: 2 x cpu, the model in 2 shard(s)" in out


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS, ids=name_of)
def test_a_layer_with_checkpointed_blocks_trains(layer, environment, tmp_path):
    workload, printed = layer.parent.name, tmp_path / "out"
    arguments = ["--config", layer.with_name("1gpu.toml"), layer, "--device", "cpu", "--num-threads", 1]
    arguments += [*WORKLOADS[workload](tmp_path), "--save-dir", tmp_path / "run"]
    process = forks.start([*map(str, arguments)], environment, printed, printed)
    process.join(300)
    assert process.exitcode == 0, printed.read_text()
    assert ("x 2 accumulation steps" in printed.read_text()) == (workload != WHOLE_GRAPH)
