"""Each run of `--seeds` and `--folds` equals a run that is started by hand."""

import functools
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from models.har.harnet import HarNet
from models.layers.standardised import Standardised
from tasks.har import HarFlags, HarTask
from tests.conftest import LOCKS, ROOT, TINY, WEIGHTED, assert_same_bits, contents, load
from trainer.commands.parse import parse
from trainer.commands.several import Job, choose_slots, run_jobs
from trainer.flags import DeviceFlags
from trainer.loading.order import SampleKeys
from trainer.parallel.launch import Launcher

SMALL = [
    "--mode", "first", "--hidden-dims", 8, "--epochs", 1, "--batch-size", 128, "--no-augmentation", "--num-threads", 1
]  # fmt: skip
WEIGHTED_RUN = ["--task", WEIGHTED, "--num-train", 24, "--global-batch-size", 8, "--lr", 0.01, "--num-threads", 1]
NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def table_of(lines):
    """Returns the lines below the first one, without progress lines, which depend on time."""
    return [line for line in lines[1:] if "epochs; running: " not in line]


def read(path):
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def har(cache_dir):
    return [*SMALL, "--cache-dir", cache_dir]


@pytest.fixture(scope="module")
def seeds(command, har, tmp_path_factory):
    """Trains two seeds; returns their folder, and what the command printed."""
    directory = tmp_path_factory.mktemp("several") / "seeds"
    return directory, command("main.py", *har, "--seed", 3, "--seeds", 2, "--save-dir", directory)


# --- results of the runs -----------------------------------------------------------------------------------------


def test_each_seed_equals_a_run_started_by_hand(seeds, har, cli, tmp_path):
    directory, done = seeds
    assert not done.stderr
    for seed in (3, 4):
        alone = tmp_path / str(seed)
        assert cli(*har, "--seed", seed, "--save-dir", alone)[0] == 0
        assert_same_bits(load(alone / "final.pth"), load(directory / f"seed-{seed}" / "final.pth"))
        assert read(alone / "results.json")["metrics"] == read(directory / f"seed-{seed}/results.json")["metrics"]


def test_the_summary_agrees_with_the_runs(seeds):
    directory, done = seeds
    summary = read(directory / "summary.json")
    results = [read(directory / f"seed-{seed}" / "results.json") for seed in (3, 4)]
    assert summary["runs"] == [
        {"directory": f"seed-{seed}", "seed": seed, "fold": None, "metrics": result["metrics"],
         "train_seconds": result["train_seconds"]}
        for seed, result in zip((3, 4), results, strict=True)
    ]  # fmt: skip
    assert set(summary["mean"]) == set(summary["deviation"]) == set(results[0]["metrics"])
    for name in summary["mean"]:
        values = [result["metrics"][name] for result in results]
        assert summary["mean"][name] == pytest.approx(statistics.fmean(values))
        assert summary["deviation"][name] == pytest.approx(statistics.stdev(values))
    table = {line.split()[0]: line.split()[1:] for line in table_of(done.stdout.splitlines())}
    assert list(table)[-3:] == ["mean", "deviation", "ensemble"] and {"seed-3", "seed-4"} < set(table)
    column = table["run"].index("test/accuracy")
    assert float(table["mean"][column]) == pytest.approx(summary["mean"]["test/accuracy"], rel=1e-4)
    assert float(table["ensemble"][column]) == pytest.approx(summary["ensemble"]["test/accuracy"], rel=1e-4)


def test_the_ensemble_scores_the_mean_of_the_probabilities(seeds, cache_dir):
    directory, _ = seeds
    test = HarTask(HarFlags(), 0, cache_dir).splits()["test"]
    samples = test.__getitems__(SampleKeys(np.arange(len(test)), epoch=0))
    signals, label = torch.from_numpy(samples["signals"]), torch.from_numpy(samples["label"])
    probabilities = []
    for seed in (3, 4):
        model = Standardised(HarNet("first", hidden_dims=(8,)), num_channels=9).eval()
        model.load_state_dict(load(directory / f"seed-{seed}" / "best.pth")["model"])
        with torch.no_grad():
            probabilities.append(model(signals).double().softmax(dim=1))
    mean = (probabilities[0] + probabilities[1]) / 2
    metrics = read(directory / "summary.json")["ensemble"]
    assert metrics["test/accuracy"] == pytest.approx(float((mean.argmax(1) == label).double().mean()))
    of_label = mean[torch.arange(len(label)), label]
    assert metrics["test/loss"] == pytest.approx(float(-of_label.log().mean()), rel=1e-5)


def test_finished_runs_print_their_table_again_without_training(seeds, har, cli):
    directory, done = seeds
    before = {path: path.stat().st_mtime_ns for path in directory.glob("seed-*/**/*")}
    status, out, err = cli(*har, "--seed", 3, "--seeds", 2, "--save-dir", directory)
    assert (status, err) == (0, [])
    assert out.splitlines()[0].endswith("finished already: 2")
    assert sorted(table_of(out.splitlines())) == sorted(table_of(done.stdout.splitlines()))
    assert {path: path.stat().st_mtime_ns for path in directory.glob("seed-*/**/*")} == before


@pytest.mark.slow
def test_folds_hold_out_everyone_once_and_never_score_the_test_set(command, har, cli, cache_dir, tmp_path):
    argv = [*har, "--folds", 2, "--save-dir", tmp_path]
    out = command("main.py", *argv).stdout
    recordings = HarTask(HarFlags(), 0, cache_dir)._recordings
    everyone = set(recordings.subjects[~recordings.is_test].tolist())
    configs = [read(tmp_path / f"fold-{k}" / "config.json")["config"] for k in (1, 2)]
    held_out = [[int(name) for name in config["--val-subjects"]] for config in configs]
    assert sorted([*held_out[0], *held_out[1]]) == sorted(everyone)
    summary = read(tmp_path / "summary.json")
    assert [(run["directory"], run["fold"], run["seed"]) for run in summary["runs"]] == [
        ("fold-1", 1, 0), ("fold-2", 2, 0)
    ]  # fmt: skip
    assert summary["ensemble"] is None and "ensemble" not in out
    for k, subjects in enumerate(held_out, start=1):
        results = read(tmp_path / f"fold-{k}" / "results.json")
        assert results["scored"] == "val"
        assert np.sum(results["confusion_matrix"]) == np.isin(recordings.subjects, subjects).sum()
    for text in (out, *(path.read_text() for path in tmp_path.glob("**/*.json*"))):
        assert "test/" not in text
    status, _, err = cli(*argv, "--seed", 1)
    assert status == 2 and len(err) == 1
    assert err[0].startswith(f"error: --save-dir {tmp_path / 'fold-1'}: contains a run with --seed 0, not 1; choose")
    assert f"--val-subjects {' '.join(map(str, held_out[0]))}, not" in cli(*argv, "--folds", 3)[2][0]


@pytest.mark.slow
def test_folds_run_for_each_seed_on_several_processes(command, har, tmp_path):
    launch = ["main_multi_gpu.py", "--multi-gpu", "ddp", "--nproc", 2, "--device", "cpu"]
    out = command(*launch, *har, "--folds", 2, "--seeds", 2, "--save-dir", tmp_path, launched=True).stdout
    assert "4 runs" in out and "one after the other" in out
    runs = read(tmp_path / "summary.json")["runs"]
    assert [run["directory"] for run in runs] == ["fold-1/seed-0", "fold-1/seed-1", "fold-2/seed-0", "fold-2/seed-1"]
    assert all(read(tmp_path / run["directory"] / "results.json")["world_size"] == 2 for run in runs)


@pytest.mark.slow
def test_finished_runs_with_other_flags_are_named(command, cache_dir, tmp_path):
    argv = [*WEIGHTED_RUN, "--epochs", 1, "--seeds", 2, "--cache-dir", cache_dir, "--save-dir", tmp_path]
    command("main.py", *argv)
    out = command("main.py", *argv, "--lr", 0.02).stdout
    assert f"The run in {tmp_path / 'seed-1'} finished earlier with --lr 0.01 instead of 0.02; to retrain it" in out
    more = command("main.py", *argv, "--epochs", 2, "--seeds", 3).stdout
    assert "finished earlier" not in more
    epochs = [read(tmp_path / f"seed-{seed}" / "results.json")["epochs"] for seed in range(3)]
    assert epochs == [2, 2, 2] and len(read(tmp_path / "summary.json")["runs"]) == 3
    command("main.py", *argv, "--epochs", 2, "--fresh")
    assert (tmp_path / "seed-1" / "previous-1").is_dir() and not (tmp_path / "previous-1").exists()
    (tmp_path / "seed-1" / "results.json").unlink()
    for path in (tmp_path / "seed-1").glob("checkpoint_*.pth"):
        path.write_bytes(path.read_bytes()[:-100])
    failed = command("main.py", *argv, "--epochs", 2, status=2)
    assert "seed-1: contains no intact checkpoint" in failed.stderr and len(failed.stderr.splitlines()) == 1


@pytest.mark.slow
def test_paused_runs_are_counted_and_write_no_summary(cli, cache_dir, tmp_path):
    """The time limit is shorter than a step."""
    argv = [*WEIGHTED_RUN, "--max-steps", 4, "--seeds", 2, "--cache-dir", cache_dir, "--save-dir", tmp_path]
    status, out, err = cli(*argv, "--max-minutes", 1e-9)
    assert (status, err) == (0, [])
    assert "--max-minutes 1e-09: time is up for 2 of 2 runs (" in out
    assert read(tmp_path / "seed-1" / "state.json")["state"] == "paused"
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.slow
def test_paused_runs_resume(command, tmp_path):
    argv = [*WEIGHTED_RUN, "--max-steps", 4, "--seeds", 2, "--save-dir", tmp_path]
    command("main.py", *argv, "--max-minutes", 1e-9)
    out = command("main.py", *argv, "--max-minutes", 10).stdout
    assert "finished earlier" not in out
    assert [read(tmp_path / f"seed-{seed}" / "results.json")["step"] for seed in (0, 1)] == [4, 4]
    assert len(read(tmp_path / "summary.json")["runs"]) == 2
    assert "finished already: 2" in command("main.py", *argv, "--max-minutes", 20).stdout


# --- slots of runs -----------------------------------------------------------------------------------------------


def test_slots_share_the_cores_of_the_cpu():
    for num_threads in (None, 1, NUM_CORES, 10 * NUM_CORES):
        slots = choose_slots(DeviceFlags("cpu", num_threads), None)
        assert len(slots.variables) == max(1, NUM_CORES // (num_threads or 1))
        assert slots.flags == ["--num-threads", str(num_threads or 1)]


@pytest.mark.parametrize(
    ("visible", "device", "expected"),
    [
        (None, "auto", [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]),
        ("5,GPU-8f6a", "cuda", [{"CUDA_VISIBLE_DEVICES": "5"}, {"CUDA_VISIBLE_DEVICES": "GPU-8f6a"}]),
        ("5,3", "cuda:1", [{}]),
    ],
)
def test_each_visible_gpu_is_a_slot_unless_the_device_names_one(visible, device, expected, monkeypatch):
    """The test simulates a machine with two GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    slots = choose_slots(DeviceFlags(device), None)
    assert (slots.variables, slots.flags) == (expected, [])


# --- refusals ----------------------------------------------------------------------------------------------------


def test_folds_exclude_other_flags_that_hold_out_people():
    _, problems = parse(["--folds", "3", "--refit", "--num-val-subjects", "2", "--eval-only"], several_devices=False)
    excluded = [re.match(r"(\S+ \d) and (\S+): cannot be combined", text).groups() for text in problems]
    assert excluded == [
        ("--num-val-subjects 2", "--refit"), ("--folds 3", "--eval-only"), ("--folds 3", "--num-val-subjects"),
        ("--folds 3", "--refit"),
    ]  # fmt: skip
    assert parse(["--seeds", "3", "--refit"], several_devices=False)[1] == []


def test_more_folds_than_people_are_refused(cli, har, tmp_path):
    status, _, err = cli(*har, "--folds", 99, "--save-dir", tmp_path / "set")
    assert (status, len(err)) == (2, 1) and err[0].startswith("error: --folds 99: must be from 2 to ")
    assert not (tmp_path / "set").exists()


@contextmanager
def in_use(directory):
    """Lets another process hold the lock of a folder; yields its process id."""
    directory.mkdir(exist_ok=True)
    code = (
        "import pathlib, sys; from trainer.checkpoint.lock import take_lock; "
        "lock = take_lock(pathlib.Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", code, str(directory)]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        yield holder.pid
        holder.stdin.close()


def test_a_folder_in_use_is_refused_once(cli, har, tmp_path):
    with in_use(tmp_path) as pid:
        status, _, (line,) = cli(*har, "--seeds", 2, "--save-dir", tmp_path)
    assert status == 2 and line.startswith(f"error: --save-dir {tmp_path}: in use by process {pid} ")
    assert {path.name for path in tmp_path.iterdir()} == set(LOCKS)


@pytest.mark.slow
def test_a_failed_run_is_named_and_the_other_runs_finish(command, tmp_path):
    argv = [*WEIGHTED_RUN, "--epochs", 1, "--seeds", 2, "--save-dir", tmp_path]
    with in_use(tmp_path / "seed-1") as pid:
        done = command("main.py", *argv, status=2)
    (line,) = done.stderr.splitlines()
    directory = tmp_path / "seed-1"
    assert line.startswith(f"error: {directory}: --save-dir {directory}: in use by process {pid} on ")
    assert (tmp_path / "seed-0" / "results.json").exists()
    assert (tmp_path / "seed-1.stderr").read_text() and not (tmp_path / "seed-0.stderr").exists()
    assert not (tmp_path / "summary.json").exists() and "mean" not in done.stdout


def test_several_runs_in_the_folder_of_a_single_run_are_refused(train, refused, tmp_path):
    train(tmp_path)
    before = contents(tmp_path)
    refused([f"--save-dir {tmp_path}: contains a single run; choose"], *TINY, "--seeds", 2, "--save-dir", tmp_path)
    assert contents(tmp_path) == before


def test_a_single_run_in_the_folder_of_several_runs_is_refused(train, refused, tmp_path):
    train(tmp_path / "seed-0")
    refused([f"--save-dir {tmp_path}: contains several runs; repeat the command with"], *TINY, "--save-dir", tmp_path)
    assert not (tmp_path / "manifest.json").exists()
    train(tmp_path, "--fresh")
    assert (tmp_path / "previous-1" / "seed-0" / "results.json").exists()


# --- the order of runs -----------------------------------------------------------------------------------------------


def note_slot(path, status):
    """Writes the slot and the times of a job, in place of a run."""
    started = time.time()
    time.sleep(0.5)
    path.write_text(json.dumps([os.environ["SLOT"], started, time.time()]))
    print("to standard output")
    print(f"{path.stem} is done", file=sys.stderr)
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


def job(folder, number, status):
    path = folder / str(number)
    return Job(path.name, path, number, None, (), {}, functools.partial(note_slot, path.with_suffix(".json"), status))


def run_all(folder, slots, statuses):
    """Returns the names of the jobs that succeeded, and the exit statuses of the other jobs by name."""
    jobs = [job(folder, i, status) for i, status in statuses]
    found = {}
    with Launcher() as launcher:
        for _, ended in run_jobs(launcher, jobs, [{"SLOT": slot} for slot in slots]):
            found |= {job.name: status for job, status in ended}
    failures = {name: status for name, status in found.items() if status != 0}
    return sorted(found.keys() - failures.keys()), failures


@pytest.mark.slow
def test_no_run_starts_after_a_failure(tmp_path, capfd):
    assert run_all(tmp_path, "a", enumerate([0, 7, 0])) == (["0"], {"1": 7})
    assert not (tmp_path / "2.json").exists()
    assert job(tmp_path, 1, 7).failure_message(7) == f"error: {tmp_path / '1'}: ended with status 7\n1 is done"
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "0.stderr").read_text() == "0 is done\n"
    assert run_all(tmp_path, "a", [(3, -signal.SIGKILL)]) == ([], {"3": 137})
    message = job(tmp_path, 3, -9).failure_message(137)
    assert message.startswith(f"error: {tmp_path / '3'}: was stopped by signal 9; the same command resumes")


@pytest.mark.slow
def test_a_slot_runs_one_run_at_a_time(tmp_path):
    assert run_all(tmp_path, "ab", enumerate([0] * 5)) == (list("01234"), {})
    intervals = sorted(json.loads((tmp_path / f"{i}.json").read_text()) for i in range(5))
    assert {slot for slot, _, _ in intervals} == {"a", "b"}
    for (slot, _, end), (next_slot, start_of_next, _) in itertools.pairwise(intervals):
        assert slot != next_slot or end <= start_of_next
