"""One process per GPU, on imagined ones. What they exchange travels by gloo."""

import pytest

from tests.conftest import TINY, load
from tests.gpu.runs import EXACT, assert_same, run, tiny
from tests.gpu.test_memory import ROOM, WIDE
from tests.gpu.test_training import HELPERS, POISONED
from tests.helpers.imagined_gpu import GPUS, on_imagined_gpus
from tests.helpers.imagined_gpu.ranks import run_ranks

# Global batches of 5, the last of an epoch 3, and one that is left out; two phases, tied weights, blocks, buffers.
PIECES = [
    "--task", f"{HELPERS / 'pieces_task.py'}:Pieces", *EXACT, "--epochs", 2, "--batch-size", 1,
    "--global-batch-size", 5, "--lr", 0.02, "--max-grad-norm", 0.3, "--ema-decay", 0.9, "--poisoned",
    "--on-nonfinite", "skip", "--save-every-steps", 3, "--num-threads", 1,
]  # fmt: skip
FORMS = {
    "ddp": ["ddp"],
    "fsdp": ["fsdp"],
    "ddp on one GPU": pytest.param(["ddp", "--gpu-ids", 0], marks=pytest.mark.slow),
    "fsdp, recomputed": pytest.param(["fsdp", "--grad-checkpointing"], marks=pytest.mark.slow),
}


def run_on_ranks(tmp_path, cache_dir, *argv, form=("ddp",)):
    """Two processes, which must end well."""
    more = ["--multi-gpu", *form, "--backend", "gloo", "--lockstep-every", 2, "--save-dir", tmp_path / "ranks"]
    assert run_ranks([*argv, *more, "--cache-dir", cache_dir / "lockstep"], 2, tmp_path / "meeting") == [0, 0]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@on_imagined_gpus(2)
def test_ranks_learn_what_the_cpu_learns(form, tmp_path, cache_dir):
    run_on_ranks(tmp_path, cache_dir, *PIECES, form=form)
    shared = "2 x cuda:0 (Imagined GPU)"
    devices = shared if "--gpu-ids" in form else "cuda:0 (Imagined GPU), cuda:1 (Imagined GPU)"
    assert f" over gloo: {devices}" in GPUS.printed()
    run(cache_dir, *PIECES, "--device", "cpu", "--save-dir", tmp_path / "cpu")
    assert_same(tmp_path / "ranks", tmp_path / "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ddp", "fsdp"])
@pytest.mark.parametrize("amp", ["bf16", "fp16"])
@on_imagined_gpus(2)
def test_precisions(amp, form, tmp_path, cache_dir):
    run_on_ranks(tmp_path, cache_dir, *TINY, "--amp", amp, form=[form])
    assert f"float32 with {amp} autocast" in GPUS.printed()


@pytest.mark.slow
@on_imagined_gpus(2)
def test_statistics_of_batch_norms_and_a_step_that_is_left_out(tmp_path, cache_dir):
    more = ["--epochs", 2, "--on-nonfinite", "skip", "--batch-norm", "--batch-size", 4, "--global-batch-size", 8]
    argv = [*TINY, *EXACT, *POISONED, *more]
    run_on_ranks(tmp_path, cache_dir, *argv)
    assert load(tmp_path / "ranks" / "last.pth")["skipped_steps"] == 1


@pytest.mark.slow
@on_imagined_gpus(2)
def test_one_rank_lacks_memory_in_the_dry_run(tmp_path, cache_dir):
    """The others do not wait for it."""
    GPUS.limit_memory(ROOM, device=1)
    argv = [*TINY, *WIDE, "--global-batch-size", 96, "--batch-size", 48, "--eval-batch-size", 8]
    run_on_ranks(tmp_path, cache_dir, *argv)
    assert "48 samples per forward do not fit into memory: training with 24" in GPUS.printed()
    tiny(cache_dir, tmp_path / "cpu", *WIDE, "--global-batch-size", 96, "--device", "cpu", "--eval-batch-size", 8)
    assert_same(tmp_path / "ranks", tmp_path / "cpu")


@pytest.mark.slow
@on_imagined_gpus(2, may_wait=True)
def test_one_bit_on_one_rank(tmp_path, cache_dir, monkeypatch):
    """The task itself waits, to count its forwards."""
    monkeypatch.setenv("LOCKSTEP_DRIFT", "bit 1 5")
    drifting = ["--task", f"{HELPERS / 'drifting_task.py'}:Drifting", "--batch-size", 4, "--num-threads", 1]
    more = ["--multi-gpu", "ddp", "--backend", "gloo", "--lockstep-every", 2, "--save-dir", tmp_path / "run"]
    argv = [*drifting, *more, "--cache-dir", cache_dir / "lockstep"]
    assert run_ranks(argv, 2, tmp_path / "meeting") == [2, 2]
    printed = GPUS.printed()
    assert "the ranks are no longer in lockstep" in printed and "model.layers.4.weight held other bits on" in printed
    assert "cuda:0 (Imagined GPU)) than on rank 1" in printed
