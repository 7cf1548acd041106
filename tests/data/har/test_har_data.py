"""UCI HAR: every form of the data set, every mistake in it, the split, the augmentation; the synthetic recordings."""

import io
import os
import zipfile
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from data.har import synthetic as har_synthetic
from data.har.synthetic import TEST_SUBJECTS, load_synthetic_har
from data.har.uci_har import load_uci_har
from data.har.windows import (
    CLASSES,
    SIGNALS,
    Augmentation,
    HarDataset,
    HarRecordings,
    WindowAugmenter,
    at_tempo,
    named_subjects,
    rotated_subjects,
    rotation_matrices,
    split_by_subject,
    subject_folds,
)
from models.har.harnet import HarNet
from models.layers.standardised import Standardised
from trainer.loading.counter_random import normal, uniform
from trainer.loading.errors import BadInput
from trainer.loading.order import SampleKeys

# Subject and label of each window.
LAYOUT = {
    "train": ([1, 1, 3, 3, 5, 6], [1, 2, 3, 4, 5, 6]),
    "test": ([2, 2, 4], [6, 1, 2]),
}


def raw_windows(part: str) -> np.ndarray:
    num_windows = len(LAYOUT[part][0])
    rng = np.random.default_rng(num_windows)
    return rng.normal(size=(num_windows, 9, 128)) * np.arange(1, 10)[:, None] + np.arange(9)[:, None]


def write_layout(root: Path) -> Path:
    """The official layout in small, with its fixed-width numbers and its line ends."""
    for part, (subjects, labels) in LAYOUT.items():
        folder = root / part / "Inertial Signals"
        folder.mkdir(parents=True)
        (root / part / f"y_{part}.txt").write_text("".join(f"{label}\n" for label in labels))
        (root / part / f"subject_{part}.txt").write_text("".join(f"{subject}\n" for subject in subjects))
        for channel, signal in enumerate(SIGNALS):
            lines = ["".join(f"{x:16.7e}" for x in row) + "\r\n" for row in raw_windows(part)[:, channel]]
            (folder / f"{signal}_{part}.txt").write_bytes("".join(lines).encode())
    return root


def zip_folder(folder: Path, top: str) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"__MACOSX/{top}train/._y_train.txt", b"shadow file of a Mac")
        for file in sorted(folder.rglob("*.txt")):
            archive.write(file, top + file.relative_to(folder).as_posix())
    return memory.getvalue()


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return write_layout(tmp_path / "UCI HAR Dataset")


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def recordings(layout: Path, cache_dir: Path) -> HarRecordings:
    return load_uci_har(layout, cache_dir)


def keys(*index: int, epoch: int = 0) -> SampleKeys:
    return SampleKeys(np.array(index), epoch)


def assert_is_the_layout(recordings: HarRecordings) -> None:
    signals = np.concatenate([raw_windows("train"), raw_windows("test")])
    assert recordings.signals.dtype == np.float32 and recordings.signals.shape == signals.shape
    np.testing.assert_allclose(recordings.signals, signals, rtol=1e-6)
    assert recordings.labels.tolist() == [label - 1 for part in LAYOUT.values() for label in part[1]]
    assert recordings.subjects.tolist() == [subject for part in LAYOUT.values() for subject in part[0]]
    assert recordings.is_test.tolist() == [False] * 6 + [True] * 3
    assert recordings.labels.dtype == recordings.subjects.dtype == np.int64


# Every form of the data set


def test_folder_or_its_parent(layout, cache_dir) -> None:
    assert_is_the_layout(load_uci_har(layout, cache_dir))
    assert_is_the_layout(load_uci_har(layout.parent, cache_dir))


@pytest.mark.parametrize("top", ["", "UCI HAR Dataset/"])
@pytest.mark.parametrize("nested", [False, True])
def test_zip_and_zip_in_zip(layout, cache_dir, top, nested) -> None:
    content = zip_folder(layout, top)
    if nested:
        memory = io.BytesIO()
        with zipfile.ZipFile(memory, "w") as archive:
            archive.writestr("UCI HAR Dataset.names", "about")
            archive.writestr("UCI HAR Dataset.zip", content)
        content = memory.getvalue()
    path = layout.parent / "UCI HAR Dataset.zip"
    path.write_bytes(content)
    assert_is_the_layout(load_uci_har(path, cache_dir))
    for file in sorted(layout.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    layout.rmdir()
    assert_is_the_layout(load_uci_har(path.parent, cache_dir))  # the folder that holds the zip


def test_changed_files_are_read_again(layout, cache_dir) -> None:
    first = load_uci_har(layout, cache_dir)
    labels = layout / "train" / "y_train.txt"
    labels.write_text(labels.read_text().replace("1", "2"))
    os.utime(labels, ns=(1, 1))
    second = load_uci_har(layout, cache_dir)
    assert (first.labels[0], second.labels[0]) == (0, 1)


# Every mistake in it


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
        (SIGNAL, 2, lambda line: line[16:], "line 2: 127 columns instead of 128"),
        (SIGNAL, 3, lambda line: line + b" 1.0", "line 3: 129 columns instead of 128"),
        (SIGNAL, 2, lambda line: b"", "line 2: 0 columns instead of 128"),
        (SIGNAL, 1, replace_column(7, b"oops"), "line 1, column 7: 'oops' is not a number"),
        (SIGNAL, 1, replace_column(128, b"\xff"), "line 1, column 128: '.' is not a number"),
        (SIGNAL, 2, replace_column(128, b"nan"), "line 2, column 128: nan is not a finite number"),
        (SIGNAL, 2, replace_column(1, b"-inf"), "line 2, column 1: -inf is not a finite number"),
        (SIGNAL, 2, replace_column(1, b"1e999"), "line 2, column 1: 1e999 is not a finite number"),
        ("train/y_train.txt", 4, lambda line: b"7", "line 4: unknown class label 7; the classes are 1 to 6"),
        ("train/y_train.txt", 4, lambda line: b"0", "line 4: unknown class label 0"),
        ("train/y_train.txt", 5, lambda line: b"walking", "line 5: 'walking' is not a whole number"),
        ("test/subject_test.txt", 1, lambda line: b"2.5", "line 1: '2.5' is not a whole number"),
        ("test/subject_test.txt", 1, lambda line: b"9" * 30, "line 1: '9+' is not a whole number"),
        ("test/subject_test.txt", 1, lambda line: b"3", "subject 3 is in the training part too"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_wrong_line_is_named(layout, cache_dir, file, line, change, message, zipped) -> None:
    edit_line(layout / file, line, change)
    path = layout
    if zipped:
        path = layout.parent / "har.zip"
        path.write_bytes(zip_folder(layout, "x/"))
    with pytest.raises(BadInput, match=f"(?s)--data-dir.*{Path(file).name}.*{message}"):
        load_uci_har(path, cache_dir)


def test_a_file_with_more_or_fewer_lines_is_named(layout, cache_dir) -> None:
    file = layout / "train" / "Inertial Signals" / "total_acc_z_train.txt"
    file.write_bytes(b"\r\n".join(file.read_bytes().splitlines()[:-1]))
    with pytest.raises(BadInput, match=r"--data-dir.*total_acc_z_train.*5 lines.*y_train.txt has 6"):
        load_uci_har(layout, cache_dir)


def test_an_empty_file_is_named(layout, cache_dir) -> None:
    (layout / "test" / "y_test.txt").write_text("")
    with pytest.raises(BadInput, match=r"--data-dir.*y_test.txt: is empty"):
        load_uci_har(layout, cache_dir)


@pytest.mark.parametrize("zipped", [False, True])
def test_a_missing_file_is_named(layout, cache_dir, zipped) -> None:
    (layout / "train" / "subject_train.txt").unlink()
    path = layout
    if zipped:
        path = layout.parent / "har.zip"
        path.write_bytes(zip_folder(layout, ""))
    with pytest.raises(BadInput, match=r"--data-dir.*subject_train.txt.*not complete"):
        load_uci_har(path, cache_dir)


def test_a_path_that_is_not_the_data_set_is_named(layout, cache_dir, tmp_path) -> None:
    with pytest.raises(BadInput, match=r"--data-dir .*nowhere: no such file"):
        load_uci_har(tmp_path / "nowhere", cache_dir)
    with pytest.raises(BadInput, match=r"--data-dir .*train: holds no folder train"):
        load_uci_har(layout / "train", cache_dir)
    other = tmp_path / "other.zip"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a/b.txt", "something else")
    with pytest.raises(BadInput, match=r"--data-dir: .*other.zip holds no folder train"):
        load_uci_har(other, cache_dir)


def test_a_damaged_archive_is_named(layout, cache_dir, tmp_path) -> None:
    whole = zip_folder(layout, "")
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    for name, content in {"text": b"not a zip", "cut": whole[:-200], "flipped": bytes(damaged)}.items():
        path = tmp_path / f"{name}.zip"
        path.write_bytes(content)
        with pytest.raises(BadInput, match=rf"--data-dir: .*{name}.zip .*damaged"):
            load_uci_har(path, cache_dir)


def test_subjects_that_cannot_be_held_out_are_named(recordings) -> None:
    for val_subjects, message in {
        (99,): "--val-subjects 99: not a training subject; those are 1 3 5 6",
        (2,): "--val-subjects 2: not a training subject",
        (1, 3, 5, 6): "--val-subjects: 4 of 4 training subjects",
        (): "--val-subjects: 0 of 4 training subjects",
    }.items():
        with pytest.raises(BadInput, match=message):
            named_subjects(recordings, val_subjects)
    for num_val_subjects in (0, 4, 5):
        with pytest.raises(BadInput, match=f"--num-val-subjects {num_val_subjects}: .*4 training subjects"):
            rotated_subjects(recordings, 0, num_val_subjects)
    for num_folds in (1, 5):
        with pytest.raises(BadInput, match=f"--folds {num_folds}: must be 2 to 4"):
            subject_folds(recordings, num_folds)


# The split


def everything(dataset: HarDataset) -> dict[str, np.ndarray]:
    return dataset.__getitems__(keys(*range(len(dataset))))


def test_splits_hold_the_windows_of_their_subjects_and_statistics_those_trained_on(recordings) -> None:
    splits = split_by_subject(recordings, seed=0, val_subjects=[3])
    raw = np.concatenate([raw_windows("train"), raw_windows("test")])
    rows = {"train": [0, 1, 4, 5], "val": [2, 3], "test": [6, 7, 8]}
    for name, expected in rows.items():
        samples = everything(splits[name])
        np.testing.assert_allclose(samples["signals"], raw[expected], rtol=1e-6)
        assert samples["label"].tolist() == recordings.labels[expected].tolist()
        assert samples["signals"].dtype == np.float32 and samples["label"].dtype == np.int64
    mean, std = splits["train"].statistics
    np.testing.assert_allclose(mean, raw[rows["train"]].mean(axis=(0, 2)), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(std, raw[rows["train"]].std(axis=(0, 2)), rtol=1e-5)


def test_statistics_are_those_of_the_windows_as_recorded(recordings) -> None:
    plain = split_by_subject(recordings, 0, [3])["train"].statistics
    augmented = split_by_subject(recordings, 0, [3], Augmentation(0.0, 0.0, 0.0, 5.0))["train"].statistics
    assert all(np.array_equal(a, b) for a, b in zip(plain, augmented, strict=True))


def test_a_dead_channel_has_deviation_1(recordings) -> None:
    signals = recordings.signals.copy()
    signals[:, 4] = 0.25
    dead = HarRecordings(signals, recordings.labels, recordings.subjects, recordings.is_test)
    mean, std = split_by_subject(dead, 0, [1])["train"].statistics
    assert (mean[4], std[4]) == (0.25, 1.0) and (std > 0).all()


def windows_of(dataset: HarDataset) -> set[bytes]:
    return {window.tobytes() for window in everything(dataset)["signals"]}


def test_rotation_by_seed_holds_everyone_out_and_no_one_is_in_two_splits(recordings) -> None:
    held_out: set[bytes] = set()
    for seed in range(2):
        splits = split_by_subject(recordings, seed, rotated_subjects(recordings, seed, 2))
        parts = {name: windows_of(dataset) for name, dataset in splits.items()}
        assert sum(len(part) for part in parts.values()) == len(set().union(*parts.values())) == 9
        assert len(parts["test"]) == 3
        held_out |= parts["val"]
    assert len(held_out) == 6


def test_folds_hold_everyone_out_once(recordings) -> None:
    for num_folds in (2, 3, 4):
        folds = subject_folds(recordings, num_folds)
        assert len(folds) == num_folds and sorted(chain(*folds)) == [1, 3, 5, 6]
        assert max(map(len, folds)) - min(map(len, folds)) <= 1


def test_nobody_held_out_trains_on_all(recordings) -> None:
    splits = split_by_subject(recordings, 0, [])
    assert splits.keys() == {"train", "test"} and len(splits["train"]) == 6


# The augmentation


def synthetic_recordings(cache_dir: Path) -> HarRecordings:
    rng = np.random.default_rng(0)
    signals = rng.normal(size=(40, 9, 128)) * rng.uniform(0.2, 3, (9, 1)) + rng.normal(size=(9, 1))
    return HarRecordings(
        signals.astype(np.float32), np.arange(40) % 6, np.repeat(np.arange(4), 10), np.arange(40) >= 30
    )


def test_augmentation_equals_a_slow_obvious_reference(cache_dir) -> None:
    recordings = synthetic_recordings(cache_dir)
    strength = Augmentation(max_rotation_deg=20.0, scale_std=0.2, tempo_spread=0.0, jitter_std=0.1)
    seed, epoch, index = 1, 3, np.array([4, 0, 17])
    splits = split_by_subject(recordings, seed, [2], strength)
    augmented = splits["train"].__getitems__(SampleKeys(index, epoch))["signals"]
    raw = recordings.signals[:20].astype(np.float64)
    std = raw.std(axis=(0, 2))
    for row, i in enumerate(index):
        one = np.array([i])
        angle = np.deg2rad(20.0) * (2 * uniform(seed, epoch, one, (), stream=0)[0] - 1)
        draws = normal(seed, epoch, one, (12,), stream=1)[0].astype(np.float64)
        noise = normal(seed, epoch, one, (9, 128), stream=2)[0]
        axis = draws[:3] / np.linalg.norm(draws[:3])
        for triplet in range(3):
            for t in range(128):
                v = raw[i, 3 * triplet : 3 * triplet + 3, t]
                turned = v * np.cos(angle) + np.cross(axis, v) * np.sin(angle) + axis * (axis @ v) * (1 - np.cos(angle))
                for j in range(3):
                    c = 3 * triplet + j
                    scaled = turned[j] * (1 + 0.2 * draws[3 + c])
                    expected = scaled + 0.1 * std[c] * noise[c, t]
                    assert augmented[row, c, t] == pytest.approx(expected, abs=2e-5)


def test_rotation_preserves_norms_of_the_physical_vectors(cache_dir) -> None:
    recordings = synthetic_recordings(cache_dir)
    augment = WindowAugmenter(Augmentation(45.0, 0.0, 0.0, 0.0), np.ones(9), seed=0)
    raw = augment(recordings.signals, 0, np.arange(40))
    before = np.linalg.norm(recordings.signals.reshape(40, 3, 3, 128), axis=2)
    after = np.linalg.norm(raw.reshape(40, 3, 3, 128), axis=2)
    np.testing.assert_allclose(after, before, rtol=1e-4)
    assert np.abs(raw - recordings.signals).max() > 0.1


def test_tempo_equals_interpolation_one_by_one() -> None:
    rng = np.random.default_rng(0)
    signals = rng.normal(size=(4, 2, 128)).astype(np.float32)
    factors = np.array([1.0, 1.15, 0.85, 2.0], np.float32)
    played = at_tempo(signals, factors)
    for window, factor, result in zip(signals, factors, played, strict=True):
        times = (np.arange(128) - 63.5) * float(factor) + 63.5
        for channel, values in zip(window, result, strict=True):
            np.testing.assert_allclose(values, np.interp(times, np.arange(128), channel), atol=1e-4)
    np.testing.assert_allclose(played[0], signals[0], atol=1e-6)


def test_tempos_fill_their_range() -> None:
    """A ramp tells its slope."""
    ramp = np.tile(np.arange(128, dtype=np.float32), (2000, 9, 1))
    augment = WindowAugmenter(Augmentation(0.0, 0.0, 0.15, 0.0), np.ones(9), seed=0)
    slopes = np.diff(augment(ramp, 0, np.arange(2000))[:, :, 60:68], axis=2)
    np.testing.assert_allclose(slopes, slopes[:, :1, :1] * np.ones_like(slopes), rtol=1e-3)
    assert 0.849 < slopes.min() < 0.853 and 1.147 < slopes.max() < 1.151
    assert slopes.mean() == pytest.approx(1.0, abs=0.01)


def test_angles_stay_within_the_limit_and_axes_go_everywhere() -> None:
    augment = WindowAugmenter(Augmentation(15.0, 0.0, 0.0, 0.0), np.ones(9), seed=0)
    turns = augment.linear_map(0, np.arange(2000))[:, 0].astype(np.float64)
    angles = np.rad2deg(np.arccos(np.clip((np.trace(turns, axis1=1, axis2=2) - 1) / 2, -1, 1)))
    assert 14.5 < angles.max() < 15.01
    assert np.mean(angles) == pytest.approx(7.5, abs=0.5)
    axes = np.stack([turns[:, 2, 1] - turns[:, 1, 2], turns[:, 0, 2] - turns[:, 2, 0]], axis=1)
    assert np.abs(np.mean(np.sign(axes), axis=0)).max() < 0.1


def test_rotation_matrices_are_rotations() -> None:
    rng = np.random.default_rng(0)
    turns = rotation_matrices(rng.normal(size=(50, 3)), rng.uniform(-3, 3, 50))
    np.testing.assert_allclose(turns @ turns.swapaxes(1, 2), np.broadcast_to(np.eye(3), (50, 3, 3)), atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(turns), 1.0)
    quarter = rotation_matrices(np.array([[0.0, 0.0, 2.0]]), np.array([np.pi / 2]))
    np.testing.assert_allclose(quarter[0] @ [1, 0, 0], [0, 1, 0], atol=1e-12)


def test_augmentation_depends_on_epoch_and_sample_not_on_the_batch(recordings, cache_dir) -> None:
    splits = split_by_subject(recordings, 0, [1], Augmentation(15.0, 0.1, 0.1, 0.05))
    train = splits["train"]
    together = train.__getitems__(keys(2, 0, 3, epoch=1))["signals"]
    for row, i in enumerate([2, 0, 3]):
        alone = train.__getitems__(keys(i, epoch=1))["signals"][0]
        assert np.array_equal(alone, together[row])
    assert not np.allclose(train.__getitems__(keys(2, epoch=2))["signals"][0], together[0])
    plain = split_by_subject(recordings, 0, [1])
    for name in ("val", "test"):
        assert np.array_equal(everything(splits[name])["signals"], everything(plain[name])["signals"])


def test_no_augmentation_and_zero_augmentation_change_nothing(recordings, cache_dir) -> None:
    plain = split_by_subject(recordings, 0, [1])["train"]
    zero = split_by_subject(recordings, 0, [1], Augmentation(0.0, 0.0, 0.0, 0.0))
    batch = plain.__getitems__(keys(0, 1))["signals"]
    assert np.array_equal(batch, recordings.signals[recordings.subjects != 1][:2]) and batch.flags.writeable
    np.testing.assert_allclose(zero["train"].__getitems__(keys(0, 1))["signals"], batch, atol=1e-5)


# The real data


def test_the_published_data_set(tmp_path) -> None:
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


# The synthetic recordings


def test_synthetic_recordings_have_the_shape_of_the_real_ones(cache_dir) -> None:
    recordings = load_synthetic_har(cache_dir)
    num_windows = len(recordings.labels)
    assert 4500 <= num_windows <= 6000
    assert recordings.signals.shape == (num_windows, 9, 128) and recordings.signals.dtype == np.float32
    assert np.isfinite(recordings.signals).all()
    assert sorted(set(recordings.subjects.tolist())) == list(range(1, 31))
    assert set(recordings.subjects[recordings.is_test].tolist()) == set(TEST_SUBJECTS)
    assert set(np.bincount(recordings.labels)) == {num_windows // len(CLASSES)}
    gravity = recordings.signals[:, 6:] - recordings.signals[:, :3]
    np.testing.assert_allclose(np.linalg.norm(gravity, axis=1), 1.0, rtol=1e-5)  # in g, at every moment
    splits = split_by_subject(recordings, 0, rotated_subjects(recordings, 0, 4))
    assert len(splits["val"]) == 4 * num_windows // 30 and len(splits["train"]) == 17 * num_windows // 30


def test_neighbouring_synthetic_windows_overlap_by_half() -> None:
    signals = har_synthetic.generate(0)["signals"]
    assert np.array_equal(signals[0, :, 64:], signals[1, :, :64])


def test_synthetic_recordings_are_a_function_of_the_seed() -> None:
    first, again, other = har_synthetic.generate(3), har_synthetic.generate(3), har_synthetic.generate(4)
    for name in first:
        assert np.array_equal(first[name], again[name])
    assert not np.array_equal(first["signals"], other["signals"])


def standardised(network: torch.nn.Module, dataset: HarDataset) -> Standardised:
    model = Standardised(network, len(SIGNALS))
    model.set_statistics(*dataset.statistics)
    return model


def linear_accuracy(splits: dict[str, HarDataset]) -> float:
    samples = everything(splits["train"])
    x, y = torch.from_numpy(samples["signals"]), torch.from_numpy(samples["label"])
    linear = torch.nn.Linear(9 * 128, len(CLASSES))
    model = standardised(torch.nn.Sequential(torch.nn.Flatten(), linear), splits["train"])
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y) + 0.1 * linear.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return accuracy(model, splits["test"])


def accuracy(model: torch.nn.Module, dataset: HarDataset) -> float:
    samples = everything(dataset)
    with torch.no_grad():
        predicted = model(torch.from_numpy(samples["signals"])).argmax(dim=1)
    return float((predicted == torch.from_numpy(samples["label"])).float().mean())


@pytest.mark.slow
def test_a_linear_model_is_clearly_below_the_network(cache_dir) -> None:
    torch.manual_seed(0)
    recordings = load_synthetic_har(cache_dir)
    splits = split_by_subject(recordings, 0, rotated_subjects(recordings, 0, 4), Augmentation(15.0, 0.1, 0.1, 0.05))
    net = standardised(HarNet(), splits["train"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for epoch in range(5):
        order = np.random.default_rng(epoch).permutation(len(splits["train"]))
        for start in range(0, len(order), 32):
            batch = splits["train"].__getitems__(SampleKeys(order[start : start + 32], epoch))
            logits = net(torch.from_numpy(batch["signals"]))
            optimizer.zero_grad()
            functional.cross_entropy(logits, torch.from_numpy(batch["label"])).backward()
            optimizer.step()
    net.eval()
    plain = split_by_subject(recordings, 0, rotated_subjects(recordings, 0, 4))
    assert accuracy(net, splits["test"]) > max(0.85, linear_accuracy(plain) + 0.1)
