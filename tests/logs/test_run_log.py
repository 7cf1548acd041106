"""The table of a run has aligned columns, and TensorBoard gets its scalars."""

import json
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import TINY
from tests.helpers.recording_logger import logged_run
from trainer.loading.order import Position
from trainer.logs.run_log import RunLog

TRAIN = {"train/loss": 0.5}
BOTH = {"train/loss": 1234567.0, "val/loss": -1.2345e-5, "val/ndcg@10": math.nan, "val/x": 0.25}


@pytest.fixture
def written(tmp_path):
    """Logs epochs and a result; returns the directory."""

    def write(epochs, result=None, headline=()):
        log = RunLog(logged_run(tmp_path), headline)
        for i, metrics in enumerate(epochs):
            log.report(i + 1, Position(i + 1), i + 1.0, metrics)
        if result is not None:
            log.result(len(epochs), "with the best weights", result)
        log.close()
        return tmp_path

    return write


def right_edges(line):
    """Returns where each cell of a right-aligned line ends."""
    return [i + 1 for i in range(len(line)) if line[i] != " " and (i + 1 == len(line) or line[i + 1] == " ")]


def test_every_cell_stands_under_its_header(written):
    """The first epoch and the third have no validation, and the numbers have the longest form."""
    lines = (written([TRAIN, BOTH, TRAIN, BOTH]) / "val.log").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["epoch", "1", "epoch", "2", "3", "4"]
    assert right_edges(lines[0]) == right_edges(lines[1])
    for line in lines[3:]:
        assert right_edges(line) == right_edges(lines[2])
    assert lines[3].split()[1:5] == ["1.2346e+06", "-1.2345e-05", "nan", "0.25"]
    assert lines[4].split()[1:5] == ["0.5", "-", "-", "-"]


def test_without_a_headline_everything_is_shown(written):
    lines = (written([BOTH], {"test/loss": 1.0, "test/x": 0.25}) / "val.log").read_text().splitlines()
    assert lines[0].split()[1:5] == list(BOTH)
    assert lines[-1] == "Finished, with the best weights: test/loss 1.0000, test/x 0.2500"


def test_names_with_an_at_sign_reach_tensorboard(written):
    directory = written([TRAIN, BOTH | {"val/ndcg@10": 0.5}], {"test/ndcg@10": 0.75}, headline=("loss",))
    events = EventAccumulator(str(directory / "logs"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("val/ndcg@10")] == [(2, 0.5)]
    assert "test/ndcg@10" not in events.Tags()["scalars"]  # one number is no curve
    (event,) = events.Tensors("scores/text_summary")
    assert "| test/ndcg@10 | 0.75 |" in event.tensor_proto.string_val[0].decode()
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert records[1]["val/ndcg@10"] == 0.5


def test_events_are_written_at_once_and_a_full_disk_raises_once(tmp_path, capfd):
    log = RunLog(logged_run(tmp_path))
    log.report(1, Position(1), 1.0, BOTH)
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    assert [e.step for e in events.Scalars("val/x")] == [1]
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(OSError, match="No space left"):
        log._directory._board._file = full
        log.report(2, Position(2), 2.0, BOTH)
    assert capfd.readouterr().err == ""


def test_only_a_segment_with_steps_has_a_speed(tmp_path):
    """A run that resumes after the last step of an epoch reports this epoch without a step."""
    log = RunLog(logged_run(tmp_path))
    for number, samples in enumerate((0, 8), start=1):
        log.start_segment(Position(number - 1), None, 8, 8 - samples)
        log.advance(samples)
        log.end_training()
        log.report(number, Position(number), float(number), TRAIN)
    log.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert ["samples_per_second" in record for record in records] == [False, True]
    assert records[1]["samples_per_second"] > 0


def test_an_evaluation_within_an_epoch_has_its_own_row_and_record(tmp_path):
    log = RunLog(logged_run(tmp_path))
    log.report(5, Position(1, 0, 8), 1.25, TRAIN)
    log.report(8, Position(2), 2.0, TRAIN)
    log.close()
    assert [line.split()[0] for line in (tmp_path / "val.log").read_text().splitlines()] == ["epoch", "1.250", "2"]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    places = [(r["event"], r["step"], r["epoch"], r["samples"], r["train/loss"]) for r in records]
    assert places == [("evaluation", 5, 1, 8, 0.5), ("epoch", 8, 2, 0, 0.5)]


@pytest.mark.parametrize("name", ["train.log", "val.log"])
def test_a_full_disk_while_logging_is_refused(name, refused, tmp_path):
    (tmp_path / name).symlink_to("/dev/full")
    refused([f"--save-dir {tmp_path}: "], *TINY, "--save-dir", tmp_path)
    assert not list(tmp_path.glob("*.tmp"))
