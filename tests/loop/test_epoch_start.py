"""Tasks compute between epochs, choose orders, and receive the progress of the run."""

import json

import numpy as np
import pytest
import torch

FILE = "tests/helpers/refreshing_task.py"
RUN = ["--dtype", "float64", "--epochs", 3, "--num-threads", 1, "--save-every-steps", 3, "--keep-checkpoints", 0]
TWO = ["--multi-gpu", "ddp", "--nproc", 2, "--device", "cpu"]


def final(directory):
    return torch.load(directory / "final.pth", weights_only=True)


def assert_close(one, other):
    torch.testing.assert_close(other["model"], one["model"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("task", "stride"),
    [
        pytest.param("Refreshing", 1, marks=pytest.mark.slow),
        pytest.param("Bucketed", 1, marks=pytest.mark.slow),
        ("Bucketed", 3),
    ],
)
def test_a_run_is_equal_on_two_processes_and_after_any_resume(task, stride, run_here, command, tmp_path):
    argv = ["--task", f"{FILE}:{task}", *RUN, "--global-batch-size", 12]
    run_here(*argv, "--save-dir", tmp_path / "whole")
    expected = final(tmp_path / "whole")
    entries = json.loads((tmp_path / "whole" / "manifest.json").read_text())["checkpoints"]
    for entry in entries[1:9:stride]:
        directory = tmp_path / f"from-{entry['step']}"
        run_here(*argv, "--resume-from", tmp_path / "whole" / entry["file"], "--save-dir", directory)
        assert final(directory)["step"] == expected["step"]
        for name, value in expected["model"].items():
            assert torch.equal(final(directory)["model"][name], value), (entry, name)
    command("main_multi_gpu.py", *argv, *TWO, "--save-dir", tmp_path / "two")
    assert_close(expected, final(tmp_path / "two"))


def test_a_stop_at_the_start_of_an_epoch_does_not_repeat_on_epoch_start(command, tmp_path):
    argv = ["main.py", "--task", f"{FILE}:Stopped", *RUN]
    mark = tmp_path / "mark"
    mark.touch()
    command(*argv, "--save-dir", tmp_path / "whole", LOCKSTEP_MARK=str(mark))
    mark.unlink()
    command(*argv, "--save-dir", tmp_path / "stopped", status=143, LOCKSTEP_MARK=str(mark))
    command(*argv, "--save-dir", tmp_path / "stopped", LOCKSTEP_MARK=str(mark))
    whole, stopped = (final(tmp_path / name)["model"] for name in ("whole", "stopped"))
    assert all(torch.equal(stopped[name], value) for name, value in whole.items())


@pytest.mark.slow
def test_different_weights_on_two_ranks_after_on_epoch_start_are_refused(command, tmp_path):
    argv = ["--task", f"{FILE}:Refreshing", *RUN, "--differs", *TWO, "--save-dir", tmp_path]
    done = command("main_multi_gpu.py", *argv, status=2)
    assert "rank 1 of 2 differs from rank 0: the digest of the model after Refreshing.on_epoch_start is" in done.stderr


@pytest.fixture
def received(run_here, tmp_path, monkeypatch):
    """Trains a task; returns the samples of each batch of each epoch."""

    def train(task, *more):
        (tmp_path / "record").mkdir()
        monkeypatch.setenv("LOCKSTEP_RECORD", str(tmp_path / "record"))
        run_here("--task", f"{FILE}:{task}", *RUN, *more, "--save-dir", tmp_path / "run")
        (record,) = (tmp_path / "record").glob("*.jsonl")
        lines = [json.loads(line) for line in record.read_text().splitlines()]
        return [[line["index"] for line in lines if line["epoch"] == epoch] for epoch in range(3)]

    return train


def test_every_sample_of_an_order_is_trained_on_once(received):
    for batches in received("Bucketed", "--batch-size", 5):
        assert sorted(np.concatenate(batches)) == list(range(101))
        assert all(len(index) <= 5 for index in batches)


def test_short_epochs_use_different_samples(received):
    epochs = [set(np.concatenate(batches)) for batches in received("Part", "--batch-size", 7)]
    assert [len(samples) for samples in epochs] == [40, 40, 40]
    assert all(max(samples) > 40 for samples in epochs)
    assert len(set.union(*epochs)) > 60


def test_drop_last_is_refused_with_a_custom_order(run_here, tmp_path):
    argv = ["--task", f"{FILE}:Bucketed", *RUN, "--batch-size", 5, "--save-dir", tmp_path, "--drop-last"]
    _, err = run_here(*argv, status=2)
    assert "--drop-last: Bucketed.order('train') makes the batches" in err


@pytest.mark.parametrize("more", [[], pytest.param(TWO, marks=pytest.mark.slow)], ids=["one", "two"])
def test_keys_contain_the_progress_of_their_step(more, command, tmp_path):
    """All samples of a step have the same progress, on any number of devices. It is 0 in evaluation."""
    script = "main_multi_gpu.py" if more else "main.py"
    argv = ["--task", f"{FILE}:Annealed", *RUN, "--global-batch-size", 12, *more, "--save-dir", tmp_path]
    command(script, *argv)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    epochs = [record for record in records if record["event"] == "epoch"]
    bounds = [(start, min(start + 12, 101)) for start in range(0, 101, 12)]
    for epoch, record in enumerate(epochs):
        expected = sum((end - start) * (epoch + (start + end) // 2 / 101) / 3 for start, end in bounds)
        assert record["train/progress"] == pytest.approx(expected, rel=1e-12)
        assert record["val/progress"] == 0
