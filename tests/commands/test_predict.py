"""`--predict` labels new data with a finished run, and writes a table."""

import csv
import io
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from data.har.windows import CLASSES, SIGNALS
from models.har.harnet import HarNet
from models.layers.standardised import Standardised
from tests.conftest import ROOT, WEIGHTED, load
from tests.helpers.recordings import joined, save_recording, save_windows, windows_of_a_walk
from tests.helpers.uci_har_files import write_layout
from trainer.cli import main
from trainer.commands.predict import write_output
from trainer.common.errors import UserError
from trainer.failure.signals import STOP_SIGNALS

MODEL = "--no-augmentation, --mode first, --hidden-dims 8"
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
    return windows_of_a_walk(cache_dir)


@pytest.fixture
def label(on_cpu, trained):
    """Checks that standard output is the table of a file; returns the table as rows."""

    def run(path, *more, save_dir=trained, of_run=MODEL):
        out, err = on_cpu("--predict", path, "--save-dir", save_dir, "--num-threads", 1, *more)
        assert [line.partition(": ")[2] for line in err] == [of_run] * bool(of_run)
        return read_table(out)

    return run


def read_table(text):
    rows = list(csv.DictReader(io.StringIO(text)))
    assert list(rows[0]) == COLUMNS
    return rows


def probabilities(rows):
    return np.array([[float(row[name]) for name in CLASSES] for row in rows])


def expected_probabilities(checkpoint, windows, dtype=torch.float32):
    """Returns probabilities that plain PyTorch computes with the weights of a checkpoint, (windows, classes)."""
    model = Standardised(HarNet("first", hidden_dims=(8,)), num_channels=9).to(dtype).eval()
    model.load_state_dict(load(checkpoint)["model"])
    with torch.no_grad():
        return model(torch.from_numpy(windows).to(dtype)).softmax(dim=1).numpy()


# --- content of the table ----------------------------------------------------------------------------------------


def test_the_written_table_equals_the_models_predictions(trained, windows, label, tmp_path):
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


def test_predictions_of_a_recording_and_its_windows_agree(windows, label, tmp_path):
    from_array = label(save_windows(tmp_path / "walk.npy", windows))
    assert {(row["start_s"], row["end_s"]) for row in from_array} == {("", "")}
    from_recording = label(save_recording(tmp_path / "walk.csv", joined(windows)))
    assert without_times(from_recording) == without_times(from_array)
    as_others_save = tmp_path / "other.npy"
    save_windows(as_others_save, np.asfortranarray(windows.astype(">f8")))
    assert label(as_others_save) == from_array


def test_columns_may_be_in_any_order_among_others(windows, label, tmp_path):
    """The file has a byte-order mark, quotes, CRLF, a text column, a blank line and an incomplete last window."""
    rows = np.concatenate([joined(windows), np.zeros((63, 9), np.float32)])
    order = [7, 2, 0, 8, 1, 4, 3, 6, 5]
    lines = [[*(SIGNALS[i] for i in order), "time", "note"]]
    lines += [[*(f"{x:.9g}" for x in row[order]), f"{i / 50:.2f}", "a, b"] for i, row in enumerate(rows)]
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows(lines)
    path = tmp_path / "walk.csv"
    path.write_bytes(b"\xef\xbb\xbf" + text.getvalue().replace("\r\n", "\r\n\r\n", 1).encode())
    assert label(path) == label(save_recording(tmp_path / "plain.csv", joined(windows)))


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


def test_precision_follows_the_command_line(trained, windows, label, tmp_path, monkeypatch):
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


def test_numbers_in_other_units_get_a_warning(trained, windows, on_cpu, tmp_path):
    path = save_windows(tmp_path / "walk.npy", windows * np.float32(9.80665))
    out, err = on_cpu("--predict", path, "--save-dir", trained, "--num-threads", 1)
    assert len(read_table(out)) == 14
    assert len(err) == 2 and err[1].startswith(f"Warning: --predict {path}: values of body_acc_x, body_acc_y, ")
    assert "total_acc_z are 9.76 times as large as in training (as m/s² instead of g)" in err[1]


# --- the run and its flags ---------------------------------------------------------------------------------------


def test_predictions_do_not_need_the_training_data(on_cpu, windows, tmp_path, monkeypatch):
    data, cache, run = write_layout(tmp_path / "UCI HAR Dataset"), tmp_path / "cache", tmp_path / "run"
    argv = ["--data-dir", data, "--num-val-subjects", 1, "--cache-dir", cache]
    on_cpu(*SMALL, *argv, "--save-dir", run)
    shutil.rmtree(data)
    shutil.rmtree(cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    of_run = f"--data-dir '{data}', --num-val-subjects 1, --mode first, --hidden-dims 8"
    path = save_windows(tmp_path / "walk.npy", windows)
    out, err = on_cpu("--predict", path, "--save-dir", run, "--num-threads", 1, "--cache-dir", cache)
    assert err[0].partition(": ")[2] == of_run
    rows = read_table(out)
    expected = expected_probabilities(run / "best.pth", windows)
    np.testing.assert_allclose(probabilities(rows), expected, rtol=0, atol=ROUNDING)
    assert not cache.exists() and not (tmp_path / "none").exists()


def test_a_run_without_validation_predicts_with_its_last_weights(on_cpu, label, windows, cache_dir, tmp_path):
    run = tmp_path / "run"
    on_cpu(*SMALL, "--refit", "--ema-decay", 0.9, "--cache-dir", cache_dir / "lockstep", "--save-dir", run)
    of_run = "--refit, --mode first, --hidden-dims 8"
    rows = label(save_windows(tmp_path / "walk.npy", windows), save_dir=run, of_run=of_run)
    expected = expected_probabilities(run / "final.pth", windows)
    np.testing.assert_allclose(probabilities(rows), expected, rtol=0, atol=ROUNDING)


def test_resume_from_uses_one_checkpoint_without_the_folder_of_its_run(trained, label, windows, on_cpu, tmp_path):
    path, moved = save_windows(tmp_path / "walk.npy", windows), tmp_path / "moved.pth"
    shutil.copy(trained / "best.pth", moved)
    assert label(path, "--resume-from", moved, save_dir=tmp_path / "none") == label(path)
    torch.save({"model": load(moved)["model"]}, moved)
    _, err = on_cpu("--predict", path, "--resume-from", moved, status=2)
    assert len(err) == 1 and f"--resume-from {moved}: contains weights but does not name their task; give" in err[0]


def test_the_flags_of_the_run_may_be_repeated_but_not_changed(trained, label, windows, on_cpu, tmp_path):
    path = save_windows(tmp_path / "walk.npy", windows)
    assert label(path, *SMALL, "--no-augmentation", of_run="") == label(path)
    _, err = on_cpu(
        "--predict", path, "--save-dir", trained, "--hidden-dims", 8, 9, "--label-smoothing", 0.2, status=2
    )  # fmt: skip
    weights = f"the weights of epoch 1 in {trained} were trained with"
    assert err == [
        f"error: --hidden-dims 8 9: {weights} 8; leave it out",
        f"error: --label-smoothing 0.2: {weights} 0.1; leave it out",
    ]
    _, err = on_cpu("--predict", path, "--save-dir", trained, "--hidden-dims", 128, status=2)  # the default
    assert err == [f"error: --hidden-dims 128: {weights} 8; leave it out"]
    _, err = on_cpu("--predict", path, "--save-dir", trained, "--task", "seqrec", status=2)
    assert err == [f"error: --task seqrec: {weights} har; leave it out"]


# --- the file of the table ---------------------------------------------------------------------------------------


def test_output_is_a_table_with_the_users_permissions(trained, windows, label, on_cpu, tmp_path):
    path, output = save_windows(tmp_path / "walk.npy", windows), tmp_path / "labels.csv"
    link = tmp_path / "link.csv"
    link.symlink_to(output)
    before = os.umask(0o027)
    try:
        for name in (output, link):  # writing to the link replaces the first table
            out, err = on_cpu("--predict", path, "--save-dir", trained, "--output", name, "--num-threads", 1)
            assert err == [f"From the run in {trained}: {MODEL}"] and out == (
                f"Predicted 14 samples of {path} with the weights of epoch 1 in {trained}; the table is in {name}\n"
            )
            assert output.stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert read_table(output.read_text()) == label(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["labels.csv", "link.csv", "walk.npy"]


def test_a_failed_write_is_reported_and_keeps_the_old_table(tmp_path):
    for name in ("x" * 255, "no/such/folder/x"):
        with pytest.raises(UserError, match=r"--output .*: cannot be written: "):
            write_output(tmp_path / name, "a table")
    output = tmp_path / "full.csv"
    output.write_text("precious")
    (tmp_path / f"full.csv.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"--output .*full.csv: cannot be written: No space left"):
        write_output(output, "a table")
    assert output.read_text() == "precious" and list(tmp_path.iterdir()) == [output]


def test_an_unwritable_folder_is_reported_before_the_work(trained, windows, on_cpu, tmp_path, monkeypatch):
    path, output = save_windows(tmp_path / "walk.npy", windows), tmp_path / "labels.csv"
    monkeypatch.setattr("trainer.flags.os.access", lambda folder, mode: folder != tmp_path)
    _, err = on_cpu("--predict", path, "--save-dir", trained, "--output", output, status=2)
    assert err == [
        f"error: --output {output}: cannot be written: no permission to write to {tmp_path}; name another file"
    ]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_a_reader_may_stop_early(trained, windows, environment, tmp_path):
    """The reader stops as `head -1` does, and the table is longer than a pipe holds."""
    path = save_windows(tmp_path / "walks.npy", np.tile(windows, (100, 1, 1)))
    argv = [sys.executable, "main.py", "--predict", path, "--save-dir", trained, "--num-threads", "1"]
    done = subprocess.Popen(
        [*map(str, argv)], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert done.stdout.readline() == ",".join(COLUMNS) + "\n"
    done.stdout.close()
    assert done.stderr.read() == f"From the run in {trained}: --no-augmentation, --mode first, --hidden-dims 8\n"
    done.stderr.close()
    assert done.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--predict", "{tmp}/none.csv"], "--predict {tmp}/none.csv: No such file or directory; give a file with"),
        (["--predict", "{tmp}"], "--predict {tmp}: Is a directory; give a file with recordings"),
        (["--output", "{tmp}/no/x.csv"], "--output {tmp}/no/x.csv: there is no folder {tmp}/no; create it first"),
        (["--output", "{tmp}"], "--output {tmp}: is not a file; name a file"),
        (["--output", "-"], "--output -: is not a file; name a file"),
        (["--output", "/dev/null"], "--output /dev/null: is not a file"),
        (["--output", "{tmp}/walk.npy"], "--output {tmp}/walk.npy: would overwrite the input"),
        (["--save-dir", "{tmp}/none"], "--save-dir {tmp}/none: contains no intact checkpoint to use"),
    ],
)
def test_an_invalid_path_ends_with_one_message_and_writes_nothing(more, message, trained, windows, on_cpu, tmp_path):
    path = save_windows(tmp_path / "walk.npy", windows)
    content = path.read_bytes()
    here = [word.format(tmp=tmp_path) for word in more]
    out, err = on_cpu("--predict", path, "--save-dir", trained, "--output", tmp_path / "labels.csv", *here, status=2)
    assert out == "" and len(err) == 1 and err[0].startswith("error: " + message.format(tmp=tmp_path))
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == content


def test_a_folder_of_several_runs_suggests_one_run(trained, windows, on_cpu, tmp_path):
    path = save_windows(tmp_path / "walk.npy", windows)
    _, err = on_cpu("--predict", path, "--save-dir", trained.parent, status=2)
    assert len(err) == 1 and f"contains several runs; choose one, for example --save-dir {trained.parent}/" in err[0]


# --- the documents, and samples ----------------------------------------------------------------------------------


def test_the_documented_session_gives_the_documented_rows(label, run_here, tmp_path, monkeypatch):
    document = (ROOT / "docs" / "predicting.md").read_text()
    monkeypatch.chdir(tmp_path)
    assert "\npython main.py --sample walk.csv\n" in document
    run_here("--sample", "walk.csv")
    rows = label(tmp_path / "walk.csv")
    documented = re.search(r"^window,start_s.*?(?=^```)", document, re.MULTILINE | re.DOTALL)[0].splitlines()
    assert documented[0] == ",".join(COLUMNS)
    shown = [line.split(",")[:3] for line in documented[1:-1]]
    assert shown == [[row["window"], row["start_s"], row["end_s"]] for row in rows[: len(shown)]] != []


@pytest.mark.parametrize(
    ("task", "name", "num_lines"),
    [
        ("seqrec", "histories.csv", 200),
        ("kgat", "users.csv", 200),
        pytest.param("speech", "meeting.wav", 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_labels_every_line_of_its_sample(task, name, num_lines, run_here, tmp_path):
    here = ("--task", task, "--save-dir", tmp_path / "run", "--num-threads", 1)
    run_here(*here, "--max-steps", 1, "--no-test")
    assert run_here(*here, "--sample", tmp_path / name).out.endswith(f"Wrote {tmp_path / name}.\n")
    out, _ = run_here(*here, "--predict", tmp_path / name)
    assert len(out.splitlines()) == 1 + num_lines


@pytest.mark.parametrize(
    ("header", "flags"),
    [
        ("paid_at,buyer,x,Artikel", "--user-column buyer --item-column Artikel --time-column paid_at"),
        ("paid_at,user,x,Artikel", "--item-column 4 --time-column paid_at"),
        ("", "--user-column 2 --item-column 4 --time-column none"),
    ],
)
@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_a_sample_has_the_columns_and_the_encoding_of_the_run(header, flags, encoding, run_here, tmp_path):
    table, sample = tmp_path / "train.csv", tmp_path / "new.csv"
    rows = [f"{10**9 + 7 * u + k},u{u},1,Größe {(u + k) % 9}" for u in range(20) for k in range(6)]
    table.write_text("\n".join([header, *rows]), encoding)
    here, short = (
        ("--task", "seqrec", "--save-dir", tmp_path / "run", "--num-threads", 1),
        ["--max-steps", 1, "--no-test"],
    )
    run_here(*here, "--data-dir", table, "--encoding", encoding, *flags.split(), "--no-time", *short)
    run_here(*here, "--sample", sample)
    assert {f"Größe {i}" for i in range(9)} <= set(re.split(r"[,\n]", sample.read_text(encoding)))
    out, err = run_here(*here, "--predict", sample, "--top-k", 1)
    assert len(out.splitlines()) == 1 + 20 and "left out" not in err


def test_a_sample_may_be_a_table_or_new_rows_of_a_table(run_here, tmp_path):
    table, rows = tmp_path / "train.csv", tmp_path / "new.csv"
    run_here("--task", "tabular", "--sample", table)
    given = ("--task", "tabular", "--data-dir", table, "--label", "y")
    run_here(*given, "--sample", rows)
    header, *labelled = table.read_text().splitlines()
    assert header.endswith(",y") and len(labelled) > 20
    out, _ = run_here(*given, "--predict", rows)
    assert out.startswith("y,p(0),") and len(out.splitlines()) == len(rows.read_text().splitlines()) == 21


def test_a_sample_replaces_no_file(tmp_path, refused):
    (tmp_path / "mine.csv").write_text("mine")
    refused([f"--sample {tmp_path / 'mine.csv'}: already exists; name another"], "--sample", tmp_path / "mine.csv")
    refused(["--sample x.csv: the task Weighted has no sample"], "--task", WEIGHTED, "--sample", "x.csv")
    assert (tmp_path / "mine.csv").read_text() == "mine"
