"""Tests that new recordings are read as windows, or refused with one message that names the place of the mistake."""

import io
import pickle

import numpy as np
import pytest

from data.har.recording import NewWindows, doubt_about_units, read_new_windows
from data.har.windows import SIGNALS, WindowFormat
from tests.helpers.malicious import Malicious
from tests.helpers.recordings import joined, save_recording, save_windows, windows_of_a_walk
from trainer.common.errors import UserError
from trainer.loading.order import SampleKeys


@pytest.fixture(scope="module")
def windows(cache_dir):
    return windows_of_a_walk(cache_dir)


def test_the_number_of_windows_at_the_edges(windows, tmp_path):
    rows = joined(windows)
    for num_rows, num_windows in ((128, 1), (191, 1), (192, 2), (255, 2), (256, 3)):
        dataset = read_new_windows(save_recording(tmp_path / "walk.csv", rows[:num_rows]))
        assert len(dataset) == num_windows
        samples = dataset.__getitems__(SampleKeys(np.arange(num_windows), epoch=0))
        np.testing.assert_array_equal(samples["signals"], windows[:num_windows])
        assert dataset.start_s.tolist() == [1.28 * i for i in range(num_windows)]


def test_a_recording_longer_than_a_parsed_block_is_read(tmp_path):
    rows = np.random.default_rng(0).normal(size=(9000, 9)).astype(np.float32)
    dataset = read_new_windows(save_recording(tmp_path / "long.csv", rows))
    assert len(dataset) == (9000 - 128) // 64 + 1
    np.testing.assert_array_equal(dataset.signals[-1], rows[64 * 138 : 64 * 138 + 128].T)


@pytest.mark.parametrize(
    ("sensor", "factor", "says"),
    [
        (0, 9.80665, "values of body_acc_x, body_acc_y, body_acc_z are 9.81 times as large as in training"),
        (2, 9.80665, "as m/s² instead of g"),
        (2, 1 / 9.80665, "as g instead of m/s²"),
        (1, 57.3, "as degrees instead of radians"),
        (1, 1000, "as thousandths instead of whole units"),
        (1, 0.01, ""),  # little motion, as at rest
        (2, -1, ""),  # upside down
    ],
)
def test_numbers_in_other_units_are_reported(sensor, factor, says, windows):
    mean, std = (windows.mean(axis=(0, 2), dtype=np.float64), windows.std(axis=(0, 2), dtype=np.float64))
    changed = windows.copy()
    changed[:, 3 * sensor : 3 * sensor + 3] *= np.float32(factor)
    doubt = doubt_about_units(NewWindows("--predict x", changed), SIGNALS, mean, std)
    assert bool(doubt) == bool(says) and says in doubt


def recorded(path, people, rate=50.0, names=("t", "who"), clock=lambda time: f"{time:.3f}", gap=0):
    """Writes the channel a for each (person, number of rows), with a gap of `gap` rows in the middle of each."""
    rows = []
    for person, num in people:
        for k in range(num):
            rows.append(f"{clock((k + gap * (k >= num // 2)) / rate)},{k % 7},{person}")
    path.write_text("\n".join([f"{names[0]},a,{names[1]}", *rows]))
    return path


ONE = WindowFormat(("a",), ("x", "y"), length=10, hop=5, rate_hz=50)


def test_windows_keep_to_one_person_and_one_side_of_a_gap(tmp_path):
    path = recorded(tmp_path / "new.csv", [("p", 30), ("q", 24)], names=("time", "subject"), gap=500)
    windows = read_new_windows(path, ONE)
    starts = [0, 5, 15, 20, 30, 42, 44 - 2]
    assert windows.signals[:, 0, 0].tolist() == [row % 7 if row < 30 else (row - 30) % 7 for row in starts[:6]]
    text = " ".join(windows.remarks)
    assert "the clock has 2 gaps" in text and "has rows of 2 people" in text


def test_times_follow_the_clock(tmp_path):
    path = recorded(tmp_path / "new.csv", [("p", 40)], rate=48.0, names=("time", "subject"), gap=500)
    windows = read_new_windows(path, ONE)
    assert windows.start_s == pytest.approx([0, 5 / 48, 10 / 48, 520 / 48, 525 / 48, 530 / 48], abs=1e-3)
    assert windows.duration_s == pytest.approx(10 / 48)
    without = read_new_windows(recorded(tmp_path / "new.csv", [("p", 40)], names=("row", "subject")), ONE)
    assert without.start_s.tolist() == [k / 10 for k in range(7)] and without.remarks == ()


@pytest.mark.parametrize("begin", [0, 1_700_000_000])
def test_times_are_kept_per_person_and_trial(begin, tmp_path):
    """The clock restarts with each person and trial, and has gaps."""
    path, names = tmp_path / "new.csv", ("time", "session")
    stretches = [("1", 20), ("2", 20), ("1", 20)]
    recorded(path, stretches, rate=48.0, names=names, clock=lambda time: f"{begin + time:.3f}", gap=500)
    windows = read_new_windows(path, ONE)
    assert windows.start_s == pytest.approx(3 * [0, 510 / 48], abs=2e-3)
    assert windows.cells == {"session": list("112211")}
    header, *lines = path.read_text().splitlines()
    path.write_text(
        "\n".join([f"{header},who", *(f"{line},{'Ann' if i < 40 else 'ann'}" for i, line in enumerate(lines))])
    )
    windows = read_new_windows(path, ONE, "who")
    assert windows.start_s == pytest.approx(3 * [0, 510 / 48], abs=2e-3)
    assert windows.cells == {"who": [*4 * ["Ann"], *2 * ["ann"]], "session": list("112211")}


@pytest.mark.parametrize(
    "clock",
    [
        lambda time: f"{time:.3f}",
        lambda time: f"{1000 * time:.0f}",
        lambda time: f"2024-05-31T23:59:{time:06.3f}",
        lambda time: f"31/05/2024 23:59:{time:06.3f}",
        lambda time: f"5/6/2024 11:59:{time:06.3f} pm",
        lambda time: f"18:30:{time:06.3f}",
    ],
)
def test_another_rate_according_to_the_clock_is_refused(clock, tmp_path):
    path = recorded(tmp_path / "new.csv", [("p", 100)], rate=25.0, names=("time", "subject"), clock=clock)
    with pytest.raises(UserError, match=r"^--predict .*the clock \(time\) shows 25 rows per second, but .* at 50"):
        read_new_windows(path, ONE)
    path = recorded(path, [("p", 100)], names=("time", "subject"), clock=clock)
    assert len(read_new_windows(path, ONE)) == 19


def test_unordered_rows_are_reported(tmp_path):
    path = recorded(tmp_path / "new.csv", [("p", 40)], names=("time", "subject"))
    header, *lines = path.read_text().splitlines()
    for swapped, said in ((lines, []), ([*lines[:6], *lines[8:5:-1], *lines[9:]], ["backwards 2 times"])):
        path.write_text("\n".join([header, *swapped]))
        remarks = read_new_windows(path, ONE).remarks
        assert [part for part in said if part in remarks[0]] == said and len(remarks) == len(said)


def test_labels_are_ignored_and_an_unreadable_clock_is_reported(tmp_path):
    path = recorded(
        tmp_path / "new.csv", [("sit", 20), ("walk", 20)], names=("time", "activity"), clock=lambda _: "noon"
    )
    windows = read_new_windows(path, ONE)
    assert len(windows) == 7
    assert "the label column is ignored" in windows.remarks[0]
    assert "the column time has the name of a clock, but its value 'noon' is not a time" in windows.remarks[1]


# Refused files


def refuse_file(path, message):
    with pytest.raises(UserError) as refused:
        read_new_windows(path)
    text = str(refused.value)
    assert text.startswith(f"--predict {path}") and message in text and len(text.splitlines()) == 1, text


@pytest.mark.parametrize(
    ("line", "column", "field", "message"),
    [
        (2, 1, "oops", "line 2, column 1 (body_acc_x): 'oops' is not a number; repair the file"),
        (130, 9, "", "line 130, column 9 (total_acc_z): '' is not a number"),
        (5, 4, "nan", "line 5, column 4 (body_gyro_x): 'nan' is not a finite number"),
        (5, 4, "-inf", "line 5, column 4 (body_gyro_x): '-inf' is not a finite number"),
        (7, 7, "1e39", "line 7, column 7 (total_acc_x): '1e39' is not a finite number"),
        (7, 7, "1e30", "line 7, column 7 (total_acc_x): '1e30' is not a finite number below 1e+15"),
        (7, 7, "1,5", "line 7: has 10 columns, but there are 9 column names"),
        (7, 7, '"1', "line 7: a quotation mark opens but never closes"),
        (1, 2, "acc_y", "line 1: lacks body_acc_y; give all nine channels"),
        (1, 2, "body_acc_x", "line 1: lacks body_acc_y"),
        (1, 9, "total_acc_z,total_acc_z", "line 1: has several columns named total_acc_z"),
    ],
)
def test_an_error_in_a_recording_is_named(line, column, field, message, windows, tmp_path):
    path = save_recording(tmp_path / "walk.csv", joined(windows)[:130])
    lines = [text.split(",") for text in path.read_text().splitlines()]
    lines[line - 1][column - 1] = field
    path.write_text("".join(",".join(fields) + "\n" for fields in lines))
    refuse_file(path, message)


def test_an_error_far_down_the_file_is_named_by_its_line(tmp_path):
    """The error lies below the first block that is parsed, and below a blank line."""
    path = save_recording(tmp_path / "walk.csv", np.zeros((6000, 9)))
    lines = path.read_text().splitlines()
    lines[5000] = lines[5000].replace("0", "?", 1)
    lines.insert(10, "")
    path.write_text("\n".join(lines))
    refuse_file(path, "line 5002, column 1 (body_acc_x): '?' is not a number")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; give a CSV whose first line names the signals body_acc_x, "),
        (b"\n\n", "is empty"),
        (
            b"1;2;3\n4;5;6\n",
            "line 1: has none of the nine channels; give a CSV with the line of column names body_acc_x",
        ),
        (",".join(SIGNALS).encode(), "column names, but a window has 128 rows (2.56 s at 50 Hz)"),
        (b"\x93NUMPY\x01\x00", "is a NumPy array, which cannot be read directly"),
        (b"\x00\x01\x02" * 100, "line 1"),
        (b"x" * 200_000, "line 1"),
    ],
)
def test_files_without_a_recording_are_refused(content, message, tmp_path):
    path = tmp_path / "walk.csv"
    path.write_bytes(content)
    refuse_file(path, message)


def test_a_recording_shorter_than_a_window_is_refused(windows, tmp_path):
    path = save_recording(tmp_path / "walk.csv", joined(windows)[:127])
    refuse_file(path, "has 127 rows below its line of column")


def test_arrays_without_windows_are_refused(windows, tmp_path):
    path = tmp_path / "walk.npy"
    wrong = {
        "has shape (14, 128, 9); give windows of shape (N, 9, 128)": windows.swapaxes(1, 2),
        "has shape (9, 128); give windows": windows[0],
        "has shape (14, 9, 64); give windows": windows[..., :64],
        "contains no windows": windows[:0],
        "has the data type complex64": windows.astype(np.complex64),
        "has the data type <U3": np.full((1, 9, 128), "1.0"),
        "has the data type bool": np.ones((1, 9, 128), bool),
    }
    for message, array in wrong.items():
        refuse_file(save_windows(path, array), message)
    for value in (np.nan, np.inf, 1e39):
        array = windows.astype(np.float64)
        array[3, 4, 77] = value
        number = f"window 3, signal body_gyro_y, sample 77 (all counted from 0): {value} is not a finite number"
        refuse_file(save_windows(path, array), number)


def test_files_without_an_array_are_refused(windows, tmp_path):
    path, created = tmp_path / "walk.npy", tmp_path / "created"
    whole = save_windows(path, windows).read_bytes()
    np.savez(tmp_path / "archive.npz", windows)
    array = np.empty((1, 9, 128), object)
    array.fill(Malicious(created))
    pickled = io.BytesIO()
    np.save(pickled, array, allow_pickle=True)
    for content, message in {
        b"": "is empty",
        whole[:5000]: "is damaged (",
        whole[:50]: "is damaged (",
        b"PK\x03\x04 cut off": "is damaged (",
        whole[:60] + b"((" + whole[62:]: "is damaged (",  # opens parentheses in the header, a Python literal
        b"plain text": "contains Python objects or is not a .npy file; no code in the file was run",
        pickle.dumps(Malicious(created)): "contains Python objects",
        pickled.getvalue(): "contains Python objects",
        (tmp_path / "archive.npz").read_bytes(): "contains several arrays; give one array of shape (N, 9, 128)",
    }.items():
        path.write_bytes(content)
        refuse_file(path, message)
    assert not created.exists()
