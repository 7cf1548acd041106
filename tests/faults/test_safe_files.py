"""Untrusted files run no code and write nothing outside their place; files of a run respect the umask."""

import ast
import json
import os
import pickle
import stat
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import trainer
from data.har.uci_har import load_uci_har
from data.interactions.reader import load_interactions
from tests.conftest import ROOT, WEIGHTED, load
from tests.helpers.malicious import Malicious
from tests.helpers.uci_har_files import write_layout
from tests.helpers.weighted_task import Network, Weighted
from trainer.checkpoint.file import size_and_sum
from trainer.cli import main
from trainer.common.errors import UserError
from trainer.loading.cache import cached_arrays

TINY = ["--task", WEIGHTED, "--epochs", 2, "--num-train", 24, "--batch-size", 8, "--num-threads", 1, "--device", "cpu"]
HAR = ["--mode", "first", "--hidden-dims", 8, "--epochs", 1, "--batch-size", 256, "--num-threads", 1, "--device", "cpu"]
pytestmark = [
    pytest.mark.usefixtures("no_rank_variables"),
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
]


# --- checkpoints made to execute code ----------------------------------------------------------------------------


FORMS = {
    "pickle": lambda content, path: path.write_bytes(pickle.dumps(content)),
    "archive": torch.save,
    "legacy": partial(torch.save, _use_new_zipfile_serialization=False),
}


@pytest.fixture(params=FORMS)
def harm(request, tmp_path):
    """Returns a function that writes a checkpoint with code; asserts after the test that the code was not run."""
    created = tmp_path / "created"
    created.mkdir()
    with pytest.raises(FileExistsError):  # unpickling does run the code
        pickle.loads(pickle.dumps(Malicious(created)))
    created.rmdir()

    def make(path: Path, state=None) -> Path:
        path.unlink(missing_ok=True)  # other hard links to the file stay intact
        FORMS[request.param]({"model": {}, **(state or {}), "extra": Malicious(created)}, path)
        return path

    yield make
    assert not created.exists()


@pytest.fixture
def trained(run_here, tmp_path):
    run_here(*TINY, "--save-dir", tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--resume-from", "{bad}", "--save-dir", "{new}"],
        ["--init-from", "{bad}", "--save-dir", "{new}"],
        ["--eval-only", "--resume-from", "{bad}", "--save-dir", "{new}"],
        ["--predict", "{run}/metrics.jsonl", "--resume-from", "{bad}", "--save-dir", "{new}"],
        ["--encoder-path", "{bad}", "--save-dir", "{new}"],
    ],
)
def test_a_named_file_with_code_is_refused(arguments, harm, run_here, tmp_path):
    bad = harm(tmp_path / "bad.pth")
    (tmp_path / "metrics.jsonl").touch()
    places = {"bad": bad, "new": tmp_path / "new", "run": tmp_path}
    first = HAR if "--encoder-path" in arguments else TINY
    _, err = run_here(*first, *(word.format(**places) for word in arguments), status=2)
    (line,) = err.splitlines()
    assert f"{bad}: " in line
    assert line.endswith("; no code in the file was run")


@pytest.mark.parametrize("manifest", ["as it was", "made to fit", "missing"])
@pytest.mark.parametrize("more", [[], ["--eval-only"], ["--epochs", 3]])
def test_a_run_whose_checkpoints_all_contain_code_is_refused(manifest, more, harm, trained, run_here):
    for path in sorted(trained.glob("*.pth")):
        harm(path, torch.load(path, weights_only=True))
    tell_the_manifest(trained, manifest)
    out, err = run_here(*TINY, *more, "--save-dir", trained, status=2)
    (line,) = err.splitlines()
    assert line.startswith(f"error: --save-dir {trained}: ")
    assert "contains no intact checkpoint" in line
    reason = "its sha256 is not the one in" if manifest == "as it was" else "no code in the file was run"
    assert reason in out


@pytest.mark.parametrize("manifest", ["as it was", "made to fit", "missing"])
def test_a_newest_checkpoint_with_code_is_skipped(manifest, harm, trained, run_here):
    newest = json.loads((trained / "manifest.json").read_text())["checkpoints"][-1]
    state = torch.load(trained / newest["file"], weights_only=True)
    for name in (newest["file"], "last.pth", "final.pth"):
        harm(trained / name, state)
    (trained / "results.json").unlink()
    tell_the_manifest(trained, manifest)
    out, _ = run_here(*TINY, "--save-dir", trained)
    assert "Resuming after optimizer step 3:" in out


def tell_the_manifest(directory: Path, manifest: str) -> None:
    file = directory / "manifest.json"
    if manifest == "missing":
        file.unlink()
    elif manifest == "made to fit":
        content = json.loads(file.read_text())
        for entry in content["checkpoints"]:
            entry |= size_and_sum(directory / entry["file"])
        file.write_text(json.dumps(content))


@pytest.mark.parametrize("place", ["run/code/beside.py", "beside.py"])
def test_a_task_defined_beside_the_run_is_not_executed(place, trained, run_here, tmp_path):
    """A checkpoint names the file of its task, which may be an untrusted file that came with the checkpoint."""
    file = trained.parent / place
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"open({str(tmp_path / 'created')!r}, 'x')\nfrom tests.helpers.weighted_task import Weighted\n")
    for path in trained.glob("*.pth"):
        torch.save(load(path) | {"task": f"{file}:Weighted"}, path)
    tell_the_manifest(trained, "made to fit")
    with pytest.raises(UserError, match=r"loading a run does not execute the file of its task; .* as task="):
        trainer.load(trained)
    assert isinstance(trainer.load(trained, Weighted), Network)
    for more in (["--predict", trained / "metrics.jsonl"], ["--export", tmp_path / "x.pt2"], ["--eval-only"], []):
        _, err = run_here(*more, "--save-dir", trained, status=2)
        named = f"must not set --task {file}:Weighted, which names code; to run it, add the flag to the command"
        assert err == f"error: --save-dir {trained}: {named}\n"
    assert not (tmp_path / "created").exists()


@pytest.mark.parametrize("content", ["object array", "pickle"])
def test_cached_arrays_with_code_are_refused(content, tmp_path):
    created = tmp_path / "created"
    cached_arrays(tmp_path / "cache", "key", lambda: {"x": np.zeros(2)})
    file = tmp_path / "cache" / "key" / "x.npy"
    if content == "pickle":
        file.write_bytes(pickle.dumps(Malicious(created)))
    else:
        array = np.empty(1, object)
        array[0] = Malicious(created)
        np.save(file, array, allow_pickle=True)
    with pytest.raises(UserError, match="is damaged"):
        cached_arrays(tmp_path / "cache", "key", dict)
    assert not created.exists()


# --- archives ----------------------------------------------------------------------------------------------------


def write_zip(path: Path, members: dict[str, bytes], link: str | None = None) -> Path:
    """Writes a zip archive. link: member that is marked as a symbolic link, as Unix programs do."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (stat.S_IFLNK | 0o777 if name == link else stat.S_IFREG | 0o644) << 16
            archive.writestr(info, content)
    return path


def everything_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "cache" not in path.relative_to(folder).parts[:1]}


OUTSIDE = ["../../outside.dat", "/tmp/outside.dat", "a/../../../outside.dat", "\\outside.dat"]


@pytest.fixture
def nothing_written(tmp_path, monkeypatch):
    """Returns the working directory; asserts after the test that only data.zip was written in or above it."""
    folder = tmp_path / "deep" / "down"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    yield folder
    assert everything_below(tmp_path) <= {tmp_path / "deep", folder, *folder.iterdir()}
    assert not Path("/tmp/outside.dat").exists()
    assert [path.name for path in folder.iterdir()] == ["data.zip"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_interactions_are_read_safely_despite_path_traversal(name, nothing_written, tmp_path):
    archive = write_zip(nothing_written / "data.zip", {name: b"user item time\n1 1 1\n1 2 2\n2 1 1\n"})
    assert load_interactions(archive, 1, tmp_path / "cache").num_users == 2


def test_interactions_behind_a_link_in_an_archive_are_refused(nothing_written, tmp_path):
    """The link is not followed; its target is read as the text of the file."""
    secret = tmp_path / "cache" / "secret.dat"
    secret.parent.mkdir()
    secret.write_text("1 1 1\n1 2 2\n2 1 1\n")
    archive = write_zip(nothing_written / "data.zip", {"u.data": str(secret).encode()}, link="u.data")
    with pytest.raises(UserError, match=r"u.data, line 1"):
        load_interactions(archive, 1, tmp_path / "cache")


@pytest.mark.parametrize("name", [*OUTSIDE, "train/../../outside.txt"])
def test_har_is_read_safely_despite_path_traversal(name, nothing_written, tmp_path):
    members = har_members(tmp_path / "cache")
    archive = write_zip(nothing_written / "data.zip", {**members, name: b"outside"})
    assert len(load_uci_har(archive, tmp_path / "cache").labels) == 9


def test_har_behind_a_link_in_an_archive_is_refused(nothing_written, tmp_path):
    members = har_members(tmp_path / "cache")
    secret = tmp_path / "cache" / "secret.txt"
    secret.write_bytes(members["train/y_train.txt"])
    members["train/y_train.txt"] = str(secret).encode()
    archive = write_zip(nothing_written / "data.zip", members, link="train/y_train.txt")
    with pytest.raises(UserError, match=r"y_train.txt, line 1"):
        load_uci_har(archive, tmp_path / "cache")


def har_members(folder: Path) -> dict[str, bytes]:
    layout = write_layout(folder / "layout")
    return {str(file.relative_to(layout)): file.read_bytes() for file in layout.rglob("*.txt")}


# --- the umask ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=[0o022, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def assert_modes(folder: Path, umask: int) -> None:
    for path in [folder, *folder.rglob("*")]:
        expected = (0o777 if path.is_dir() else 0o666) & ~umask
        assert path.stat().st_mode & 0o777 == expected, path


def test_every_file_of_a_run_respects_the_umask(umask, run_here, tmp_path):
    run_here(*TINY, "--save-every-steps", 1, "--save-dir", tmp_path / "run")
    run_here(*TINY, "--save-dir", tmp_path / "run", "--fresh")
    assert {"lock", "state.json", "best.pth", "previous-1", "logs"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }
    assert_modes(tmp_path / "run", umask)


def test_the_cache_and_predictions_respect_the_umask(umask, signals_restored, tmp_path):
    layout, cache = write_layout(tmp_path / "layout"), tmp_path / "cache"
    arguments = [*HAR, "--cache-dir", cache, "--save-dir", tmp_path / "run"]
    train = [*arguments, "--data-dir", layout, "--val-subjects", 1]
    np.save(tmp_path / "new.npy", np.zeros((2, 9, 128), np.float32))
    label = [*arguments, "--predict", tmp_path / "new.npy", "--output", tmp_path / "labels.csv"]
    for argv in (train, label):
        assert main([*map(str, argv)], several_devices=False) == 0
    assert list(cache.rglob("*.npy"))
    assert_modes(cache, umask)
    assert_modes(tmp_path / "run", umask)
    assert (tmp_path / "labels.csv").stat().st_mode & 0o777 == 0o666 & ~umask


# --- calls in the source code ------------------------------------------------------------------------------------

SAFE_ARGUMENT = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "np.save": ("allow_pickle", False),
}
UNSAFE = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "torch.jit.load", "torch.hub.load",
    "shutil.unpack_archive", "eval", "exec", "tempfile.mkstemp", "tempfile.NamedTemporaryFile",
}  # fmt: skip
UNSAFE_METHODS = {"extract", "extractall"}


def calls():
    """Yields (place, dotted name, keyword arguments) of every call in the code that a user runs."""
    for folder in ("trainer", "tasks", "models", "data", "benchmarks", "examples", "."):
        files = (ROOT / folder).glob("*.py") if folder == "." else (ROOT / folder).rglob("*.py")
        for file in files:
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call):
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", ast.unparse(node.func), node.keywords


def test_every_torch_load_is_safe():
    found = set()
    for place, name, keywords in calls():
        assert name not in UNSAFE, f"{place}: {name}"
        assert name.rpartition(".")[2] not in UNSAFE_METHODS, f"{place}: {name}"
        if name in SAFE_ARGUMENT:
            found.add(name)
            argument, safe = SAFE_ARGUMENT[name]
            given = {word.arg: ast.literal_eval(word.value) for word in keywords if word.arg == argument}
            assert given == {argument: safe}, f"{place}: {name} without {argument}={safe}"
    assert found == SAFE_ARGUMENT.keys()
