import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from data.har.windows import CLASSES
from models.har.harnet import HarNet
from models.layers.standardised import Standardised
from tasks.har import HarFlags, HarObjective, HarTask
from tests.conftest import load, read_metrics, results_of
from trainer.commands.build import assemble_run, build_task
from trainer.commands.parse import parse
from trainer.loading.order import SampleKeys
from trainer.parallel.strategy import SingleDevice

UCI_HAR = Path(os.environ.get("LOCKSTEP_DATA", "")) / "uci_har" / "UCI HAR Dataset.zip"
needs_uci_har = pytest.mark.skipif(
    "LOCKSTEP_DATA" not in os.environ or not UCI_HAR.exists(), reason="LOCKSTEP_DATA names no folder with UCI HAR"
)


def macro_f1_one_by_one(labels, predicted):
    """Computes the score class by class."""
    scores = []
    for c in range(len(CLASSES)):
        hits = sum(1 for y, p in zip(labels, predicted, strict=True) if y == c == p)
        precision = hits / max(1, sum(p == c for p in predicted))
        recall = hits / max(1, sum(y == c for y in labels))
        scores.append(2 * precision * recall / (precision + recall) if precision + recall else 0.0)
    return sum(scores) / len(scores)


def test_metrics_equal_their_definitions(cache_dir):
    torch.manual_seed(0)
    objective = HarObjective(Standardised(HarNet(hidden_dims=(8,)), 9), label_smoothing=0.1).eval()
    task = HarTask(HarFlags(), seed=0, cache_dir=cache_dir)
    x, labels = torch.randn(40, 9, 128), torch.randint(5, (40,))  # class 5 never occurs
    batch = {"signals": x, "label": labels, "weight": torch.ones(40), "index": torch.arange(40)}
    with torch.no_grad():
        sums = objective(batch) | {"weight": torch.tensor(40.0)}
        logits = objective.model(x)
    predicted = logits.argmax(1)
    metrics = task.summarise({name: value.double() for name, value in sums.items()})
    assert metrics["accuracy"] == pytest.approx(float((predicted == labels).double().mean()))
    assert metrics["macro_f1"] == pytest.approx(macro_f1_one_by_one(labels.tolist(), predicted.tolist()))
    plain_loss = torch.nn.functional.cross_entropy(logits, labels)  # evaluation does not smooth labels
    assert metrics["loss"] == pytest.approx(float(plain_loss), rel=1e-5)
    matrix = task.details(sums)["confusion_matrix"]
    for true in range(6):
        for guess in range(6):
            assert matrix[true][guess] == int(((labels == true) & (predicted == guess)).sum())


@pytest.fixture(scope="module")
def default_run(command, tmp_path_factory):
    """Runs the default command for two epochs."""
    directory = tmp_path_factory.mktemp("har") / "run"
    done = command("main.py", "--epochs", 2, "--save-dir", directory)
    return directory, done


def test_default_command_learns(default_run):
    directory, _ = default_run
    results = json.loads((directory / "results.json").read_text())
    assert results["metrics"]["test/accuracy"] > 0.7
    assert sum(map(sum, results["confusion_matrix"])) == 1512
    assert set(results) >= {
        "task", "metrics", "best", "num_parameters", "train_seconds", "world_size",
        "global_batch_size", "seed",
    }  # fmt: skip


def test_a_run_directory_has_logs_and_pictures(default_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory, done = default_run
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [r["event"] for r in records if r["event"] != "step"] == ["epoch", "epoch", "result"]
    events = EventAccumulator(str(directory / "logs"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert tags >= {"train/loss", "val/accuracy", "val/macro_f1", "train/learning_rate", "train/grad_norm"}
    table = (directory / "val.log").read_text()
    assert "val/accuracy" in table.splitlines()[0]
    assert "epoch" in done.stdout and "val/macro_f1" in done.stdout
    assert "\r" not in done.stderr  # no progress bar without a terminal


def test_model_entry_loads_in_bare_pytorch(default_run):
    directory, _ = default_run
    model = Standardised(HarNet(), num_channels=9)
    model.load_state_dict(load(directory / "best.pth")["model"])
    assert model(torch.zeros(2, 9, 128)).shape == (2, 6)


def test_eval_only_repeats_the_test_score(default_run, command):
    directory, _ = default_run
    before = sorted(p.name for p in directory.iterdir())
    done = command("main.py", "--epochs", 2, "--save-dir", directory, "--eval-only")
    accuracy = json.loads((directory / "results.json").read_text())["metrics"]["test/accuracy"]
    assert f"test/accuracy {accuracy:.4f}" in done.stdout
    assert sorted(p.name for p in directory.iterdir() if p.name != "scores.jsonl") == before


SMALL = (
    "--mode", "first", "--hidden-dims", 8, "--epochs", 2, "--batch-size", 128, "--num-threads", 1, "--no-augmentation"
)  # fmt: skip


def test_refit_trains_on_all_people_and_scores_the_last_weights(run_here, cache_dir, tmp_path):
    done = run_here(*SMALL, "--refit", "--ema-decay", 0.9, "--save-dir", tmp_path)
    assert "Data: 3528 train, 1512 test samples" in done.out
    assert "Finished, with the last weights: test/loss" in done.out and "val/" not in done.out
    results = results_of(tmp_path)
    assert results["best"] is None and results["scored"] == "test"
    assert 0.5 < results["baselines"]["ridge on statistics"]["test/accuracy"] < 1 and "ridge on statistics" in done.out
    state = load(tmp_path / "final.pth")
    assert state["position"]["epoch"] == 2 and not (tmp_path / "best.pth").exists()
    model = Standardised(HarNet("first", hidden_dims=(8,)), num_channels=9).eval()
    model.load_state_dict(state["model"])  # the moving average
    test = HarTask(HarFlags(), 0, cache_dir).splits()["test"]
    samples = test.__getitems__(SampleKeys(np.arange(len(test)), epoch=0))
    with torch.no_grad():
        predicted = model(torch.from_numpy(samples["signals"])).argmax(1).numpy()
    assert results["metrics"]["test/accuracy"] == pytest.approx((predicted == samples["label"]).mean())
    scored = run_here(*SMALL, "--refit", "--ema-decay", 0.9, "--save-dir", tmp_path, "--eval-only").out
    assert f"test/accuracy {results['metrics']['test/accuracy']:.4f}" in scored


def test_no_test_scores_the_validation_set_with_the_last_weights(run_here, tmp_path):
    argv = [*SMALL, "--save-dir", tmp_path]
    assert "test/" not in run_here(*argv, "--no-test").out
    assert "test/" not in (tmp_path / "metrics.jsonl").read_text()
    results, records = results_of(tmp_path), read_metrics(tmp_path, "epoch")
    assert results["scored"] == "val"
    assert results["metrics"] == {k: v for k, v in records[-1].items() if k.startswith("val/")}
    assert "This run is finished" in run_here(*argv, "--no-test").out
    assert "test/" not in run_here(*argv, "--no-test", "--eval-only").out
    assert "Finished, with the best weights: test/loss" in run_here(*argv).out  # scores without training again
    assert results_of(tmp_path)["step"] == results["step"] and results_of(tmp_path)["scored"] == "test"


def test_patience_needs_a_validation_set(run_here, tmp_path):
    said = run_here("--refit", "--early-stopping-patience", 3, "--save-dir", tmp_path / "run", status=2).err
    assert said.startswith("error: --early-stopping-patience 3: needs a validation set; hold out validation data")


@pytest.mark.parametrize("mode", ["flatten", "average", "first"])
def test_channel_modes_train(mode, cache_dir):
    task = HarTask(HarFlags(mode=mode, hidden_dims=(16,)), seed=0, cache_dir=cache_dir)
    objective = task.build_objective()
    keys = SampleKeys(np.arange(12) * 7, epoch=0)
    batch = task.collate(task.splits()["train"].__getitems__(keys), keys)
    objective(batch)["loss"].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in objective.parameters())


@pytest.mark.parametrize("model", ["tinyhar", "deepconvlstm"])
def test_baselines_train(model, cache_dir):
    arguments = ["--model", model, "--dropout", "0.5", "--cache-dir", str(cache_dir), "--num-threads", "1"]
    flags, problems = parse(arguments, several_devices=False)
    assert problems == []
    run = assemble_run(flags, build_task(flags), SingleDevice(torch.device("cpu")))
    network = run.learner.objective.model.network
    assert type(network).__name__.lower() == model
    assert network.dropout.p == 0.5
    keys = SampleKeys(np.arange(12) * 7, epoch=0)
    (batch,) = run.loaders["train"]([keys])
    sums = run.learner.net(batch, "train")
    sums["loss"].backward()
    assert torch.isfinite(sums["loss"])
    assert network.classifier.weight.grad.abs().sum() > 0


def test_flags_of_one_model_are_refused_with_another():
    _, problems = parse(["--model", "tinyhar", "--hidden-dims", "64"], several_devices=False)
    assert problems == ["--hidden-dims 64: --model tinyhar does not use it; leave it out, or choose harnet"]


def test_bad_data_ends_with_one_message_and_writes_nothing(command, tmp_path):
    broken = tmp_path / "broken.zip"
    broken.write_bytes(b"PK\x03\x04 cut off")
    done = command("main.py", "--data-dir", broken, "--save-dir", tmp_path / "run", status=2)
    assert done.stderr.startswith("error: --data-dir")
    assert "cannot be read or is damaged (File is not a zip file)" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@needs_uci_har
def test_training_on_official_recordings_works(command, tmp_path):
    command("main.py", "--data-dir", UCI_HAR, "--epochs", 1, "--mode", "first", "--save-dir", tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert sum(map(sum, results["confusion_matrix"])) == 2947


@pytest.mark.slow
@needs_uci_har
def test_default_settings_reach_97_percent(command, tmp_path):
    argv = ["--data-dir", UCI_HAR, "--refit", "--seeds", 3, "--save-dir", tmp_path / "runs"]
    command("main.py", *argv, timeout=1800)
    summary = json.loads((tmp_path / "runs" / "summary.json").read_text())
    assert summary["mean"]["test/accuracy"] >= 0.97
    assert summary["ensemble"]["test/accuracy"] >= 0.97


@pytest.mark.parametrize("other", [["--refit"], ["--val-subjects", 1]])
def test_flags_that_choose_validation_subjects_exclude_each_other(other, refused, tmp_path):
    part = f"--num-val-subjects 2 and {' '.join(map(str, other))}: cannot be combined"
    refused([part], *other, "--num-val-subjects", 2, "--save-dir", tmp_path / "run")
