"""Tests pictures in TensorBoard: what they show, when they are drawn, and that they do not change training."""

import io
import json
import shutil
import time

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

from tasks import TASKS
from tests.conftest import WEIGHTED, assert_same_bits, cut_back, load
from tests.helpers.recording_logger import logged_run
from tests.helpers.weighted_task import Sequences, Weighted
from trainer.cli import main
from trainer.commands.build import assemble_run, build_task
from trainer.commands.parse import parse
from trainer.logs.run_log import RunLog, SilentLog
from trainer.loop.evaluate import log_pictures
from trainer.parallel.strategy import SingleDevice

CPU = torch.device("cpu")
STEPS_PER_EPOCH = 4  # for 101 sequences


class Showing(Weighted):
    """Task with pictures, which records what it draws and draws random numbers."""

    def pictures(self, sums):
        value = min(255, int(sums["hits"]))
        return {"hits": np.full((2, 3, 3), value, np.uint8)}

    def example_pictures(self, objective, batch):
        torch.rand(7)
        self.seen = {
            "index": batch["index"].tolist(),
            "is_training": objective.training,
            "has_gradients": torch.is_grad_enabled(),
            "weights": [p.clone() for p in objective.parameters()],
            "dtype": batch["features"].dtype,
            "logits": objective.model(batch["features"]).dtype,
        }
        return {"examples": np.zeros((4, 4, 3), np.uint8)}


class SlowData(Weighted):
    """Task whose batches each take 50 ms to gather."""

    def splits(self):
        return super().splits() | {"train": SlowSequences(self.config.num_train, 100, True)}


class SlowSequences(Sequences):
    def __getitems__(self, keys):
        time.sleep(0.05)
        return super().__getitems__(keys)


@pytest.fixture
def showing(monkeypatch):
    monkeypatch.setitem(TASKS, "showing", Showing)
    monkeypatch.setitem(TASKS, "slow", SlowData)


def train(directory, *argv):
    assert main(["--device", "cpu", "--num-threads", "1", "--save-dir", str(directory), *argv], False) == 0


def events(directory):
    accumulator = EventAccumulator(str(directory / "logs"), size_guidance={"images": 0, "scalars": 0})
    return accumulator.Reload()


def image_steps(directory):
    """Returns the steps of each picture, in order; files written in the same second are read in any order."""
    found = events(directory)
    return {tag: sorted(event.step for event in found.Images(tag)) for tag in found.Tags()["images"]}


# --- content of pictures -----------------------------------------------------------------------------------------


def test_an_array_is_shown_as_it_is(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    log = RunLog(logged_run(tmp_path))
    log.pictures(3, {"val/noise": array})
    for wrong in (array[..., 0], array.astype(np.float32), array[..., :2]):
        with pytest.raises(TypeError, match="must be"):
            log.pictures(4, {"val/wrong": wrong})
    log.close()
    assert image_steps(tmp_path) == {"val/noise": [3]}
    (shown,) = events(tmp_path).Images("val/noise")
    assert (shown.height, shown.width) == (5, 7)
    assert (np.asarray(Image.open(io.BytesIO(shown.encoded_image_string))) == array).all()


# --- when they are drawn -------------------------------------------------------------------------------------------


def run_with(*argv):
    flags, problems = parse(["--task", "showing", *argv], several_devices=False)
    assert problems == []
    return assemble_run(flags, build_task(flags), SingleDevice(CPU))


class Recorder(SilentLog):
    def pictures(self, step, pictures):
        self.names = list(pictures)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_examples_are_fixed_samples_in_the_weights_and_precision_of_evaluation(showing, dtype):
    run = run_with("--ema-decay", "0.5", "--dtype", dtype, "--num-val", "17")
    run.log = Recorder()
    with torch.no_grad():
        for parameter in run.learner.objective.parameters():
            parameter.add_(1.0)  # as training would change them, but not the average
    trained = [p.clone() for p in run.learner.objective.parameters()]
    with run.learner.ema.applied():
        average = [p.clone() for p in run.learner.objective.parameters()]
    run.learner.net.train()
    state = torch.get_rng_state()
    log_pictures(run, {"val": {"hits": torch.tensor(3.0)}})
    assert torch.equal(torch.get_rng_state(), state)
    assert run.learner.objective.training and all(m.training for m in run.learner.objective.modules())
    assert all(map(torch.equal, run.learner.objective.parameters(), trained))
    seen = run.task.seen
    assert all(map(torch.equal, seen["weights"], average))
    assert not seen["is_training"] and not seen["has_gradients"]
    assert seen["index"] == [0, 3, 6, 9, 12, 16]
    assert seen["dtype"] == seen["logits"] == getattr(torch, dtype)
    assert run.log.names == ["val/hits", "val/examples"]
    log_pictures(run, {"test": {"hits": torch.tensor(3.0)}})
    assert run.task.seen["index"] == [0, 1]  # there are fewer samples than pictures


def test_examples_use_autocast_if_evaluation_does(showing):
    run = run_with("--amp", "bf16")
    log_pictures(run, {"val": {"hits": torch.tensor(3.0)}})
    assert run.task.seen["logits"] == torch.bfloat16


def test_pictures_of_validations_do_not_change_training(showing, tmp_path, signals_restored):
    argv = ["--epochs", "5", "--eval-every", "2", "--dropout", "0.3", "--ema-decay", "0.5"]
    train(tmp_path / "shown", "--task", "showing", *argv)
    train(tmp_path / "plain", "--task", WEIGHTED, *argv)
    shown, plain = (load(tmp_path / name / "final.pth") for name in ("shown", "plain"))
    assert_same_bits(shown, plain | {"task": "showing"})
    validated = [STEPS_PER_EPOCH * epochs for epochs in (2, 4, 5)]
    assert image_steps(tmp_path / "shown") == {
        "val/hits": validated,
        "val/examples": validated,
        "test/hits": [STEPS_PER_EPOCH * 5],
        "test/examples": [STEPS_PER_EPOCH * 5],
    }
    assert image_steps(tmp_path / "plain") == {}


def test_a_resumed_run_repeats_no_picture_and_loses_none(showing, tmp_path, signals_restored):
    """One run was killed long after its checkpoint, and another is resumed at its end."""
    argv = ["--task", "showing", "--keep-checkpoints", "0"]
    train(tmp_path / "whole", *argv, "--epochs", "4")
    entries = json.loads((tmp_path / "whole" / "manifest.json").read_text())["checkpoints"]
    cut_back(tmp_path / "whole", entries[:2], tmp_path / "killed")
    shutil.copytree(tmp_path / "whole" / "logs", tmp_path / "killed" / "logs")
    train(tmp_path / "killed", *argv, "--epochs", "4")
    assert image_steps(tmp_path / "killed") == image_steps(tmp_path / "whole")
    train(tmp_path / "whole", *argv, "--epochs", "5")
    assert image_steps(tmp_path / "whole")["val/hits"] == [STEPS_PER_EPOCH * epochs for epochs in (1, 2, 3, 4, 5)]


@pytest.mark.slow
def test_several_processes_log_pictures_once(command, tmp_path):
    argv = ["--epochs", 1, "--task", f"{__file__}:Showing", "--save-dir", tmp_path]
    command("main_multi_gpu.py", "--multi-gpu", "ddp", "--nproc", 2, "--device", "cpu", *argv)
    steps = image_steps(tmp_path)
    assert set(steps) == {"val/hits", "val/examples", "test/hits", "test/examples"}
    assert all(len(at) == 1 for at in steps.values())


# --- numbers in TensorBoard ----------------------------------------------------------------------------------------


def test_only_time_waiting_for_data_is_logged_as_data_wait(showing, tmp_path, signals_restored):
    train(tmp_path, "--task", "slow", "--epochs", "2", "--delay-s", "0.1")
    logged = events(tmp_path).Scalars("train/data_wait_seconds")
    assert [event.step for event in logged] == [STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH]
    for event in logged:
        assert STEPS_PER_EPOCH * 0.05 <= event.value < STEPS_PER_EPOCH * 0.1


def hyperparameters(directory):
    found = events(directory)
    content = found.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    values = parse_session_start_info_plugin_data(content).hparams
    shown = {name: getattr(value, value.WhichOneof("kind")) for name, value in values.items()}
    assert not [tag for tag in found.Tags()["scalars"] if not tag.startswith(("train/", "val/"))]  # no cards of one dot
    return shown, {name: shown.pop(name) for name in list(shown) if name.startswith("best/")}


def test_hyperparameters_are_logged_with_the_final_scores(tmp_path):
    """A run that resumes with another learning rate shows the last learning rate."""
    for step, lr in ((10, 0.25), (20, 0.5)):
        config = {"lr": lr, "hidden-dims": (64, 8), "warmup-epochs": None, "no-augmentation": True, "amp": "off"}
        log = RunLog(logged_run(tmp_path, step, config))
        log.result(step, "with the best weights", {"test/accuracy": lr + 0.25})
        log.close()
        shown, scores = hyperparameters(tmp_path)
        assert shown == {"lr": lr, "hidden-dims": "64 8", "no-augmentation": "True", "amp": "off"}
        assert scores == {"best/test/accuracy": lr + 0.25}


def test_a_finished_run_records_every_flag_and_an_unfinished_run_none(showing, tmp_path, signals_restored):
    train(tmp_path, "--task", "showing", "--epochs", "1", "--width", "8")
    shown, scores = hyperparameters(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["config"]
    assert shown.keys() == {name.lstrip("-") for name, value in config.items() if value is not None}
    assert (shown["width"], shown["task"], shown["epochs"]) == (8, "showing", 1)
    assert scores == {
        f"best/{name}": pytest.approx(value)
        for name, value in json.loads((tmp_path / "results.json").read_text())["metrics"].items()
    }
    RunLog(logged_run(tmp_path, step=3)).close()
    assert not list((tmp_path / "logs").glob("*.hparams"))
