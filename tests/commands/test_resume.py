"""A run resumes by its command, with other flags, or from a file of another run; a refusal changes nothing."""

import json
import os
import re

import numpy as np
import pytest
import torch

from tasks import TASKS
from tests.conftest import (
    REFUSAL,
    ROOT,
    STEPS_PER_EPOCH,
    TINY,
    WEIGHTED,
    assert_same_bits,
    contents,
    largest_difference,
    load,
    read_metrics,
)
from tests.helpers.weighted_task import Weighted
from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.format import RUN_ID
from trainer.commands.build import build_task
from trainer.commands.parse import parse
from trainer.registry import is_same_task

# --- the same command again --------------------------------------------------------------------------------------


def test_a_finished_run_is_reported_and_not_changed(train, tmp_path):
    """Only train.log records the new start, and missing links are restored."""
    train(tmp_path)
    before = contents(tmp_path, ("lock", "train.log"))
    out = train(tmp_path)
    assert "This run is finished" in out
    assert "raise --epochs" in out
    assert contents(tmp_path, ("lock", "train.log")) == before
    links = [tmp_path / f"{name}.pth" for name in ("last", "best", "final")]
    for link in links:
        link.unlink()
    train(tmp_path)
    assert all(link.samefile(tmp_path / "checkpoint_1.pth") for link in links)


def test_numbers_of_numpy_do_not_spoil_checkpoints(train, tmp_path, monkeypatch):
    """A checkpoint with a NumPy number could not be loaded."""

    class Numpys(Weighted):
        def describe_data(self):
            return {"size": np.float64(3), "classes": np.int64(3)}

        def param_groups(self, objective, phase):
            return [group | {"lr_scale": np.power(0.9, 1)} for group in super().param_groups(objective, phase)]

        def lr_factor(self, step, total):
            return np.cos(step / total)

        def summarise(self, sums):
            return {name: np.float64(value) for name, value in super().summarise(sums).items()}

    monkeypatch.setitem(TASKS, "numpys", Numpys)
    train(tmp_path, "--task", "numpys")
    out = train(tmp_path, "--task", "numpys", "--epochs", 2)
    assert f"Resuming after optimizer step {STEPS_PER_EPOCH}" in out
    assert load(tmp_path / "final.pth")["step"] == 2 * STEPS_PER_EPOCH


def test_more_epochs_resume_the_run_and_changed_flags_are_listed(train, tmp_path):
    train(tmp_path)
    out = train(tmp_path, "--epochs", 3, "--lr", 0.02, "--dropout", 0.1)
    assert f"Resuming after optimizer step {STEPS_PER_EPOCH}: epoch 2, 0 of 24 samples." in out
    changes = [line for line in out.splitlines() if line.startswith("Changed since the checkpoint: ")]
    assert {line.split(": ")[1] for line in changes} == {"--epochs 1 -> 3", "--lr 0.01 -> 0.02", "--dropout 0.0 -> 0.1"}
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["epochs"], results["step"]) == (3, 3 * STEPS_PER_EPOCH)
    assert [row["epoch"] for row in read_metrics(tmp_path, "epoch")] == [1, 2, 3]


def test_a_resumed_epoch_keeps_its_samples(train, cli, refused, tmp_path):
    """The samples that --drop-last skips depend on the batch size, which may change only between epochs."""
    tiny = [*TINY[:2], *TINY[4:], "--num-train", 20, "--drop-last", "--save-dir", tmp_path]
    assert cli(*tiny, "--max-steps", 1)[0] == 0
    before = contents(tmp_path, REFUSAL)
    epochs = "an epoch has [20] samples, but the checkpoint's unfinished epoch has [16]; "
    with_batches = "with --drop-last, a global batch of 5 samples drops other samples than one of 8; use --global-"
    refused([epochs + with_batches], *tiny, "--max-steps", 4, "--batch-size", 5)
    refused([f"{epochs}undo the change to --drop-last (was True)"], *tiny, "--max-steps", 4, "--drop-last=false")
    assert contents(tmp_path, REFUSAL) == before
    assert cli(*tiny, "--max-steps", 2)[0] == 0
    out = cli(*tiny, "--max-steps", 4, "--batch-size", 5)[1]
    assert "The training data changed: [16] -> [20] samples." in out


def test_samples_repeated_after_a_batch_size_change_are_reported(cli, tmp_path):
    file = f"{ROOT / 'tests' / 'helpers' / 'refreshing_task.py'}:Bucketed"
    argv = ["--task", file, *TINY[4:6], *TINY[8:], "--save-dir", tmp_path]
    assert cli(*argv, "--batch-size", 8, "--max-steps", 2)[0] == 0
    consumed = load(tmp_path / "last.pth")["position"]["samples"]
    task = build_task(parse(list(map(str, argv)), several_devices=False)[0])
    done, others = (set(np.concatenate(task.order("train", 0, size))[:consumed]) for size in (8, 5))
    told = f"order('train') depends on the batch size, so {len(done - others)} samples of this epoch are used twice"
    assert done - others and told in cli(*argv, "--batch-size", 5, "--max-steps", 3)[1]
    assert "used twice" not in cli(*argv, "--batch-size", 5, "--max-steps", 4)[1]


def test_a_checkpoint_of_other_optimizers_of_a_phase_is_refused(cli, refused, tmp_path):
    """The embedding changes from dense to sparse, so another optimizer trains it."""
    file = ROOT / "tests" / "helpers" / "token_task.py"
    argv = ["--save-dir", tmp_path, "--weight-decay", 0, "--task"]
    assert cli(*argv, f"{file}:Tokens", "--epochs", 1)[0] == 0
    state = load(tmp_path / "last.pth") | {"task": f"{file}:Sparse"}
    torch.save(state, tmp_path / "other.pth")
    refused(
        ["the optimizers of phase 'train' are AdamW, SparseAdam, but the checkpoint was trained with AdamW"],
        "--save-dir", tmp_path / "other", "--resume-from", tmp_path / "other.pth", "--task", f"{file}:Sparse",
    )  # fmt: skip


def test_fresh_moves_the_old_run_aside(train, tmp_path):
    train(tmp_path)
    before = contents(tmp_path)
    for number in (1, 2):
        out = train(tmp_path, "--fresh")
        assert f"moved to {tmp_path / f'previous-{number}'}" in out
        assert "Resuming" not in out
        assert load(tmp_path / f"previous-{number}" / "final.pth")["step"] == STEPS_PER_EPOCH
    assert contents(tmp_path / "previous-1") == before


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("har", "har", True),
        ("har", "seqrec", False),
        ("tasks/mine.py:Mine", "/home/me/tasks/mine.py:Mine", True),
        ("./mine.py:Mine", "../old/mine.py:Mine", True),
        ("mine.py:Mine", "yours.py:Mine", False),
        ("mine.py:Mine", "mine.py:Other", False),
        ("har", "har.py:har", False),
    ],
)
def test_a_task_is_identified_by_class_and_file_name(one, other, same):
    assert is_same_task(one, other) is is_same_task(other, one) is same


def test_a_run_is_resumed_and_scored_with_any_spelling_of_its_task(train, cli, tmp_path):
    train(tmp_path)
    respelled = ["--task", os.path.relpath(WEIGHTED)]
    out = train(tmp_path, "--epochs", 2, *respelled)
    assert f"Resuming after optimizer step {STEPS_PER_EPOCH}:" in out
    assert [line for line in out.splitlines() if "Changed" in line] == ["Changed since the checkpoint: --epochs 1 -> 2"]
    assert "This run is finished" in train(tmp_path, "--epochs", 2)
    assert train(tmp_path, "--eval-only") == train(tmp_path, "--eval-only", *respelled)


def test_a_finished_run_says_how_to_train_longer(train, tmp_path):
    early = ["--lr", 1e-12, "--early-stopping-patience"]
    train(tmp_path, *early, 1, "--epochs", 4)
    for epochs in (4, 5):
        assert "To continue training, raise --early-stopping-patience; " in train(
            tmp_path, *early, 1, "--epochs", epochs
        )
    assert "Resuming" in train(tmp_path, *early, 2, "--epochs", 3)
    assert "To continue training, raise --epochs and --early-stopping-patience; " in train(
        tmp_path, *early, 2, "--epochs", 3
    )
    assert "Resuming" in train(tmp_path, *early, 3, "--epochs", 4)


def test_several_runs_are_finished_with_any_spelling_of_their_task(train, tmp_path):
    train(tmp_path, "--seeds", 2)
    out = train(tmp_path, "--seeds", 2, "--task", os.path.relpath(WEIGHTED))
    assert "finished already: 2" in out and "instead of" not in out


# --- from another file -------------------------------------------------------------------------------------------


def test_init_from_takes_weights_and_nothing_else(train, tmp_path):
    train(tmp_path / "source", "--epochs", 3)
    source = tmp_path / "source" / "final.pth"
    out = train(tmp_path / "fresh")
    assert "Starting with" not in out
    out = train(tmp_path / "new", "--init-from", source)
    assert f"Starting with the weights of {source}." in out
    assert load(tmp_path / "new" / "final.pth")["step"] == STEPS_PER_EPOCH
    (fresh,), (new,) = (read_metrics(tmp_path / name, "epoch") for name in ("fresh", "new"))
    assert new["train/loss"] < fresh["train/loss"] - 0.01
    train(tmp_path / "still", "--init-from", source, "--lr", 1e-12)
    assert largest_difference(load(source), load(tmp_path / "still" / "final.pth")) < 1e-6


def test_init_from_has_no_effect_on_a_run_that_has_started(train, tmp_path):
    first, other, run = (tmp_path / name for name in ("first", "other", "run"))
    for folder, seed in ((first, 1), (other, 2)):
        train(folder, "--seed", seed)
    train(run, "--init-from", first / "last.pth")
    assert "no effect" not in train(run, "--init-from", first / "last.pth", "--epochs", 2)
    out = train(run, "--init-from", other / "last.pth", "--epochs", 3)
    assert f"--init-from {other / 'last.pth'} has no effect, because the run has already started" in out
    recorded = json.loads((run / "config.json").read_text())["config"]["--init-from"]
    assert recorded == str(load(run / "last.pth")["config"]["--init-from"]) == str(first / "last.pth")


def test_a_changed_global_batch_is_reported(train, tmp_path):
    train(tmp_path)
    out = train(tmp_path, "--epochs", 2, "--grad-accum-steps", 2)
    assert "The global batch changes from 8 to 16 samples." in out


def test_init_from_may_name_weights_of_the_run_that_fresh_moves_aside(train, tmp_path):
    train(tmp_path)
    old = load(tmp_path / "best.pth")
    train(tmp_path, "--fresh", "--init-from", tmp_path / "best.pth", "--lr", 1e-12)
    assert largest_difference(old, load(tmp_path / "final.pth")) < 1e-6


def test_a_run_begun_with_resume_from_resumes_from_its_own_newest_checkpoint(train, tmp_path):
    """The run begins at epoch 1 of another run, and then loses its last checkpoint and its results."""
    train(tmp_path / "source", "--epochs", 3)
    source = tmp_path / "source" / "checkpoint_1.pth"
    args = ["--epochs", 3, "--resume-from", source]
    new = tmp_path / "new"
    assert f"Resuming after optimizer step {STEPS_PER_EPOCH}:" in train(new, *args)
    expected = load(tmp_path / "source" / "final.pth")["model"]
    assert_same_bits(expected, load(new / "final.pth")["model"])
    assert "This run is finished" in train(new, *args)
    for name in ("checkpoint_3.pth", "best.pth", "last.pth", "final.pth", "results.json"):
        (new / name).unlink()
    assert f"Resuming after optimizer step {2 * STEPS_PER_EPOCH}:" in train(new, *args)
    assert_same_bits(expected, load(new / "final.pth")["model"])


def test_resume_from_applies_once_across_restarts(train, tmp_path, monkeypatch):
    """Later starts omit the flag, delete old checkpoints, and name the same file by another path."""
    train(tmp_path / "source", "--epochs", 1)
    new, source = tmp_path / "new", tmp_path / "source" / "final.pth"
    train(new, "--epochs", 2, "--resume-from", source, "--keep-checkpoints", 1)
    train(new, "--epochs", 4, "--keep-checkpoints", 1)
    monkeypatch.chdir(tmp_path)
    out = train(new, "--epochs", 5, "--resume-from", "source/final.pth", "--keep-checkpoints", 1)
    assert f"Resuming after optimizer step {4 * STEPS_PER_EPOCH}:" in out


def test_a_run_may_go_back_twice_to_one_checkpoint(train, tmp_path):
    back, keep = ["--resume-from", tmp_path / "checkpoint_1.pth"], ["--keep-checkpoints", 0]
    train(tmp_path, "--epochs", 2, *keep)
    train(tmp_path, "--epochs", 2, *back, *keep)
    train(tmp_path, "--epochs", 3, *keep)
    assert f"Resuming after optimizer step {STEPS_PER_EPOCH}:" in train(tmp_path, "--epochs", 4, *back, *keep)


@pytest.mark.parametrize("source", ["checkpoint_1.pth", "final.pth"])
def test_resume_from_replaces_another_run(source, train, tmp_path):
    """The replaced run has checkpoints of the same steps, and results, which are ignored."""
    train(tmp_path / "first", "--epochs", 3)
    train(tmp_path / "second", "--epochs", 3, "--seed", 1)
    out = train(tmp_path / "second", "--epochs", 3, "--resume-from", tmp_path / "first" / source)
    assert "This run is finished" not in out
    for name in ("best", "last", "final"):
        first, second = (load(tmp_path / folder / f"{name}.pth")["model"] for folder in ("first", "second"))
        assert_same_bits(first, second)
    first, second = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("first", "second"))
    assert (first["metrics"], first["best"]) == (second["metrics"], second["best"])


def test_resume_from_an_older_checkpoint_goes_back(train, tmp_path):
    """Later checkpoints stay on disk under their names, and the run ends with the same weights."""
    train(tmp_path, "--epochs", 3)
    before = load(tmp_path / "final.pth")
    out = train(tmp_path, "--epochs", 3, "--resume-from", tmp_path / "checkpoint_2.pth")
    assert f"Resuming after optimizer step {2 * STEPS_PER_EPOCH}:" in out
    assert (tmp_path / "checkpoint_3_again2.pth").exists()
    assert (tmp_path / "final.pth").samefile(tmp_path / "checkpoint_3_again2.pth")
    assert_same_bits(before["model"], load(tmp_path / "final.pth")["model"])
    assert [row["epoch"] for row in read_metrics(tmp_path, "epoch")] == [1, 2, 3]


def test_resume_from_a_finished_run_writes_its_results(train, tmp_path):
    train(tmp_path / "source")
    train(tmp_path / "new", "--resume-from", tmp_path / "source" / "final.pth")
    old, new = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("source", "new"))
    assert new["metrics"] == old["metrics"]


# --- refused checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--width", 8, "--epochs", 2], "--width"),
        (["--width", 8, "--eval-only"], "--width"),
        (["--task", f"{ROOT}/examples/own_task.py:Spirals"], f"Spirals: the checkpoint is from --task {WEIGHTED}"),
        (["--epochs", 2, "--optimizer", "sgd"], "--optimizer sgd: the checkpoint was trained with adamw; use"),
    ],
)
def test_a_checkpoint_of_another_model_task_or_optimizer_is_refused(more, message, train, refused, tmp_path):
    train(tmp_path)
    before = contents(tmp_path, REFUSAL)
    refused([message], *(TINY if "--task" not in more else ()), *more, "--save-dir", tmp_path)
    assert contents(tmp_path, REFUSAL) == before


def test_init_from_a_model_of_another_shape_is_refused(train, refused, tmp_path):
    train(tmp_path / "source")
    source = tmp_path / "source" / "final.pth"
    refused(
        [f"--init-from {source} does not fit the model"],
        *TINY, "--save-dir", tmp_path / "new", "--width", 8, "--init-from", source,
    )  # fmt: skip
    assert not contents(tmp_path / "new")


def test_fresh_with_a_bad_file_keeps_the_existing_run(train, refused, tmp_path):
    """`--fresh` moves the old run aside only for a command that can start."""
    train(tmp_path)
    before = contents(tmp_path, REFUSAL)
    refused(["--init-from main.py: "], *TINY, "--save-dir", tmp_path, "--fresh", "--init-from", "main.py")
    assert contents(tmp_path, REFUSAL) == before


@pytest.mark.parametrize("exists", [True, False])
def test_evaluating_an_empty_folder_is_refused(exists, refused, tmp_path):
    directory = tmp_path / "run"
    if exists:
        directory.mkdir()
    refused(
        [f"--save-dir {directory}: contains no intact checkpoint to use"], *TINY, "--save-dir", directory, "--eval-only"
    )
    assert directory.exists() == exists
    assert not contents(tmp_path)


# --- the id of a run -------------------------------------------------------------------------------------------------


def id_of(directory):
    """Returns the id of a run, which must be the same in config.json and in the newest checkpoint."""
    recorded = json.loads((directory / "config.json").read_text())["run_id"]
    assert re.fullmatch(RUN_ID, recorded)
    assert load(directory / "last.pth")["run_id"] == recorded
    return recorded


def test_equal_runs_have_different_ids(train, tmp_path):
    for name in "ab":
        train(tmp_path / name)
    assert id_of(tmp_path / "a") != id_of(tmp_path / "b")


@pytest.mark.parametrize(
    "lose",
    [
        lambda directory: None,
        lambda directory: (directory / "config.json").unlink(),
        lambda directory: (directory / "config.json").write_text("{"),
        lambda directory: (directory / "config.json").write_text('{"run_id": ["x"]}'),
    ],
    ids=["nothing", "config.json", "its end", "its type"],
)
def test_a_resumed_run_keeps_its_id(lose, train, tmp_path):
    train(tmp_path)
    before = id_of(tmp_path)
    lose(tmp_path)
    train(tmp_path, "--epochs", 2)
    assert id_of(tmp_path) == before


def test_a_run_without_a_checkpoint_keeps_its_id(cli, train, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError("no")

    with monkeypatch.context() as broken:
        broken.setattr(RunDirectory, "save", fail)
        status, _, _ = cli(*TINY, "--save-dir", tmp_path)
        assert status == 1
    before = json.loads((tmp_path / "config.json").read_text())["run_id"]
    train(tmp_path)
    assert id_of(tmp_path) == before


def test_a_fresh_run_has_a_new_id(train, tmp_path):
    train(tmp_path)
    before = id_of(tmp_path)
    train(tmp_path, "--fresh")
    assert id_of(tmp_path) != before == id_of(tmp_path / "previous-1")


def test_going_back_keeps_the_id_and_another_folder_gets_a_new_id(train, tmp_path):
    train(tmp_path / "run", "--epochs", 2)
    source = tmp_path / "run" / "checkpoint_1.pth"
    train(tmp_path / "elsewhere", "--epochs", 2, "--resume-from", source)
    elsewhere = id_of(tmp_path / "elsewhere")
    assert elsewhere != id_of(tmp_path / "run")
    assert load(tmp_path / "elsewhere" / "best.pth")["run_id"] == elsewhere
    train(tmp_path / "elsewhere", "--epochs", 3, "--resume-from", source)
    assert id_of(tmp_path / "elsewhere") == elsewhere
    before = id_of(tmp_path / "run")
    train(tmp_path / "run", "--epochs", 2, "--resume-from", source)
    assert id_of(tmp_path / "run") == before
