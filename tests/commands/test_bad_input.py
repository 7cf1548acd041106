"""Whatever is wrong, the user reads one clear message and nothing is half-written; and every way to start again.

Bad HAR data is in test_har_data.py. Most runs call the command line's own `main` in this process; where a process
matters (its lock, its limits, its children) a real one is started.
"""

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.conftest import (
    RANK_VARIABLES,
    ROOT,
    WEIGHTED,
    assert_same_bits,
    largest_difference,
    launcher,
    load,
    read_metrics,
)
from trainer.cli import main
from trainer.parallel.signals import STOP_SIGNALS

TINY = ["--task", WEIGHTED, "--epochs", 1, "--num-train", 24, "--batch-size", 8, "--lr", 0.01, "--num-threads", 1]
STEPS_PER_EPOCH = 3


@pytest.fixture(autouse=True)
def shell(monkeypatch):
    """No rank variables, and this process's own signal handlers back at the end."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def cli(capsys):
    """Runs a command line in this process: (exit status, standard output, lines of standard error)."""

    def run(*args, several_devices=False):
        capsys.readouterr()
        status = main([str(arg) for arg in args], several_devices)
        out, err = capsys.readouterr()
        return status, out, err.splitlines()

    return run


@pytest.fixture
def train(cli):
    """A tiny run in a directory, which must succeed; returns what it printed."""

    def run(directory, *more):
        status, out, err = cli(*TINY, "--save-dir", directory, *more)
        assert (status, err) == (0, [])
        return out

    return run


def assert_messages(lines, *parts):
    """One line for each part, which it contains, and no other line."""
    assert len(lines) == len(parts), lines
    for part in parts:
        assert any(line.startswith("error: ") and part in line for line in lines), (part, lines)


@pytest.fixture
def refused(cli):
    """A command line that must be refused with one message for each part."""

    def run(parts, *args, **options):
        status, out, err = cli(*args, **options)
        assert status == 2
        assert_messages(err, *parts)
        return out

    return run


REFUSAL = ("lock", "state.json")
"""What a refusal may change of a run: who was there, and what became of it."""


def contents(directory, leave_out=("lock",)):
    """Every file with its bytes; the lock names whoever looked last."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files if path.name not in leave_out}


def newest_checkpoint(directory):
    return max(directory.glob("checkpoint_*.pth"), key=lambda path: load(path)["step"])


# --- command lines -----------------------------------------------------------------------------------------------

WRONG_COMMAND_LINES = [
    ("--batch-size 0", ["--batch-size 0: must be at least 1"]),
    ("--num-train 0", ["--num-train 0: must be at least 1"]),
    ("--epochs 2 --warmup-epochs 3", ["--warmup-epochs 3: must not exceed --epochs 2"]),
    ("--epochs 2 --warmup-steps 7", ["--warmup-steps 7: the whole run has 6 steps"]),
    ("--warmup-epochs 1 --warmup-steps 1", ["--warmup-epochs and --warmup-steps: exclude each other"]),
    ("--min-lr 1", ["--min-lr 1.0: must not be above --lr 0.01"]),
    ("--no-amp --amp bf16", ["--no-amp and --amp bf16: exclude each other"]),
    ("--dtype float64 --amp bf16", ["--amp bf16: is for --dtype float32"]),
    ("--global-batch-size 8 --grad-accum-steps 2", ["--global-batch-size 8 and --grad-accum-steps 2: exclude"]),
    ("--eval-only --fresh", ["--eval-only and --fresh: exclude each other"]),
    ("--predict x.csv --eval-only", ["--predict and --eval-only: exclude each other; give one"]),
    (
        "--predict x.csv --fresh --init-from main.py",
        ["--predict and --fresh: exclude each other", "--predict and --init-from: exclude each other"],
    ),
    ("--output x.csv", ["--output x.csv: belongs to --predict; leave it out"]),
    ("--predict", ["--predict: needs a value"]),
    ("--seeds 0 --folds 1", ["--seeds 0: must be at least 1", "--folds 1: must be at least 2, or 0 for none"]),
    (
        "--seeds 2 --eval-only --resume-from main.py",
        ["--seeds 2 and --eval-only: exclude each other", "--seeds 2 and --resume-from: exclude each other"],
    ),
    ("--seeds 2 --folds 3 --predict x.csv", ["--seeds 2 --folds 3 and --predict: exclude each other"]),
    ("--folds 3", ["--folds 3: Weighted has no `fold_flags`"]),
    ("--seeds 2 --epochs 2 --seed 9223372036854775807", ["--seed 9223372036854775808: must be at least 0 and below"]),
    ("--init-from no/file.pth", ["--init-from no/file.pth: does not exist"]),
    ("--resume-from tests", ["--resume-from tests: is not a file"]),
    ("--resume-from main.py --init-from main.py", ["--resume-from and --init-from: exclude each other"]),
    ("--resume-from main.py --fresh", ["--fresh and --resume-from: exclude each other"]),
    ("--device cuda:99", ["--device cuda:99: "]),
    ("--device tpu", ["--device tpu: must be auto, cpu, cuda or cuda:N"]),
    ("--task nope --lr 0", ["--task nope: must be one of har", "--lr 0: must be above 0"]),
    ("--batchsize 4 stray", ["--batchsize: no such flag; did you mean --batch-size?", "stray: not expected here"]),
    (
        "--batch-size 0 --lr x --width -3 --amp fp8 --seed",
        [
            "--batch-size 0: must be at least 1",
            "--lr x: must be a number",
            "--width -3: must be at least 1",
            "--amp fp8: must be one of auto, bf16, fp16, off",
            "--seed: needs a value",
        ],
    ),
]


@pytest.mark.parametrize(("args", "parts"), WRONG_COMMAND_LINES, ids=[args for args, _ in WRONG_COMMAND_LINES])
def test_mistakes_of_a_command_line_are_shown_together(args, parts, refused, tmp_path):
    refused(parts, *TINY, "--save-dir", tmp_path / "run", *args.split())
    assert not contents(tmp_path)


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ("", ["--multi-gpu: needs a value, dp or ddp"]),
        ("--multi-gpu dp --gpu-ids 0,9", ["--gpu-ids 0,9: there is no GPU"]),
        ("--multi-gpu dp --nproc 2", ["--nproc 2: is for --multi-gpu ddp"]),
        ("--multi-gpu ddp --nproc 0 --batch-size 0", ["--nproc 0: must be at least 1", "--batch-size 0: must be"]),
        ("--multi-gpu dp --predict x.csv", ["--predict: runs on one device; use main.py"]),
        ("--multi-gpu dp --sync-bn", ["--sync-bn: needs --multi-gpu ddp on GPUs"]),
        ("--multi-gpu ddp --local-rank 0", ["--local-rank 0: RANK and WORLD_SIZE are not set"]),
    ],
)
def test_mistakes_about_several_devices(args, parts, refused, tmp_path):
    refused(parts, *TINY, "--save-dir", tmp_path / "run", *args.split(), several_devices=True)
    assert not contents(tmp_path)


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1", ["RANK=2 must be below WORLD_SIZE=2"]),
        ("RANK=0 WORLD_SIZE=two MASTER_ADDR=127.0.0.1 MASTER_PORT=1", ["WORLD_SIZE=two"]),
        (
            "RANK=0",
            ["WORLD_SIZE is not set", "MASTER_ADDR is not set", "MASTER_PORT is not set"],
        ),
    ],
)
def test_rank_variables_that_contradict_themselves(variables, parts, refused, tmp_path, monkeypatch):
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    refused(parts, *TINY, "--multi-gpu", "ddp", "--save-dir", tmp_path / "run", several_devices=True)
    assert not contents(tmp_path)


def test_launcher_of_several_processes_for_a_run_of_one(refused, tmp_path, monkeypatch):
    """`torchrun --nproc_per_node=2 main.py`"""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    refused(["WORLD_SIZE=2 is set"], *TINY, "--save-dir", tmp_path / "run")
    refused(["WORLD_SIZE=2 is set"], *TINY, "--multi-gpu", "dp", "--save-dir", tmp_path / "run", several_devices=True)
    assert not contents(tmp_path)


def test_launcher_of_several_runs(refused, tmp_path, monkeypatch):
    """`torchrun main_multi_gpu.py --seeds 2`"""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    args = [*TINY, "--multi-gpu", "ddp", "--seeds", 2, "--save-dir", tmp_path / "run"]
    refused(["--seeds 2: starts its runs by itself; leave the launcher out"], *args, several_devices=True)
    assert not contents(tmp_path)


def test_several_runs_in_the_folder_of_a_single_one(train, refused, tmp_path):
    train(tmp_path)
    before = contents(tmp_path)
    refused(
        [f"--save-dir {tmp_path}: holds a single run; --seeds 2 needs"], *TINY, "--seeds", 2, "--save-dir", tmp_path
    )
    assert contents(tmp_path) == before


def test_nobody_else_comes(refused, tmp_path, monkeypatch):
    """Nothing listens on port 1."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    args = [*TINY, "--multi-gpu", "ddp", "--device", "cpu", "--dist-timeout-s", 1, "--save-dir", tmp_path / "run"]
    refused(
        ["rank 1 of 2 could not meet the others at 127.0.0.1:1 within --dist-timeout-s 1"], *args, several_devices=True
    )
    assert not contents(tmp_path)


@pytest.mark.parametrize(
    ("content", "name", "part"),
    [
        (None, "Mine", "there is no file"),
        ("def broken(:", "Mine", "cannot import"),
        ("import no_such_module_at_all", "Mine", "No module named 'no_such_module_at_all'"),
        ("x = 1", "Mine", "defines no Mine"),
        ("class Mine: pass", "Mine", "Mine is not a subclass of trainer.task.Task"),
    ],
)
def test_wrong_task_file(content, name, part, refused, tmp_path):
    file = tmp_path / f"{tmp_path.name}.py"
    if content is not None:
        file.write_text(content)
    path_before = list(sys.path)
    refused([part], "--task", f"{file}:{name}", "--save-dir", tmp_path / "run")
    sys.path[:] = path_before
    assert not (tmp_path / "run").exists()


# --- the run directory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--eval-only"], ["--fresh"]])
@pytest.mark.parametrize("place", ["file", "file/run", "/proc/nowhere/run"])
def test_folder_that_cannot_be_written_to(place, more, refused, tmp_path):
    (tmp_path / "file").write_text("precious")
    directory = tmp_path / place
    refused([f"--save-dir {directory}: "], *TINY, "--save-dir", directory, *more)
    assert contents(tmp_path) == {"file": b"precious"}


@pytest.mark.slow
def test_error_in_a_group_of_processes_is_printed_once(command, tmp_path):
    (tmp_path / "file").write_text("precious")
    done = command(*launcher(2), *TINY, "--device", "cpu", "--save-dir", tmp_path / "file", status=2)
    assert_messages(done.stderr.splitlines(), f"--save-dir {tmp_path / 'file'}: ")
    assert "Traceback" not in done.stdout


def test_full_disk_while_saving(train, tmp_path, environment):
    """Files may not grow beyond 4 KiB: a checkpoint does, the logs do not."""
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    for directory in (broken, unbroken):
        train(directory)
    before = contents(broken)
    goes_on = [*TINY, "--epochs", 2, "--save-dir", broken]
    done = subprocess.run(
        [sys.executable, "main.py", *map(str, goes_on)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert done.returncode == 2, done.stderr
    assert_messages(done.stderr.splitlines(), f"--save-dir {broken}: cannot write checkpoint_2.pth: File too large")
    assert "earlier checkpoints are intact" in done.stderr
    after = contents(broken)
    for name in ("checkpoint_1.pth", "last.pth", "best.pth", "manifest.json"):
        assert after[name] == before[name]
    assert not [name for name in after if name.endswith(".tmp")]
    train(broken, "--epochs", 2)
    train(unbroken, "--epochs", 2)
    assert_same_bits(load(broken / "final.pth"), load(unbroken / "final.pth"))


@pytest.mark.parametrize("name", ["train.log", "val.log"])
def test_full_disk_while_logging(name, refused, tmp_path):
    (tmp_path / name).symlink_to("/dev/full")
    refused([f"--save-dir {tmp_path}: "], *TINY, "--save-dir", tmp_path)
    assert not list(tmp_path.glob("*.tmp"))


def test_two_jobs_on_one_folder(refused, tmp_path, environment):
    args = [*TINY, "--epochs", 100, "--delay-s", 0.5, "--save-dir", tmp_path]
    first = subprocess.Popen(
        [sys.executable, "main.py", *map(str, args)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not (tmp_path / "config.json").exists():
            assert first.poll() is None
            time.sleep(0.02)
        for more in ([], ["--fresh"]):
            refused([f"--save-dir {tmp_path}: in use by process {first.pid} "], *args, *more)
        assert not list(tmp_path.glob("previous-*"))
    finally:
        first.kill()
        first.wait()


@pytest.mark.parametrize("exists", [True, False])
def test_evaluating_an_empty_folder(exists, refused, tmp_path):
    directory = tmp_path / "run"
    if exists:
        directory.mkdir()
    refused(
        [f"--save-dir {directory}: holds no intact checkpoint to use"],
        *TINY,
        "--save-dir",
        directory,
        "--eval-only",
    )
    assert directory.exists() == exists
    assert not contents(tmp_path)


def test_truncated_checkpoint_is_set_aside_and_the_run_ends_as_if_nothing_had_happened(train, tmp_path):
    """Killed after epoch 3 of 4, with the newest file cut short."""
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    for directory in (broken, unbroken):
        train(directory, "--epochs", 4)
    for name in ("checkpoint_4.pth", "best.pth", "last.pth", "final.pth", "results.json"):
        (broken / name).unlink()
    newest = newest_checkpoint(broken)
    newest.write_bytes(newest.read_bytes()[:-1000])
    out = train(broken, "--epochs", 4)
    assert f"{newest} is damaged" in out
    assert newest.with_suffix(".damaged").exists()
    assert f"Resuming after optimizer step {2 * STEPS_PER_EPOCH}" in out
    for name in ("final.pth", "best.pth"):
        assert_same_bits(load(broken / name), load(unbroken / name))
    assert read_metrics(broken, "epoch") == read_metrics(unbroken, "epoch")


def test_all_checkpoints_damaged(train, refused, tmp_path):
    """Said as often as it is asked: a second try must not start over in silence."""
    train(tmp_path, "--epochs", 2)
    for path in tmp_path.glob("checkpoint_*.pth"):
        path.write_bytes(path.read_bytes()[:-100])
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    for _ in range(2):
        refused([f"--save-dir {tmp_path}: no checkpoint in it is intact"], *TINY, "--epochs", 2, "--save-dir", tmp_path)
        assert (tmp_path / "metrics.jsonl").read_bytes() == metrics
    train(tmp_path, "--epochs", 2, "--fresh")


@pytest.mark.parametrize("more", [["--epochs", 2], ["--eval-only"]])
def test_checkpoint_of_another_model(more, train, refused, tmp_path):
    train(tmp_path)
    before = contents(tmp_path, REFUSAL)
    refused(["--width"], *TINY, "--save-dir", tmp_path, "--width", 8, *more)
    assert contents(tmp_path, REFUSAL) == before


def test_run_of_another_task(train, refused, tmp_path):
    train(tmp_path)
    before = contents(tmp_path, REFUSAL)
    task = f"{ROOT}/examples/own_task.py:Spirals"
    refused([f"--task {task}: the checkpoint is of {WEIGHTED}"], "--task", task, "--save-dir", tmp_path)
    assert contents(tmp_path, REFUSAL) == before


# --- files named on the command line -----------------------------------------------------------------------------


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(params=["empty", "text", "truncated", "pickle", "malicious pickle", "malicious checkpoint", "other"])
def bad_file(request, train, tmp_path):
    """(file that is no checkpoint, why it is refused)"""
    path, created = tmp_path / "bad.pth", tmp_path / "created"
    if request.param == "empty":
        path.touch()
    elif request.param == "text":
        path.write_text("These are not the weights you are looking for.\n" * 100)
    elif request.param == "truncated":
        train(tmp_path / "source")
        path.write_bytes((tmp_path / "source" / "last.pth").read_bytes()[:5000])
    elif request.param == "pickle":
        path.write_bytes(pickle.dumps({"model": {}, "position": {}}))
    elif request.param == "malicious pickle":
        path.write_bytes(pickle.dumps(Malicious(created)))
    elif request.param == "malicious checkpoint":
        torch.save({"model": Malicious(created), "position": {}}, path)
    else:
        torch.save({"state_dict": {}}, path)
    yield (
        path,
        {
            "malicious checkpoint": "refused, it holds more than tensors",
            "malicious pickle": "",  # refused as damaged or for what it holds, as torch sees it
            "pickle": "",
            "other": "is no checkpoint",
        }.get(request.param, "is damaged"),
    )
    assert not created.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("flag", ["--resume-from", "--init-from"])
def test_file_that_is_no_checkpoint(flag, bad_file, train, refused, tmp_path):
    path, reason = bad_file
    refused([f"{flag} {path}: {reason}"], *TINY, "--save-dir", tmp_path / "new", flag, path)
    assert not contents(tmp_path / "new")
    train(tmp_path / "new")  # the folder is as good as new


def test_bad_file_does_not_cost_the_run_that_is_there(train, refused, tmp_path):
    """`--fresh` moves the old run aside only for a command that can start."""
    train(tmp_path)
    before = contents(tmp_path, REFUSAL)
    refused(["--init-from main.py: "], *TINY, "--save-dir", tmp_path, "--fresh", "--init-from", "main.py")
    assert contents(tmp_path, REFUSAL) == before


# --- the same command again --------------------------------------------------------------------------------------


def test_finished_run_says_so_and_changes_nothing(train, tmp_path):
    """Only train.log notes that somebody asked."""
    train(tmp_path)
    before = contents(tmp_path, ("lock", "train.log"))
    out = train(tmp_path)
    assert "This run is finished" in out
    assert "raise --epochs" in out
    assert contents(tmp_path, ("lock", "train.log")) == before


def test_missing_links_of_a_finished_run_are_repaired(train, tmp_path):
    train(tmp_path)
    links = [tmp_path / f"{name}.pth" for name in ("last", "best", "final")]
    for link in links:
        link.unlink()
    train(tmp_path)
    for link in links:
        assert link.samefile(tmp_path / "checkpoint_1.pth")


def test_more_epochs_go_on(train, tmp_path):
    train(tmp_path)
    out = train(tmp_path, "--epochs", 3)
    assert f"Resuming after optimizer step {STEPS_PER_EPOCH}: epoch 2, 0 of 24 samples." in out
    assert "Changed since the checkpoint: --epochs 1 -> 3" in out
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["epochs"], results["step"]) == (3, 3 * STEPS_PER_EPOCH)
    assert [row["epoch"] for row in read_metrics(tmp_path, "epoch")] == [1, 2, 3]


def test_changed_flags_are_listed(train, tmp_path):
    train(tmp_path)
    out = train(tmp_path, "--epochs", 2, "--lr", 0.02, "--dropout", 0.1)
    changes = [line for line in out.splitlines() if line.startswith("Changed since the checkpoint: ")]
    assert {line.split(": ")[1] for line in changes} == {"--epochs 1 -> 2", "--lr 0.01 -> 0.02", "--dropout 0.0 -> 0.1"}


def test_fresh_moves_the_old_run_aside(train, tmp_path):
    train(tmp_path)
    before = contents(tmp_path)
    for number in (1, 2):
        out = train(tmp_path, "--fresh")
        assert f"moved to {tmp_path / f'previous-{number}'}" in out
        assert "Resuming" not in out
        assert load(tmp_path / f"previous-{number}" / "final.pth")["step"] == STEPS_PER_EPOCH
    assert contents(tmp_path / "previous-1") == before


# --- starting from a file ----------------------------------------------------------------------------------------


def test_init_from_takes_weights_and_nothing_else(train, tmp_path):
    train(tmp_path / "source", "--epochs", 3)
    source = tmp_path / "source" / "final.pth"
    out = train(tmp_path / "fresh")
    assert "Starting with" not in out
    out = train(tmp_path / "new", "--init-from", source)
    assert f"Starting with the weights of {source}." in out
    assert load(tmp_path / "new" / "final.pth")["step"] == STEPS_PER_EPOCH
    (fresh,), (new,) = (read_metrics(tmp_path / name, "epoch") for name in ("fresh", "new"))
    assert new["train/loss"] < fresh["train/loss"] - 0.01
    train(tmp_path / "still", "--init-from", source, "--lr", 1e-12)
    assert largest_difference(load(source), load(tmp_path / "still" / "final.pth")) < 1e-6


def test_init_from_the_run_that_is_moved_aside(train, tmp_path):
    """Starting over from one's own best weights is what these two flags are for."""
    train(tmp_path)
    old = load(tmp_path / "best.pth")
    train(tmp_path, "--fresh", "--init-from", tmp_path / "best.pth", "--lr", 1e-12)
    assert largest_difference(old, load(tmp_path / "final.pth")) < 1e-6


def test_init_from_a_model_of_another_shape(train, refused, tmp_path):
    train(tmp_path / "source")
    source = tmp_path / "source" / "final.pth"
    refused(
        [f"--init-from {source} is of another model"],
        *TINY, "--save-dir", tmp_path / "new", "--width", 8, "--init-from", source,
    )  # fmt: skip
    assert not contents(tmp_path / "new")


def test_resume_from_goes_on_and_then_from_its_own_newest(train, tmp_path):
    """From epoch 1 of another run; later killed before its last epoch was saved."""
    train(tmp_path / "source", "--epochs", 3)
    source = tmp_path / "source" / "checkpoint_1.pth"
    args = ["--epochs", 3, "--resume-from", source]
    new = tmp_path / "new"
    assert f"Resuming after optimizer step {STEPS_PER_EPOCH}:" in train(new, *args)
    expected = load(tmp_path / "source" / "final.pth")["model"]
    assert_same_bits(expected, load(new / "final.pth")["model"])
    assert "This run is finished" in train(new, *args)
    for name in ("checkpoint_3.pth", "best.pth", "last.pth", "final.pth", "results.json"):
        (new / name).unlink()
    assert f"Resuming after optimizer step {2 * STEPS_PER_EPOCH}:" in train(new, *args)
    assert_same_bits(expected, load(new / "final.pth")["model"])


def test_resume_from_an_older_checkpoint_goes_back(train, tmp_path):
    """What came after it stays on disk under its name, and ends up the same."""
    train(tmp_path, "--epochs", 3)
    before = load(tmp_path / "final.pth")
    out = train(tmp_path, "--epochs", 3, "--resume-from", tmp_path / "checkpoint_2.pth")
    assert f"Resuming after optimizer step {2 * STEPS_PER_EPOCH}:" in out
    assert (tmp_path / "checkpoint_3_again2.pth").exists()
    assert (tmp_path / "final.pth").samefile(tmp_path / "checkpoint_3_again2.pth")
    assert_same_bits(before["model"], load(tmp_path / "final.pth")["model"])
    assert [row["epoch"] for row in read_metrics(tmp_path, "epoch")] == [1, 2, 3]


def test_resume_from_a_finished_run_has_results_too(train, tmp_path):
    """There is nothing left to train, and still the new folder must not claim results that it does not hold."""
    train(tmp_path / "source")
    train(tmp_path / "new", "--resume-from", tmp_path / "source" / "final.pth")
    old, new = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("source", "new"))
    assert new["metrics"] == old["metrics"]
