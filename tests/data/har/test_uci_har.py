import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from data.har.synthetic import TEST_SUBJECTS
from data.har.uci_har import load_uci_har
from tests.helpers.uci_har_files import assert_is_the_layout, zip_folder, zip_in_zip
from trainer.common.errors import UserError

# Forms of the data set


def test_the_data_folder_or_its_parent_is_accepted(layout, cache_dir) -> None:
    assert_is_the_layout(load_uci_har(layout, cache_dir))
    assert_is_the_layout(load_uci_har(layout.parent, cache_dir))


@pytest.mark.parametrize("top", ["", "UCI HAR Dataset/"])
@pytest.mark.parametrize("nested", [False, True])
def test_zips_and_zips_within_zips_are_read(layout, cache_dir, top, nested) -> None:
    content = zip_folder(layout, top)
    if nested:
        content = zip_in_zip(content)
    path = layout.parent / "UCI HAR Dataset.zip"
    path.write_bytes(content)
    assert_is_the_layout(load_uci_har(path, cache_dir))
    for file in sorted(layout.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    layout.rmdir()
    assert_is_the_layout(load_uci_har(path.parent, cache_dir))  # the folder that holds the zip


def test_changed_files_are_reread(layout, cache_dir) -> None:
    first = load_uci_har(layout, cache_dir)
    labels = layout / "train" / "y_train.txt"
    labels.write_text(labels.read_text().replace("1", "2"))
    os.utime(labels, ns=(1, 1))
    second = load_uci_har(layout, cache_dir)
    assert (first.labels[0], second.labels[0]) == (0, 1)


# Mistakes in the data set


def edit_line(file: Path, line: int, change) -> None:
    lines = file.read_bytes().splitlines()
    lines[line - 1] = change(lines[line - 1])
    file.write_bytes(b"\n".join(lines) + b"\n")


def replace_column(column: int, value: bytes):
    def change(line: bytes) -> bytes:
        fields = line.split()
        fields[column - 1] = value
        return b" ".join(fields)

    return change


SIGNAL = "test/Inertial Signals/body_gyro_y_test.txt"


@pytest.mark.parametrize(
    ("file", "line", "change", "message"),
    [
        (SIGNAL, 2, lambda line: line[16:], "line 2: has 127 columns instead of 128"),
        (SIGNAL, 3, lambda line: line + b" 1.0", "line 3: has 129 columns instead of 128"),
        (SIGNAL, 2, lambda line: b"", "line 2: has 0 columns instead of 128"),
        (SIGNAL, 1, replace_column(7, b"oops"), "line 1, column 7: 'oops' is not a number"),
        (SIGNAL, 1, replace_column(128, b"\xff"), "line 1, column 128: '.' is not a number"),
        (SIGNAL, 2, replace_column(128, b"nan"), "line 2, column 128: nan is not a finite number"),
        (SIGNAL, 2, replace_column(1, b"-inf"), "line 2, column 1: -inf is not a finite number"),
        (SIGNAL, 2, replace_column(1, b"1e999"), "line 2, column 1: 1e999 is not a finite number"),
        ("train/y_train.txt", 4, lambda line: b"7", "line 4: unknown class label 7 .the classes are 1 to 6."),
        ("train/y_train.txt", 4, lambda line: b"0", "line 4: unknown class label 0"),
        ("train/y_train.txt", 5, lambda line: b"walking", "line 5: 'walking' is not a whole number"),
        ("test/subject_test.txt", 1, lambda line: b"2.5", "line 1: '2.5' is not a whole number"),
        ("test/subject_test.txt", 1, lambda line: b"9" * 30, "line 1: '9+' is not a whole number"),
        ("test/subject_test.txt", 1, lambda line: b"3", "subject 3 is also in the training set"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_wrong_line_is_named(layout, cache_dir, file, line, change, message, zipped) -> None:
    edit_line(layout / file, line, change)
    path = layout
    if zipped:
        path = layout.parent / "har.zip"
        path.write_bytes(zip_folder(layout, "x/"))
    with pytest.raises(UserError, match=f"(?s)--data-dir.*{Path(file).name}.*{message}"):
        load_uci_har(path, cache_dir)


def test_a_file_with_another_number_of_lines_is_named(layout, cache_dir) -> None:
    file = layout / "train" / "Inertial Signals" / "total_acc_z_train.txt"
    file.write_bytes(b"\r\n".join(file.read_bytes().splitlines()[:-1]))
    with pytest.raises(UserError, match=r"--data-dir.*total_acc_z_train.*5 lines.*y_train.txt has 6"):
        load_uci_har(layout, cache_dir)


def test_an_empty_file_is_named(layout, cache_dir) -> None:
    (layout / "test" / "y_test.txt").write_text("")
    with pytest.raises(UserError, match=r"--data-dir.*y_test.txt: is empty"):
        load_uci_har(layout, cache_dir)


@pytest.mark.parametrize("zipped", [False, True])
def test_a_missing_file_is_named(layout, cache_dir, zipped) -> None:
    (layout / "train" / "subject_train.txt").unlink()
    path = layout
    if zipped:
        path = layout.parent / "har.zip"
        path.write_bytes(zip_folder(layout, ""))
    with pytest.raises(UserError, match=r"--data-dir.*subject_train.txt.*restore"):
        load_uci_har(path, cache_dir)


def test_a_path_that_is_not_the_data_set_is_named(layout, cache_dir, tmp_path) -> None:
    with pytest.raises(UserError, match=r"--data-dir .*train: contains no folder named train"):
        load_uci_har(layout / "train", cache_dir)
    other = tmp_path / "other.zip"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a/b.txt", "something else")
    with pytest.raises(UserError, match=r"--data-dir .*other.zip contains no folder named train"):
        load_uci_har(other, cache_dir)


def test_a_damaged_archive_is_named(layout, cache_dir, tmp_path) -> None:
    whole = zip_folder(layout, "")
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    for name, content in {"text": b"not a zip", "cut": whole[:-200], "flipped": bytes(damaged)}.items():
        path = tmp_path / f"{name}.zip"
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"--data-dir .*{name}.zip.* is damaged"):
            load_uci_har(path, cache_dir)


# The real data


def test_the_published_data_set_is_read(tmp_path) -> None:
    folder = os.environ.get("LOCKSTEP_DATA")
    if not folder or not Path(folder, "uci_har", "UCI HAR Dataset.zip").is_file():
        pytest.skip("set LOCKSTEP_DATA to a folder with uci_har/UCI HAR Dataset.zip")
    recordings = load_uci_har(Path(folder, "uci_har", "UCI HAR Dataset.zip"), tmp_path)
    assert recordings.signals.shape == (10299, 9, 128) and recordings.is_test.sum() == 2947
    assert np.bincount(recordings.labels[recordings.is_test]).tolist() == [496, 471, 420, 491, 532, 537]
    assert np.bincount(recordings.labels[~recordings.is_test]).tolist() == [1226, 1073, 986, 1286, 1374, 1407]
    assert set(recordings.subjects[recordings.is_test].tolist()) == set(TEST_SUBJECTS)
    assert recordings.signals[0, 0, 0] == np.float32(1.8085150e-004)
    total, body = recordings.signals[:, 6:], recordings.signals[:, :3]
    assert np.linalg.norm((total - body).mean(axis=2), axis=1) == pytest.approx(1.0, abs=0.2)  # gravity, in g
