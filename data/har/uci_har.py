"""Downloads, verifies and reads the published UCI HAR data set.

Source: Anguita et al., "A public domain dataset for human activity recognition using smartphones", ESANN 2013. Thirty
people wore a phone at the waist. The sample rate is 50 Hz; windows last 2.56 s and overlap by half.
"""

import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np

from data.files import DataFile, Folder, Source, Zip
from data.har.download import Progress, fetch
from data.har.windows import CLASSES, SIGNALS, WINDOW_LENGTH, HarRecordings
from trainer.common.errors import UserError
from trainer.common.files import stamp
from trainer.loading.cache import Arrays, cached_arrays, key_of

ADDRESSES = (
    "https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip",
    "https://archive.ics.uci.edu/ml/machine-learning-databases/00240/UCI%20HAR%20Dataset.zip",
)
"""Addresses of two files, 61 MB each: a zip that contains `UCI HAR Dataset.zip`, and `UCI HAR Dataset.zip` itself."""
SHA256 = {
    "train/y_train.txt": "415b3357e2e2d5e70a45c781947c6bdd80e0410a579d862eedcd6bbce3c694ef",
    "train/subject_train.txt": "66e1e2fbe9b396fa5155f531dc3348c803f503be663e2318772d49947db9153a",
    "train/Inertial Signals/body_acc_x_train.txt": "89f7bf5e360384804439d00f463dd2f717c452c683cac6c0a09b1a191d8ce4a2",
    "train/Inertial Signals/body_acc_y_train.txt": "4775a586a5a1acc6706edee08c685835daea7bc1d9274e7e7e8d660fea173944",
    "train/Inertial Signals/body_acc_z_train.txt": "9155718981ff1331dcd2d30aee545905ffba71af9ece5a08d6dfdeeb7d2ec4fb",
    "train/Inertial Signals/body_gyro_x_train.txt": "423f6806f09059de3c1f443cf1d04a3c3907dc7ee17b5d296ed775b07aa6cde6",
    "train/Inertial Signals/body_gyro_y_train.txt": "42419d8aaefd1a319561998defb167bfa57f7e51d656b6012d5a59c0b10f5260",
    "train/Inertial Signals/body_gyro_z_train.txt": "05bc629faee918b0f5b99cd2e68f860c785889627ec8efeb85c29282f3963988",
    "train/Inertial Signals/total_acc_x_train.txt": "41a7fe1da7b529cc6c2c3d7df97c98752bea74d7a142673dd59c7820fad3b5e6",
    "train/Inertial Signals/total_acc_y_train.txt": "03bd3a80c0c04bf354597ad62920158b4b6605e157d856a1aab9abb357d40c5d",
    "train/Inertial Signals/total_acc_z_train.txt": "5be3b593f88d49bb8f740c1c41379fc928ea8608d706594ebbba81cd800a5a33",
    "test/y_test.txt": "2a94cb53ca46b956c1b2aebd4a09a72badd8a8e9ea9cdfe9f31b3306a08666bb",
    "test/subject_test.txt": "63b8c577f4a85431c06bd87f6384608c90a9f72f05c7956dd21255dc63515c07",
    "test/Inertial Signals/body_acc_x_test.txt": "c07eb8ee8c76eafcd94b42111082700e10f4956b769fbbb0d5413c14f38774fa",
    "test/Inertial Signals/body_acc_y_test.txt": "0ed0057b41f6870b16a6953ef17f6d42bc5542fa304319fb6b7f424dd3380f0b",
    "test/Inertial Signals/body_acc_z_test.txt": "a2b58317137533bdbf2342bf301ae854c15b1168259cc7b582c2dd131e3d81d5",
    "test/Inertial Signals/body_gyro_x_test.txt": "fb4f27f13e4e08055043f34ed52f6d8bbe8ebce7dff9475ff92be03b3d3f607c",
    "test/Inertial Signals/body_gyro_y_test.txt": "d2501166b2b1f645b51f722fcf31f3aa1e9a3edae18d49322612f37b4495cb80",
    "test/Inertial Signals/body_gyro_z_test.txt": "90a18ce534be0dfc616cefdac9874e2ea599ae20421cd161361c2a33f40cfa5e",
    "test/Inertial Signals/total_acc_x_test.txt": "ea71c339c828561bc1dc6f7301a54aeb7e61e6312cb2387ebaea832ffd04203d",
    "test/Inertial Signals/total_acc_y_test.txt": "32692c617b40c16e020bf059a316bd6bf3a63d771f030dfc5fa4003f390b6f67",
    "test/Inertial Signals/total_acc_z_test.txt": "622ddf1d9532fbe340472074ef1edd1a2f58aa332682542bb36a8c03c9ba9e04",
}
"""SHA-256 of each published file that is read."""

_FORMAT_VERSION = 1
_TOP_FOLDER = "UCI HAR Dataset"


def load_uci_har(path: Path, cache_dir: Path) -> HarRecordings:
    """Reads the published data set; the parsed arrays are cached.

    path: the folder `UCI HAR Dataset`, its parent, its zip, a zip that contains this zip, or a folder with `UCI HAR
    Dataset.zip`.

    Raises UserError, with file, line and column, for missing or malformed data.
    """
    source = _find_if_there(path)
    if source is None:
        raise UserError(
            f"--data-dir {path}: contains no folder named train with the files of UCI HAR; give {_TOP_FOLDER} or its "
            "zip"
        )
    key = key_of("uci_har", _FORMAT_VERSION, source.stamps())
    return HarRecordings.of_arrays(cached_arrays(cache_dir, key, lambda: _parse(source)))


def download_uci_har(
    path: Path,
    cache_dir: Path,
    progress: Progress,
    addresses: Sequence[str] = ADDRESSES,
    sha256: Mapping[str, str] = SHA256,
) -> None:
    """Downloads the data set unless it exists, and verifies it.

    Existing data are verified again only if the files change.

    path: a zip if the name ends in .zip; otherwise a folder for `UCI HAR Dataset.zip`. sha256: expected checksums by
    file. addresses: URLs, tried in order.

    Raises UserError if the download fails or a file differs from the published one.
    """
    there = _find_if_there(path)
    if there is None:
        target = path if path.suffix == ".zip" else path / f"{_TOP_FOLDER}.zip"
        fetch(addresses, target, lambda file: _verify(_Published(Zip(file, "the download")), sha256), progress)
        return
    key = key_of("uci_har-verified", there.stamps(), sorted(sha256.items()))
    try:
        cached_arrays(cache_dir, key, lambda: _verify(there, sha256))
    except UserError as error:
        raise UserError(
            f"{error}. Delete this file so that --download can replace it, or leave out --download to use it anyway"
        ) from None


def _verify(source: "_Published", sha256: Mapping[str, str]) -> Arrays:
    """Raises UserError for a file with a wrong checksum. Returns an empty dict, which the cache stores as success."""
    for name, expected in sha256.items():
        found = hashlib.sha256(source.read(name)).hexdigest()
        if found != expected:
            raise UserError(f"{source.where(name)}: is not the published file (its sha256 is {found}, not {expected})")
    return {}


class _Published:
    """Reads files of the data set by names relative to its top folder."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def stamps(self) -> list[tuple[str | int, ...]]:
        if isinstance(self._source, Folder):
            return [stamp(file) for file in sorted(self._source.path.glob("t*/**/*.txt"))]
        return [stamp(self._source.path)]

    def where(self, name: str) -> str:
        return self._source.where_of(name)

    def read(self, name: str) -> bytes:
        source, top = self._holder
        return DataFile(source, top + name).read()

    @cached_property
    def _holder(self) -> tuple[Source, str]:
        """Source (folder, zip, or zip in a zip) with the data set, and the data set's path in it: "" or "x/"."""
        source = self._source
        top = "" if isinstance(source, Folder) else _top_folder(source)
        inner = [file for file in source.files if file.bare_name.endswith(".zip")] if top is None else []
        if inner:
            source = Zip(source.path, source.where, inner[0].read())
            top = _top_folder(source)
        if top is None:
            advice = "check the path; unpack the zip if it contains your own recordings"
            raise UserError(f"{source.where} contains no folder named train with the files of UCI HAR; {advice}")
        return source, top


def _top_folder(source: Source) -> str | None:
    for file in source.files:
        folders = PurePosixPath(file.name).parts[:-1]
        if "train" in folders[:2]:
            return "".join(f"{folder}/" for folder in folders[: folders.index("train")])
    return None


def is_uci_har(path: Path) -> bool:
    """Returns whether a path is a zip, or a folder that contains the data set unpacked or as a zip."""
    if path.is_file():
        return path.suffix == ".zip" or zipfile.is_zipfile(path)
    return _find_if_there(path) is not None


def _find_if_there(path: Path) -> _Published | None:
    path = path.resolve()
    for folder in (path, path / _TOP_FOLDER):
        if (folder / "train").is_dir():
            return _Published(Folder(folder))
    for archive in (path, path / f"{_TOP_FOLDER}.zip"):
        if archive.is_file():
            return _Published(Zip(archive))
    return None


def _parse(source: _Published) -> Arrays:
    parts = {part: _parse_part(source, part) for part in ("train", "test")}
    for subject in np.intersect1d(parts["train"]["subjects"], parts["test"]["subjects"]):
        where = source.where("test/subject_test.txt")
        raise UserError(f"{where}: subject {subject} is also in the training set; use the official split")
    arrays = {name: np.concatenate([part[name] for part in parts.values()]) for name in parts["train"]}
    arrays["is_test"] = np.repeat([False, True], [len(part["labels"]) for part in parts.values()])
    return arrays


def _parse_part(source: _Published, part: str) -> Arrays:
    label_file, subject_file = f"{part}/y_{part}.txt", f"{part}/subject_{part}.txt"
    labels = _parse_integers(source, label_file, _lines(source, label_file))
    for row in np.flatnonzero((labels < 1) | (labels > len(CLASSES))):
        known = f"the classes are 1 to {len(CLASSES)}"
        raise UserError(
            f"{source.where(label_file)}, line {row + 1}: unknown class label {labels[row]} ({known}); download "
            "the data set again"
        )
    subjects = _parse_integers(source, subject_file, _equally_many_lines(source, subject_file, label_file, labels))
    signals = np.empty((len(labels), len(SIGNALS), WINDOW_LENGTH), np.float32)
    for channel, signal in enumerate(SIGNALS):
        file = f"{part}/Inertial Signals/{signal}_{part}.txt"
        lines = _equally_many_lines(source, file, label_file, labels)
        _parse_windows(source, file, lines, signals[:, channel])
    return {"signals": signals, "labels": labels - 1, "subjects": subjects}


def _lines(source: _Published, name: str) -> list[bytes]:
    lines = source.read(name).splitlines()
    if not lines:
        raise UserError(f"{source.where(name)}: is empty; download the data set again")
    return lines


def _equally_many_lines(source: _Published, name: str, reference: str, labels: np.ndarray) -> list[bytes]:
    lines = _lines(source, name)
    if len(lines) != len(labels):
        raise UserError(
            f"{source.where(name)}: has {len(lines)} lines, but {reference} has {len(labels)}; use files from "
            "the same copy of the data set"
        )
    return lines


def _parse_integers(source: _Published, name: str, lines: list[bytes]) -> np.ndarray:
    numbers = np.empty(len(lines), np.int64)
    for row, line in enumerate(lines):
        try:
            numbers[row] = int(line)
        except (ValueError, OverflowError):
            shown = line.decode(errors="replace")
            raise UserError(
                f"{source.where(name)}, line {row + 1}: {shown!r} is not a whole number; download the data again"
            ) from None
    return numbers


def _parse_windows(source: _Published, name: str, lines: list[bytes], out: np.ndarray) -> None:
    for row, line in enumerate(lines):
        values = _parse_line(line)
        if values is None or values.size != out.shape[1] or not np.isfinite(values).all():
            reason = _what_is_wrong(line, out.shape[1])
            raise UserError(f"{source.where(name)}, line {row + 1}{reason}; download the data set again")
        out[row] = values


def _parse_line(line: bytes) -> np.ndarray | None:
    try:
        return np.fromstring(line, np.float32, sep=" ")
    except ValueError:
        return None


def _what_is_wrong(line: bytes, num_columns: int) -> str:
    fields = line.decode(errors="replace").split()
    if len(fields) != num_columns:
        return f": has {len(fields)} columns instead of {num_columns}"
    for column, field in enumerate(fields, start=1):
        values = _parse_line(field.encode())
        if values is None or values.size != 1:
            return f", column {column}: {field!r} is not a number"
        if not np.isfinite(values[0]):
            return f", column {column}: {field} is not a finite number"
    raise AssertionError(f"nothing wrong with {line!r}")
