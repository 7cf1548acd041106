"""Tests training with one process per simulated GPU, over gloo."""

import pytest

from tests.conftest import TINY, assert_same_bits, load
from tests.gpu.runs import EXACT, assert_same, run, tiny
from tests.gpu.test_memory import ROOM, WIDE
from tests.gpu.test_training import HELPERS, POISONED
from tests.helpers.processes import free_port
from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus
from tests.helpers.simulated_gpu.ranks import run_ranks
from trainer.cli import main
from trainer.parallel.environment import RankEnvironment

# The last global batch of an epoch has 3 samples instead of 5, and steps with the poisoned sample are skipped.
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
    """Trains on two ranks, which must succeed, into `tmp_path / "ranks"`."""
    more = ["--multi-gpu", *form, "--backend", "gloo", "--lockstep-every", 2, "--save-dir", tmp_path / "ranks"]
    assert run_ranks([*argv, *more, "--cache-dir", cache_dir / "lockstep"], 2, tmp_path / "meeting") == [0, 0]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@on_simulated_gpus(2)
def test_ranks_match_the_cpu(form, tmp_path, cache_dir):
    run_on_ranks(tmp_path, cache_dir, *PIECES, form=form)
    shared = "2 x cuda:0 (Simulated GPU)"
    devices = shared if "--gpu-ids" in form else "cuda:0 (Simulated GPU), cuda:1 (Simulated GPU)"
    assert f" over gloo: {devices}" in GPUS.printed()
    run(cache_dir, *PIECES, "--device", "cpu", "--save-dir", tmp_path / "cpu")
    assert_same(tmp_path / "ranks", tmp_path / "cpu")


@pytest.mark.parametrize("more", [[], ["--gpu-ids", "1"]])
@on_simulated_gpus(2)
def test_gpus_without_a_rank_are_counted(more, tmp_path, cache_dir):
    alone = RankEnvironment(0, 1, 0, 1, f"tcp://127.0.0.1:{free_port()}")
    argv = [*TINY, "--multi-gpu", "ddp", "--backend", "gloo", *more, "--save-dir", tmp_path / "run"]
    assert main([*map(str, argv), "--cache-dir", str(cache_dir / "lockstep")], True, alone) == 0
    assert ("Unused GPUs on the machine of rank 0: 1. " in GPUS.printed()) is (not more)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ddp", "fsdp"])
@pytest.mark.parametrize("amp", ["bf16", "fp16"])
@on_simulated_gpus(2)
def test_supported_precisions(amp, form, tmp_path, cache_dir):
    run_on_ranks(tmp_path, cache_dir, *TINY, "--amp", amp, form=[form])
    assert f"float32 with {amp} autocast" in GPUS.printed()


@pytest.mark.slow
@on_simulated_gpus(2)
def test_a_nonfinite_step_with_batch_norm_is_skipped(tmp_path, cache_dir):
    more = ["--epochs", 2, "--on-nonfinite", "skip", "--batch-norm", "--batch-size", 4, "--global-batch-size", 8]
    argv = [*TINY, *EXACT, *POISONED, *more]
    run_on_ranks(tmp_path, cache_dir, *argv)
    assert load(tmp_path / "ranks" / "last.pth")["skipped_steps"] == 1


@pytest.mark.slow
@on_simulated_gpus(2)
def test_all_ranks_shrink_their_batch_if_one_is_out_of_memory(tmp_path, cache_dir):
    GPUS.limit_memory(ROOM, device=1)
    argv = [*TINY, *WIDE, "--global-batch-size", 96, "--batch-size", 48, "--eval-batch-size", 8]
    run_on_ranks(tmp_path, cache_dir, *argv)
    assert "48 samples per forward pass do not fit into memory: training with 24" in GPUS.printed()
    tiny(cache_dir, tmp_path / "cpu", *WIDE, "--global-batch-size", 96, "--device", "cpu", "--eval-batch-size", 8)
    assert_same(tmp_path / "ranks", tmp_path / "cpu")


@pytest.mark.slow
@on_simulated_gpus(2, may_wait=True)
def test_one_flipped_bit_on_one_rank_is_detected(tmp_path, cache_dir, monkeypatch):
    """`may_wait` is set because the task itself waits for the GPU to count its forward passes."""
    monkeypatch.setenv("LOCKSTEP_DRIFT", "bit 1 5")
    drifting = ["--task", f"{HELPERS / 'drifting_task.py'}:Drifting", "--batch-size", 4, "--num-threads", 1]
    more = ["--multi-gpu", "ddp", "--backend", "gloo", "--lockstep-every", 2, "--save-dir", tmp_path / "run"]
    argv = [*drifting, *more, "--cache-dir", cache_dir / "lockstep"]
    assert run_ranks(argv, 2, tmp_path / "meeting") == [2, 2]
    printed = GPUS.printed()
    assert "the ranks are no longer in lockstep" in printed and "model.layers.4.weight differs on" in printed
    assert "cuda:0 (Simulated GPU)) from rank 1" in printed


@pytest.mark.slow
@on_simulated_gpus(2, may_wait=True)
def test_a_lost_rank_costs_one_step(tmp_path, cache_dir, monkeypatch):
    """Rank 1 is killed after the update of step 6. Rank 0 saves this step, and both ranks resume from it."""
    argv = ["--task", f"{HELPERS / 'struck_task.py'}:Struck", "--epochs", 2, "--num-train", 48, "--batch-size", 6,
            "--lr", 0.01, "--num-threads", 1, "--deterministic", "--multi-gpu", "ddp", "--backend", "gloo",
            "--dist-timeout-s", 20, "--cache-dir", cache_dir / "lockstep"]  # fmt: skip
    for name, strikes in (("whole", ()), ("struck", ("kill optimizer 1 6",))):
        monkeypatch.setenv("LOCKSTEP_STRIKE_NOTE", str(tmp_path / f"{name}.note"))
        monkeypatch.setenv("LOCKSTEP_STRIKE", next(iter(strikes), "kill nowhere 0 1"))
        for attempt in range(1 + len(strikes)):
            meeting = tmp_path / f"{name} {attempt}"
            statuses = run_ranks([*argv, "--save-dir", tmp_path / name], 2, meeting)
            assert any(statuses) == (attempt < len(strikes)), (name, statuses)
    assert "The state after optimizer step 6 is saved" in GPUS.printed()
    whole, struck = (load(tmp_path / name / "final.pth") for name in ("whole", "struck"))
    for state in (whole, struck):  # the resumed run scored only a part of the second epoch's training samples
        state["scores"] = {name: value for name, value in state["scores"].items() if not name.startswith("train/")}
    assert_same_bits(whole, struck)
