"""`--predict`: a finished run labels new data, and refuses what it cannot label."""

import csv
import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from data.har.recording import doubts_about_units, read_new_windows
from data.har.synthetic import load_synthetic_har
from data.har.windows import CLASSES, SIGNALS
from models.har.harnet import HarNet
from models.layers.standardised import Standardised
from tests.conftest import RANK_VARIABLES, ROOT, load
from tests.data.har.test_har_data import write_layout
from trainer.cli import main
from trainer.commands.flags import parse
from trainer.commands.predict import output_file
from trainer.config import flag_values, group_from_values
from trainer.loading.errors import BadInput
from trainer.loading.order import SampleKeys
from trainer.parallel.signals import STOP_SIGNALS

SMALL = (
    "--mode", "first", "--hidden-dims", 8, "--epochs", 1, "--batch-size", 128, "--num-threads", 1, "--device", "cpu"
)  # fmt: skip
COLUMNS = ["window", "start_s", "end_s", "activity", "confidence", *CLASSES]
ROUNDING = 0.5e-4 + 1e-6


@pytest.fixture(scope="module")
def trained(cache_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("predict") / "run"
    argv = [*SMALL, "--no-augmentation", "--cache-dir", cache_dir / "lockstep", "--save-dir", directory]
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    assert main([*map(str, argv)], several_devices=False) == 0
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return directory


@pytest.fixture(scope="module")
def windows(cache_dir):
    """Of one walk of one person, who was not trained on: (14, 9, 128); each begins in the middle of the one before."""
    recordings = load_synthetic_har(cache_dir / "lockstep")
    return recordings.signals[recordings.is_test][:14]


@pytest.fixture
def cli(capsys, monkeypatch, signals_restored):
    """Runs a command line in this process: (standard output, lines of standard error)."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))  # a task's file adds its folder

    def run(*args, status=0, several_devices=False):
        capsys.readouterr()
        found = main([*map(str, args), "--device", "cpu"], several_devices)
        out, err = capsys.readouterr()
        assert found == status, err
        return out, err.splitlines()

    return run


@pytest.fixture
def label(cli, trained):
    """The table of a file as rows; nothing but the table is on standard output."""

    def run(path, *more, save_dir=trained):
        out, err = cli("--predict", path, "--save-dir", save_dir, "--num-threads", 1, *more)
        assert err == []
        return read_table(out)

    return run


def read_table(text):
    rows = list(csv.DictReader(io.StringIO(text)))
    assert list(rows[0]) == COLUMNS
    return rows


def save_windows(path, windows):
    np.save(path, windows)
    return path


def joined(windows):
    """The recording that the windows were cut from: (rows, 9)."""
    return np.concatenate([windows[0], *(window[:, 64:] for window in windows[1:])], axis=1).T


def save_recording(path, rows, header=SIGNALS):
    np.savetxt(path, rows, delimiter=",", header=",".join(header), comments="", fmt="%.9g")
    return path


def probabilities(rows):
    return np.array([[float(row[name]) for name in CLASSES] for row in rows])


def expected_probabilities(checkpoint, windows, dtype=torch.float32):
    """Bare PyTorch, from the file."""
    model = Standardised(HarNet("first", hidden_dims=(8,)), num_channels=9).to(dtype).eval()
    model.load_state_dict(load(checkpoint)["model"])
    with torch.no_grad():
        return model(torch.from_numpy(windows).to(dtype)).softmax(dim=1).numpy()


# --- what the table says -----------------------------------------------------------------------------------------


def test_table_is_what_the_model_says(trained, windows, label, tmp_path):
    expected = expected_probabilities(trained / "best.pth", windows)
    rows = label(save_recording(tmp_path / "walk.csv", joined(windows)))
    assert [row["window"] for row in rows] == [str(i) for i in range(14)]
    assert [row["start_s"] for row in rows[:3]] == ["0.00", "1.28", "2.56"]
    assert [row["end_s"] for row in rows[-2:]] == ["17.92", "19.20"]  # 960 rows at 50 Hz
    np.testing.assert_allclose(probabilities(rows), expected, rtol=0, atol=ROUNDING)
    assert [row["activity"] for row in rows] == [CLASSES[i] for i in expected.argmax(1)]
    np.testing.assert_allclose([float(row["confidence"]) for row in rows], expected.max(1), rtol=0, atol=ROUNDING)
    assert all(re.fullmatch(r"[01]\.\d{4}", row["confidence"]) for row in rows)


def without_times(rows):
    return [{k: v for k, v in row.items() if k not in ("start_s", "end_s")} for row in rows]


def test_recording_and_its_windows_agree(windows, label, tmp_path):
    from_array = label(save_windows(tmp_path / "walk.npy", windows))
    assert {(row["start_s"], row["end_s"]) for row in from_array} == {("", "")}
    from_recording = label(save_recording(tmp_path / "walk.csv", joined(windows)))
    assert without_times(from_recording) == without_times(from_array)
    as_others_save = tmp_path / "other.npy"
    save_windows(as_others_save, np.asfortranarray(windows.astype(">f8")))
    assert label(as_others_save) == from_array


def test_columns_in_any_order_among_others(windows, label, tmp_path):
    """As a spreadsheet writes it: byte-order mark, quotes, CRLF, a text column; and a blank line, and a short rest."""
    rows = np.concatenate([joined(windows), np.zeros((63, 9), np.float32)])
    order = [7, 2, 0, 8, 1, 4, 3, 6, 5]
    lines = [[*(SIGNALS[i] for i in order), "time", "note"]]
    lines += [[*(f"{x:.9g}" for x in row[order]), f"00:{i}", "a, b"] for i, row in enumerate(rows)]
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows(lines)
    path = tmp_path / "walk.csv"
    path.write_bytes(b"\xef\xbb\xbf" + text.getvalue().replace("\r\n", "\r\n\r\n", 1).encode())
    assert label(path) == label(save_recording(tmp_path / "plain.csv", joined(windows)))


def test_number_of_windows_at_the_edges(windows, tmp_path):
    rows = joined(windows)
    for num_rows, num_windows in ((128, 1), (191, 1), (192, 2), (255, 2), (256, 3)):
        dataset = read_new_windows(save_recording(tmp_path / "walk.csv", rows[:num_rows]))
        assert len(dataset) == num_windows
        samples = dataset.__getitems__(SampleKeys(np.arange(num_windows), epoch=0))
        np.testing.assert_array_equal(samples["signals"], windows[:num_windows])
        assert samples["first_row"].tolist() == [64 * i for i in range(num_windows)]


def test_recording_longer_than_what_is_parsed_at_once(tmp_path):
    rows = np.random.default_rng(0).normal(size=(9000, 9)).astype(np.float32)
    dataset = read_new_windows(save_recording(tmp_path / "long.csv", rows))
    assert len(dataset) == (9000 - 128) // 64 + 1
    np.testing.assert_array_equal(dataset.signals[-1], rows[64 * 138 : 64 * 138 + 128].T)


def test_batch_size_does_not_change_the_table(windows, label, tmp_path, monkeypatch):
    path = save_windows(tmp_path / "walk.npy", windows)
    at_once = label(path)
    forward, sizes = HarNet.forward, []
    monkeypatch.setattr(HarNet, "forward", lambda self, x: sizes.append(len(x)) or forward(self, x))
    for more, expected_sizes in ((["--eval-batch-size", 1], [1] * 14), (["--batch-size", 5], [5, 5, 4])):
        sizes.clear()
        rows = label(path, *more)
        assert sizes == expected_sizes
        assert [(row["window"], row["activity"]) for row in rows] == [(r["window"], r["activity"]) for r in at_once]
        np.testing.assert_allclose(probabilities(rows), probabilities(at_once), rtol=0, atol=1.01e-4)


def test_precision_is_that_of_the_command_line(trained, windows, label, tmp_path, monkeypatch):
    path = save_windows(tmp_path / "walk.npy", windows)
    used = set()
    forward = HarNet.forward
    monkeypatch.setattr(
        HarNet, "forward", lambda self, x: used.add((x.dtype, torch.is_autocast_enabled("cpu"))) or forward(self, x)
    )
    rows = label(path, "--dtype", "float64")
    expected = expected_probabilities(trained / "best.pth", windows, torch.float64)
    np.testing.assert_allclose(probabilities(rows), expected, rtol=0, atol=ROUNDING)
    assert used == {(torch.float64, False)}
    used.clear()
    rows = label(path, "--amp", "bf16")
    np.testing.assert_allclose(probabilities(rows), expected, rtol=0, atol=0.05)
    assert used == {(torch.float32, True)}


# --- which run, and what it needs --------------------------------------------------------------------------------


def test_the_training_data_may_be_gone(cli, label, windows, tmp_path, monkeypatch):
    data, cache, run = write_layout(tmp_path / "UCI HAR Dataset"), tmp_path / "cache", tmp_path / "run"
    argv = ["--data-dir", data, "--num-val-subjects", 1, "--cache-dir", cache]
    cli(*SMALL, *argv, "--save-dir", run)
    shutil.rmtree(data)
    shutil.rmtree(cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    rows = label(save_windows(tmp_path / "walk.npy", windows), "--cache-dir", cache, save_dir=run)
    expected = expected_probabilities(run / "best.pth", windows)
    np.testing.assert_allclose(probabilities(rows), expected, rtol=0, atol=ROUNDING)
    assert not cache.exists() and not (tmp_path / "none").exists()


def test_run_without_validation_labels_with_its_last_weights(cli, label, windows, cache_dir, tmp_path):
    run = tmp_path / "run"
    cli(*SMALL, "--refit", "--ema-decay", 0.9, "--cache-dir", cache_dir / "lockstep", "--save-dir", run)
    rows = label(save_windows(tmp_path / "walk.npy", windows), save_dir=run)
    expected = expected_probabilities(run / "final.pth", windows)
    np.testing.assert_allclose(probabilities(rows), expected, rtol=0, atol=ROUNDING)


def test_resume_from_names_one_checkpoint(trained, label, windows, cli, tmp_path):
    """Of another run, whose directory is gone."""
    path, moved = save_windows(tmp_path / "walk.npy", windows), tmp_path / "moved.pth"
    shutil.copy(trained / "best.pth", moved)
    assert label(path, "--resume-from", moved, save_dir=tmp_path / "none") == label(path)
    torch.save({"model": load(moved)["model"]}, moved)
    _, err = cli("--predict", path, "--resume-from", moved, status=2)
    assert err == [f"error: --resume-from {moved}: holds weights, but not of which model; give the checkpoint of a run"]


def test_the_flags_of_the_run_may_be_repeated_but_not_changed(trained, label, windows, cli, tmp_path):
    path = save_windows(tmp_path / "walk.npy", windows)
    assert label(path, *SMALL, "--no-augmentation") == label(path)
    _, err = cli(
        "--predict", path, "--save-dir", trained, "--hidden-dims", 8, 9, "--label-smoothing", 0.2, status=2
    )  # fmt: skip
    weights = f"the weights of epoch 1 in {trained} were trained with"
    assert err == [
        f"error: --hidden-dims 8 9: {weights} 8; leave it out",
        f"error: --label-smoothing 0.2: {weights} 0.1; leave it out",
    ]
    _, err = cli("--predict", path, "--save-dir", trained, "--task", "seqrec", status=2)
    assert err == [f"error: --task seqrec: {weights} har; leave it out"]


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--hidden-dims", "8,16", "--mode", "flatten", "--no-augmentation", "--refit", "--data-dir", "."],
        ["--val-subjects", "3", "5", "--dropout", "1e-3"],
        ["--task", "seqrec", "--no-time", "--loss", "sampled", "--num-negatives", "7", "--norm", "pre"],
    ],
)  # fmt: skip
def test_recorded_values_give_the_flags_back(argv):
    flags, problems = parse(argv, several_devices=False)
    assert problems == []
    values = flags.values()
    for recorded in (values, json.loads(json.dumps(values))):
        for group in (flags.task, flags.learning, flags.precision):
            assert group_from_values(type(group), recorded) == group
    assert flag_values(group_from_values(type(flags.task), {})) == flag_values(type(flags.task)())
    with pytest.raises(ValueError, match=r"--dropout -1.0: must be at least 0"):
        group_from_values(type(flags.task), {"--dropout": -1.0})


# --- tasks of a user's own ---------------------------------------------------------------------------------------

OWN_TASK = """
import os
import numpy as np
from trainer.loading.order import SampleKeys
from examples.own_task import Spirals

class Points:
    def __init__(self, points):
        self.points = points

    def __len__(self):
        return len(self.points)

    def __getitems__(self, keys: SampleKeys):
        return {"point": self.points[keys.index]}

class Labelling(Spirals):
    def new_data(self, path):
        return Points(np.loadtxt(path, dtype=np.float32, ndmin=2))

    def predictions(self, objective, batch):
        if int(batch["index"][0]) > 0 and "END_BY" in os.environ:
            os.kill(os.getpid(), int(os.environ["END_BY"]))
        return {"arm": objective.model(batch["point"]).argmax(1).tolist(), "id": batch["index"].tolist()}
"""
POINTS = "0.1 0.2\n-0.3 0.4\n0.5 0.5\n0.2 -0.9\n"


@pytest.fixture
def own_run(cli, tmp_path):
    """(file of a task of a user's own, the directory of its run, a file to label)"""
    task, points = tmp_path / "first_place.py", tmp_path / "points.txt"
    task.write_text(OWN_TASK)
    points.write_text(POINTS)
    cli("--task", f"{task}:Labelling", "--hidden-units", 7, "--num-points", 64, "--epochs", 1, "--num-threads", 1,
        "--device", "cpu", "--save-dir", tmp_path / "run")  # fmt: skip
    yield task, tmp_path / "run", points
    for name in ("first_place", "second_place"):
        sys.modules.pop(name, None)


def test_own_task_labels_its_own_files(own_run, cli, tmp_path):
    task, run, points = own_run
    out, err = cli("--predict", points, "--save-dir", run, "--num-threads", 1)
    weights = load(run / "best.pth")["model"]
    assert weights["0.weight"].shape == (7, 2)
    gelu = torch.nn.functional.gelu
    x = gelu(torch.from_numpy(np.loadtxt(points, dtype=np.float32)) @ weights["0.weight"].T + weights["0.bias"])
    arms = (gelu(x @ weights["2.weight"].T + weights["2.bias"]) @ weights["4.weight"].T + weights["4.bias"]).argmax(1)
    assert (out, err) == ("arm,id\n" + "".join(f"{arm},{i}\n" for i, arm in enumerate(arms)), [])
    moved = task.rename(tmp_path / "second_place.py")
    _, err = cli("--predict", points, "--save-dir", run, status=2)
    assert len(err) == 1 and "there is no file" in err[0] and "say by --task where it is now" in err[0]
    assert cli("--predict", points, "--save-dir", run, "--task", f"{moved}:Labelling", "--num-threads", 1) == (out, [])


@pytest.mark.parametrize("task", [f"{ROOT}/examples/own_task.py:Spirals", "seqrec"])
def test_task_that_cannot_label_says_so(task, cli, cache_dir, tmp_path):
    run, points = tmp_path / "run", tmp_path / "points.txt"
    points.write_text(POINTS)
    small = ["--num-points", 64] if "Spirals" in task else ["--hidden-units", 8, "--maxlen", 8, "--num-blocks", 1]
    cli("--task", task, *small, "--epochs", 1, "--num-threads", 1, "--device", "cpu", "--cache-dir", cache_dir,
        "--save-dir", run)  # fmt: skip
    _, err = cli("--predict", points, "--save-dir", run, status=2)
    name = "Spirals" if "Spirals" in task else "SeqrecTask"
    assert err == [f"error: --predict {points}: {name}, the task of this run, has no `new_data`: it cannot label files"]


# --- where the table goes ----------------------------------------------------------------------------------------


def test_output_is_the_table_with_the_users_permissions(trained, windows, label, cli, tmp_path):
    path, output = save_windows(tmp_path / "walk.npy", windows), tmp_path / "labels.csv"
    link = tmp_path / "link.csv"
    link.symlink_to(output)
    before = os.umask(0o027)
    try:
        for name in (output, link):  # the second replaces the first
            out, err = cli("--predict", path, "--save-dir", trained, "--output", name, "--num-threads", 1)
            assert err == [] and out == (
                f"Labelled 14 samples of {path} with the weights of epoch 1 in {trained}: {name}\n"
            )
            assert output.stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert read_table(output.read_text()) == label(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["labels.csv", "link.csv", "walk.npy"]


def test_a_kill_leaves_nothing_half_written(own_run, command, cli, tmp_path, monkeypatch):
    """Between two batches. Only what cannot be caught leaves its temporary file."""
    _, run, points = own_run
    output = tmp_path / "labels.csv"
    output.write_text("precious")
    argv = ["--predict", points, "--save-dir", run, "--output", output, "--eval-batch-size", 2, "--num-threads", 1]
    monkeypatch.setenv("END_BY", str(int(signal.SIGTERM)))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the training of the fixture has left its own
    with pytest.raises(SystemExit, match=f"^{128 + signal.SIGTERM}$"):
        cli(*argv)
    assert output.read_text() == "precious" and not list(tmp_path.glob("*.tmp"))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    done = command("main.py", *argv, status=-signal.SIGKILL, END_BY=str(int(signal.SIGKILL)))
    assert done.stdout == done.stderr == ""
    assert output.read_text() == "precious" and len(list(tmp_path.glob("labels.csv.*.tmp"))) == 1


def test_a_failure_leaves_what_was_there(tmp_path):
    output = tmp_path / "labels.csv"
    output.write_text("precious")
    with pytest.raises(ZeroDivisionError), output_file(output) as file:
        file.write("half")
        raise ZeroDivisionError
    assert output.read_text() == "precious" and list(tmp_path.iterdir()) == [output]


def test_a_disk_that_refuses(tmp_path):
    for name in ("x" * 255, "no/such/folder/x"):
        with pytest.raises(BadInput, match=r"--output .*: cannot be written: "), output_file(tmp_path / name):
            raise AssertionError("nothing was opened")
    (tmp_path / f"full.csv.{os.getpid()}.tmp").symlink_to("/dev/full")
    with (
        pytest.raises(BadInput, match=r"--output .*full.csv: cannot be written: No space left"),
        output_file(tmp_path / "full.csv") as file,
    ):
        file.write("a table")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_reader_that_has_seen_enough(trained, windows, environment, tmp_path):
    """`| head -1`; the table is longer than a pipe holds."""
    path = save_windows(tmp_path / "walks.npy", np.tile(windows, (100, 1, 1)))
    argv = [sys.executable, "main.py", "--predict", path, "--save-dir", trained, "--num-threads", "1"]
    done = subprocess.Popen(
        [*map(str, argv)], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert done.stdout.readline() == ",".join(COLUMNS) + "\n"
    done.stdout.close()
    assert done.stderr.read() == ""
    done.stderr.close()
    assert done.wait(timeout=60) == 0


# --- what is refused ---------------------------------------------------------------------------------------------


def refuse_file(path, message):
    with pytest.raises(BadInput) as refused:
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
        (7, 7, "1,5", "line 7: 10 columns, but the header has 9"),
        (7, 7, '"1', "line 131: unexpected end of data"),
        (1, 2, "acc_y", "line 1: lacks body_acc_y; all nine signals are needed"),
        (1, 2, "body_acc_x", "line 1: lacks body_acc_y"),
        (1, 9, "total_acc_z,total_acc_z", "line 1: names total_acc_z more than once"),
    ],
)
def test_mistake_in_a_recording_is_named(line, column, field, message, windows, tmp_path):
    path = save_recording(tmp_path / "walk.csv", joined(windows)[:130])
    lines = [text.split(",") for text in path.read_text().splitlines()]
    lines[line - 1][column - 1] = field
    path.write_text("".join(",".join(fields) + "\n" for fields in lines))
    refuse_file(path, message)


def test_mistake_far_below_is_named_by_its_line(tmp_path):
    """Below what is parsed at once, and below a blank line."""
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
            "line 1: names none of the nine signals; give a CSV whose first line names them, separated",
        ),
        (",".join(SIGNALS).encode(), "has 0 rows below its header, and a window takes 128 (2.56 s at 50 Hz)"),
        (b"\x93NUMPY\x01\x00", "is no text in UTF-8, but has the byte 0x93; give a CSV, or an array as .npy"),
        (b"\x00\x01\x02" * 100, "line 1"),
        (b"x" * 200_000, "line 1"),
    ],
)
def test_file_that_is_no_recording(content, message, tmp_path):
    path = tmp_path / "walk.csv"
    path.write_bytes(content)
    refuse_file(path, message)


def test_recording_that_is_too_short(windows, tmp_path):
    path = save_recording(tmp_path / "walk.csv", joined(windows)[:127])
    refuse_file(path, "has 127 rows below its header")


def test_array_that_holds_no_windows(windows, tmp_path):
    path = tmp_path / "walk.npy"
    wrong = {
        "has shape (14, 128, 9); windows have shape (N, 9, 128)": windows.swapaxes(1, 2),
        "has shape (9, 128); windows": windows[0],
        "has shape (14, 9, 64); windows": windows[..., :64],
        "holds no window": windows[:0],
        "has numbers of type complex64": windows.astype(np.complex64),
        "has numbers of type <U3": np.full((1, 9, 128), "1.0"),
        "has numbers of type bool": np.ones((1, 9, 128), bool),
    }
    for message, array in wrong.items():
        refuse_file(save_windows(path, array), message)
    for value in (np.nan, np.inf, 1e39):
        array = windows.astype(np.float64)
        array[3, 4, 77] = value
        number = f"window 3, signal body_gyro_y, sample 77 (all counted from 0): {value} is not a finite number"
        refuse_file(save_windows(path, array), number)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_file_that_is_no_array(windows, tmp_path):
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
        b"plain text": "holds Python objects, or is no .npy file; nothing in it was run",
        pickle.dumps(Malicious(created)): "holds Python objects",
        pickled.getvalue(): "holds Python objects",
        (tmp_path / "archive.npz").read_bytes(): "is an archive of arrays; give one array of shape (N, 9, 128)",
    }.items():
        path.write_bytes(content)
        refuse_file(path, message)
    assert not created.exists()


def test_numbers_in_other_units_get_a_warning(trained, windows, cli, tmp_path):
    path = save_windows(tmp_path / "walk.npy", windows * np.float32(9.80665))
    out, err = cli("--predict", path, "--save-dir", trained, "--num-threads", 1)
    assert len(read_table(out)) == 14
    assert len(err) == 1 and err[0].startswith(f"warning: --predict {path}: the median length of total_acc is 9.")
    degrees = windows.copy()
    degrees[:, 3:6] *= np.float32(np.rad2deg(1))
    (doubt,) = doubts_about_units(read_new_windows(save_windows(path, degrees)))
    assert "body_gyro" in doubt and "rad/s" in doubt


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--predict", "{tmp}/none.csv"], "--predict {tmp}/none.csv: No such file or directory; give a file with"),
        (["--predict", "{tmp}"], "--predict {tmp}: Is a directory; give a file with recordings"),
        (["--output", "{tmp}/no/x.csv"], "--output {tmp}/no/x.csv: there is no folder {tmp}/no; create it first"),
        (["--output", "{tmp}"], "--output {tmp}: is not a file; name one"),
        (["--output", "/dev/null"], "--output /dev/null: is not a file"),
        (["--output", "{tmp}/walk.npy"], "--output {tmp}/walk.npy: would overwrite what is to be labelled"),
        (["--save-dir", "{tmp}/none"], "--save-dir {tmp}/none: holds no intact checkpoint to use"),
    ],
)
def test_wrong_place_ends_with_one_message_and_writes_nothing(more, message, trained, windows, cli, tmp_path):
    path = save_windows(tmp_path / "walk.npy", windows)
    content = path.read_bytes()
    here = [word.format(tmp=tmp_path) for word in more]
    out, err = cli("--predict", path, "--save-dir", trained, "--output", tmp_path / "labels.csv", *here, status=2)
    assert out == "" and len(err) == 1 and err[0].startswith("error: " + message.format(tmp=tmp_path))
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == content


# --- as the documents say ----------------------------------------------------------------------------------------


def test_documented_session(label, cache_dir, tmp_path, monkeypatch):
    document = (ROOT / "docs" / "predicting.md").read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    monkeypatch.setattr("trainer.commands.flags.DEFAULT_CACHE", cache_dir / "lockstep")
    monkeypatch.chdir(tmp_path)
    exec(script, {})
    rows = label(tmp_path / "walk.csv")
    documented = re.search(r"^window,start_s.*?(?=^```)", document, re.MULTILINE | re.DOTALL)[0].splitlines()
    assert documented[0] == ",".join(COLUMNS)
    shown = [line.split(",")[:3] for line in documented[1:-1]]
    assert shown == [[row["window"], row["start_s"], row["end_s"]] for row in rows[: len(shown)]] != []
