"""Tests `--encoder-path` and `--freeze-encoder`, which put a trained encoder into a new network."""

import numpy as np
import pytest
import torch

from tasks.har import HarFlags, HarTask
from tasks.har_objective import encode, features_of
from tests.conftest import load, read_metrics
from trainer.commands.parse import parse
from trainer.common.errors import UserError
from trainer.loading.order import SampleKeys

SMALL = ("--mode", "first", "--epochs", "1", "--batch-size", "128", "--num-threads", "1")


@pytest.fixture(scope="module")
def trained(command, tmp_path_factory):
    """Returns the checkpoint of a short run."""
    directory = tmp_path_factory.mktemp("encoder") / "run"
    command("main.py", *SMALL, "--hidden-dims", 8, "--save-dir", directory)
    return directory / "best.pth"


def encoder_of(path):
    weights = load(path)["model"]
    return {name: value for name, value in weights.items() if "encoder" in name or name in ("mean", "std")}


def test_the_encoder_is_loaded_with_its_statistics_and_fine_tuned(run_here, trained, tmp_path):
    run_here(*SMALL, "--encoder-path", trained, "--hidden-dims", 16, "--lr", 1e-9, "--save-dir", tmp_path)
    before, after = encoder_of(trained), encoder_of(tmp_path / "last.pth")
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6)
    assert any(not torch.equal(after[name], value) for name, value in before.items())
    assert load(tmp_path / "last.pth")["model"]["network.heads.3.0.weight"].shape[0] == 16


@pytest.mark.parametrize("augmentation", [(), ("--no-augmentation",)])
def test_a_frozen_encoder_stays_unchanged_while_the_head_trains(run_here, trained, tmp_path, augmentation):
    run_here(
        *SMALL, "--encoder-path", trained, "--freeze-encoder", *augmentation, "--hidden-dims", 8, "--ema-decay", 0.9,
        "--log-interval", 10, "--save-dir", tmp_path,
    )  # fmt: skip
    after = load(tmp_path / "last.pth")
    for name, value in encoder_of(trained).items():
        assert torch.equal(after["training_model"][name], value) and torch.equal(after["model"][name], value), name
    losses = [record["train/loss"] for record in read_metrics(tmp_path, "step")]
    assert losses[-1] < losses[0]


def frozen_task(cache_dir, trained, **options):
    return HarTask(
        HarFlags(mode="first", hidden_dims=(8,), encoder_path=trained, freeze_encoder=True, **options), 0, cache_dir
    )


def test_a_frozen_encoder_is_in_eval_mode_in_training(trained, cache_dir):
    objective = frozen_task(cache_dir, trained).build_objective()
    for mode in (True, False, True):
        objective.train(mode)
        network = objective.model.network
        assert not any(module.training for module in network.encoder.modules())
        assert all(head.training is mode for head in network.heads)
    assert not any(p.requires_grad for p in network.encoder.parameters())


def test_cached_features_give_the_same_logits(trained, cache_dir):
    once = frozen_task(cache_dir, trained, no_augmentation=True)
    each_time = HarTask(HarFlags(mode="first", hidden_dims=(8,), no_augmentation=True), 0, cache_dir)
    torch.manual_seed(0)
    objective = once.build_objective().eval()
    once.initialise(objective)
    for split in ("train", "val", "test"):
        keys = SampleKeys(np.array([3, 0, 200]), epoch=0)
        batches = [task.collate(task.splits()[split].__getitems__(keys), keys) for task in (once, each_time)]
        assert "features" in batches[0] and "features" not in batches[1]
        with torch.no_grad():
            losses = [objective(batch)["loss"] for batch in batches]
            logits = [objective.member_logits(batch) for batch in batches]
        torch.testing.assert_close(logits[0], logits[1])
        torch.testing.assert_close(losses[0], losses[1])


def test_features_do_not_depend_on_the_batch(trained, cache_dir, monkeypatch):
    task = frozen_task(cache_dir, trained, no_augmentation=True)
    objective = task.build_objective().eval()
    task.initialise(objective)
    dataset = task._windows["val"]
    whole = encode(objective.model, dataset)
    monkeypatch.setattr("tasks.har_objective.ENCODING_BATCH_SIZE", 77)
    np.testing.assert_allclose(encode(objective.model, dataset), whole, rtol=1e-4, atol=1e-5)
    signals = torch.from_numpy(dataset.__getitems__(SampleKeys(np.arange(5), epoch=0))["signals"])
    np.testing.assert_allclose(features_of(objective.model, signals), whole[:5], rtol=1e-4, atol=1e-5)


def test_resuming_with_another_encoder_file_is_refused(run_here, trained, tmp_path):
    encoder = tmp_path / "encoder.pth"
    encoder.write_bytes(trained.read_bytes())
    argv = [
        *SMALL, "--encoder-path", encoder, "--freeze-encoder", "--no-augmentation", "--hidden-dims", 8,
        "--save-dir", tmp_path / "run",
    ]  # fmt: skip
    run_here(*argv)
    state = load(trained)
    state["model"]["network.encoder.layers.0.weight"] *= 2
    state["model"]["mean"] += 1
    torch.save(state, encoder)
    init = [*argv[:-1], tmp_path / "other", "--init-from", tmp_path / "run" / "best.pth"]
    for changed in ([*argv, "--epochs", 2], [*argv, "--eval-only"], init):
        said = run_here(*changed, status=2).err
        assert "--encoder-path: is not the encoder with which this run started" in said


def test_features_of_lower_precision_are_accepted(trained, cache_dir):
    """TF32 convolutions on a GPU give such features, so an encoder must be recognised by its weights."""
    task = frozen_task(cache_dir, trained, no_augmentation=True)
    objective = task.build_objective().eval()
    task.initialise(objective)
    task.check_weights(objective)
    keys = SampleKeys(np.arange(8), epoch=0)
    batch = task.collate(task.splits()["val"].__getitems__(keys), keys)
    rough = objective(batch | {"features": batch["features"] * 1.01})["loss"]
    torch.testing.assert_close(rough, objective(batch)["loss"], rtol=0.1, atol=0)


def test_other_files_are_refused(trained, tmp_path, cache_dir):
    weights = load(trained)["model"]
    path = tmp_path / "weights.pth"

    def attempt(model, **options):
        torch.save({"model": model}, path)
        task = HarTask(HarFlags(encoder_path=path, **options), 0, cache_dir)
        task.initialise(task.build_objective())

    plain = {name.removeprefix("network."): value for name, value in weights.items()}
    attempt(plain, mode="first")
    attempt({n.removeprefix("encoder."): v for n, v in plain.items() if n.startswith("encoder.")}, mode="first")
    with pytest.raises(UserError, match=r"--encoder-path .*weights.pth: layers.0.weight has shape .* --mode"):
        attempt(weights, mode="early")
    with pytest.raises(UserError, match=r"--encoder-path .*: contains no harnet encoder"):
        attempt({"other": torch.zeros(2)}, mode="first")


def test_incompatible_flags_are_named(tmp_path):
    _, problems = parse(["--freeze-encoder"], several_devices=False)
    assert problems == ["--freeze-encoder: does nothing without --encoder-path; add it, or leave this flag out"]
    missing = tmp_path / "none.pth"
    _, problems = parse(["--model", "tinyhar", "--encoder-path", str(missing)], several_devices=False)
    assert problems == [
        f"--encoder-path {missing}: does not exist; give the checkpoint of a run, such as best.pth",
        "--encoder-path: --model tinyhar does not use it; leave it out, or choose harnet",
    ]
