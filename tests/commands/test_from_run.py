"""A command that resumes or uses a run takes the task, the task's flags and the seed from it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from tasks import TASKS
from tasks.kgat import KgatFlags
from tests.conftest import REFUSAL, ROOT, TINY, contents, load
from tests.helpers.weighted_task import Weighted, WeightedFlags
from trainer.api import fit
from trainer.commands.config_files import ConfigFile
from trainer.commands.flags import FromRun
from trainer.commands.parse import parse
from trainer.commands.resume import changed_flags
from trainer.common.errors import UserError
from trainer.common.validation import absolute
from trainer.config import flag, options
from trainer.profiling.step import StepFlags

LEXICON = ["--task", f"{ROOT / 'tests' / 'helpers' / 'lexicon_task.py'}:Lexicon", "--num-threads", 1]


class Digested(Weighted):
    """Task whose data may change while the number of samples stays the same."""

    digest: ClassVar = "first"

    def data_digest(self):
        return self.digest


@pytest.fixture(autouse=True)
def own_tasks(monkeypatch):
    monkeypatch.setitem(TASKS, "weighted", Weighted)
    monkeypatch.setitem(TASKS, "digested", Digested)
    monkeypatch.setitem(TASKS, "excluding", Excluding)
    monkeypatch.setitem(TASKS, "reading", Reading)


@pytest.fixture
def weighted(train, tmp_path):
    """Returns the folder of a run of a registered task, with task flags that are not the defaults."""
    train(tmp_path / "run", "--task", "weighted", "--width", 5, "--seed", 3)
    return tmp_path / "run"


def read(*argv):
    flags, problems = parse([str(arg) for arg in argv], several_devices=False)
    assert problems == []
    return flags


def remarks(*argv):
    return read(*argv).from_run.remarks


# --- flags taken from a run ---------------------------------------------------------------------------------------


def test_scoring_and_resuming_need_no_task_flags(weighted, cli):
    told = f"From the run in {weighted}: --task weighted, --seed 3, --num-train 24, --width 5"
    scores = json.loads((weighted / "results.json").read_text())["metrics"]
    status, out, err = cli("--save-dir", weighted, "--eval-only", "--num-threads", 1)
    assert (status, err) == (0, []) and out.splitlines()[0] == told
    assert f"test/accuracy {scores['test/accuracy']:.4f}" in out and "Changed since" not in out
    status, out, err = cli("--save-dir", weighted, "--epochs", 2, "--batch-size", 8, "--num-threads", 1)
    assert (status, err) == (0, []) and out.splitlines()[0] == told and "epoch 2, 0 of 24 samples." in out
    changes = [line for line in out.splitlines() if line.startswith("Changed since")]
    assert changes == [
        f"Changed since the checkpoint: {change}" for change in ("--epochs 1 -> 2", "--lr 0.01 -> 0.001")
    ]
    assert load(weighted / "final.pth")["config"]["--width"] == 5


def test_every_command_takes_flags_from_the_run(weighted, tmp_path):
    told = [f"From the run in {weighted}: --task weighted, --seed 3, --num-train 24, --width 5"]
    for more in ([], ["--eval-only"], ["--predict", tmp_path], ["--export", tmp_path / "x.pt2"]):
        assert remarks("--save-dir", weighted, *more) == told
    file = weighted / "best.pth"
    assert remarks("--resume-from", file, "--eval-only") == [told[0].replace(str(weighted), str(file))]
    assert remarks("--resume-from", file, "--save-dir", tmp_path / "new")[0].startswith(f"From the run in {file}: ")


def test_given_flags_override_the_run_from_command_line_or_file(weighted, tmp_path):
    file = tmp_path / "some.toml"
    file.write_text(f"width = 16\nsave-dir = {json.dumps(str(weighted))}")
    for argv in (["--save-dir", weighted, "--width", 16], ["--config", file]):
        flags = read(*argv)
        assert (flags.task.width, flags.task.num_train, flags.run.seed, flags.run.task) == (16, 24, 3, "weighted")
        assert "--width" not in flags.from_run.remarks[0]
    record = weighted / "config.json"
    assert remarks("--config", record, "--save-dir", weighted) == []
    assert remarks("--save-dir", weighted, *TINY[2:], "--task", "weighted", "--width", 5, "--seed", 3) == []


def test_a_run_does_not_set_learning_rate_epochs_or_batch_size(weighted):
    flags = read("--save-dir", weighted)
    assert (flags.learning.lr, flags.run.epochs, flags.batch.batch_size) == (0.001, 20, 32)


def test_a_run_record_prints_no_terminal_escapes():
    option = options(Reading.Config)["file"]
    (line,) = FromRun(Path("run"), [(option, "\x1b[2J")]).remarks
    assert line == "From the run in run: --file '\\x1b[2J'"


def test_a_new_run_takes_no_flags_from_an_old_run(weighted, tmp_path):
    best = weighted / "best.pth"
    for argv in (
        ["--save-dir", weighted, "--fresh"],
        ["--save-dir", weighted, "--fresh", "--init-from", best],
        ["--save-dir", tmp_path / "new", "--init-from", best],
        ["--save-dir", tmp_path / "new", "--init-from-partial", best],
        ["--save-dir", weighted, "--eval-only", "--init-from", best],
    ):
        flags = read("--task", "weighted", *argv)
        assert (flags.from_run.remarks, flags.task.width, flags.run.seed) == ([], 16, 0)
    flags, problems = parse(["--task", "weighted", "--save-dir", str(weighted)], False, StepFlags)
    assert (problems, flags.from_run.remarks, flags.task.width) == ([], [], 16)


def test_a_run_of_another_task_sets_no_flags(weighted, refused, monkeypatch, tmp_path):
    assert remarks("--task", "digested", "--save-dir", weighted) == []
    refused(["--task digested: the checkpoint is from --task weighted"], "--task", "digested", "--save-dir", weighted)
    (tmp_path / "checkpoints").mkdir()
    weighted.rename(tmp_path / "checkpoints" / "har")  # the default folder of the default task
    monkeypatch.chdir(tmp_path)
    assert read().run.task == "har" and remarks() == []


def test_the_default_folder_is_treated_like_a_given_folder(train, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    train("checkpoints/weighted", "--task", "weighted", "--width", 5)
    assert remarks("--task", "weighted") == ["From the run in checkpoints/weighted: --num-train 24, --width 5"]


def test_flags_come_from_the_remaining_files_after_a_kill_or_damage(weighted):
    argv, told = ["--task", "weighted", "--save-dir", weighted], "--seed 3, --num-train 24, --width 5"
    for name in ("config.json", "manifest.json", "checkpoint_1.pth", "best.pth", "final.pth"):
        (weighted / name).unlink()
        assert remarks(*argv) == [f"From the run in {weighted}: {told}"], name
    (weighted / "last.pth").write_bytes(b"damaged")
    assert remarks(*argv) == []


def test_an_invalid_recorded_flag_counts_as_damage(weighted, refused):
    state = load(weighted / "last.pth")
    state["config"]["--width"] = -1
    for file in weighted.glob("*.pth"):
        file.unlink()
        torch.save(state, file)
    told = f"--save-dir {weighted}: contains no intact checkpoint ("
    refused([told], "--save-dir", weighted, "--epochs", 2, "--num-threads", 1)


def test_a_run_without_a_checkpoint_sets_no_flags(weighted):
    for path in weighted.glob("*.pth"):
        path.unlink()
    assert (weighted / "config.json").exists() and remarks("--task", "weighted", "--save-dir", weighted) == []


class Excluding(Weighted):
    @dataclass
    class Config(WeightedFlags):
        """Task: sequences, some of them long"""

        long: bool = flag(False, "only long ones")

        def problems(self):
            return ["--long and --dropout: cannot be combined"] if self.long and self.dropout else []


def test_a_conflict_with_the_command_line_names_the_run(train, refused, tmp_path):
    train(tmp_path, "--task", "excluding", "--long")
    message = f"--long and --dropout: cannot be combined (--long is of the run in {tmp_path})"
    refused([message], "--save-dir", tmp_path, "--dropout", 0.5)
    assert parse(["--save-dir", str(tmp_path), "--dropout", "0.5", "--long=false"], False)[1] == []


def test_fit_resumes_with_the_flags_of_the_run(tmp_path):
    settings = {"save_dir": tmp_path / "run", "batch_size": 8, "num_threads": 1}
    fit(Weighted, epochs=1, num_train=24, width=5, seed=3, **settings)
    _, run = fit(Weighted, epochs=2, **settings)
    config = load(run.path / "final.pth")["config"]
    assert (config["--width"], config["--num-train"], config["--seed"], config["--epochs"]) == (5, 24, 3, 2)


# --- files of the run ---------------------------------------------------------------------------------------------


@pytest.fixture
def lexicon(cli, tmp_path, monkeypatch):
    """Returns the folder of a run whose text was named relative to another working directory."""
    (tmp_path / "then").mkdir()
    monkeypatch.chdir(tmp_path / "then")
    (tmp_path / "then" / "abc.txt").write_text("abcabcabcabc" * 8)
    assert cli(*LEXICON, "--text", "abc.txt", "--epochs", 1, "--save-dir", tmp_path / "run")[0] == 0
    (tmp_path / "now").mkdir()
    monkeypatch.chdir(tmp_path / "now")
    return tmp_path / "run"


@pytest.mark.parametrize("more", [["--eval-only"], ["--epochs", 2]])
def test_files_of_the_run_are_found_from_another_folder(more, lexicon, cli, tmp_path):
    (tmp_path / "now" / "abc.txt").write_text("xyz" * 8)  # a file of the same name, which the run must not read
    status, out, err = cli(*LEXICON, "--save-dir", lexicon, *more)
    assert (status, err) == (0, [])
    assert out.splitlines()[0] == f"From the run in {lexicon}: --text {tmp_path / 'then' / 'abc.txt'}"


class Reading(Weighted):
    @dataclass
    class Config(WeightedFlags):
        """Task: sequences of a file"""

        file: Path = flag(Path("none"), "a file")

    def splits(self):
        if not self.config.file.exists():
            raise UserError(f"--file {self.config.file}: No such file or directory")
        return super().splits()


def test_a_missing_file_of_a_run_is_named_with_the_run(train, refused, tmp_path):
    run, file = tmp_path / "run", tmp_path / "file"
    file.touch()
    train(run, "--task", "reading", "--file", file)
    file.unlink()
    before = contents(run, REFUSAL)
    for more in (["--eval-only"], ["--epochs", 2]):
        message = f"--file {file}: No such file or directory (--file is of the run in {run})"
        refused([message], "--save-dir", run, "--device", "cpu", *more)
    assert contents(run, REFUSAL) == before


def test_different_spellings_of_a_path_are_equal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    now = {"--data-dir": str(tmp_path / "a.csv")}
    assert changed_flags({"--data-dir": "a.csv"}, now) == {}  # earlier versions recorded relative paths
    assert changed_flags({"--data-dir": "b.csv"}, now) == {"--data-dir": ("b.csv", str(tmp_path / "a.csv"))}
    monkeypatch.chdir("/")
    assert changed_flags({"--data-dir": "a.csv"}, now) != {}


def test_an_absolute_path_leads_to_the_same_folder(tmp_path, monkeypatch):
    (tmp_path / "folder" / "within").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "within")
    monkeypatch.chdir(tmp_path / "folder")
    assert absolute(Path("../a.csv")) == tmp_path / "a.csv"
    assert absolute(tmp_path / "link" / ".." / "a.csv") == tmp_path / "link" / ".." / "a.csv"  # ".." after the link


# --- changed data -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["digest", "size"])
def test_a_best_epoch_of_other_data_is_not_compared_with_new_scores(change, train, refused, tmp_path, monkeypatch):
    task = ["--task", "digested" if change == "digest" else "weighted"]
    train(tmp_path, *task, "--epochs", 2, "--lr", 0.1)
    if change == "digest":
        monkeypatch.setattr(Digested, "digest", "second")
    other = ["--num-train", 32] * (change == "size")
    before = json.loads((tmp_path / "results.json").read_text())["best"]
    told = "contains a finished run on other data"
    refused([told], *TINY, "--save-dir", tmp_path, *task, *other, "--epochs", 2)
    assert json.loads((tmp_path / "results.json").read_text())["best"] == before
    out = train(tmp_path, *task, *other, "--epochs", 3, "--lr", 1e-12)  # a score that is no better
    assert f"The best checkpoint (epoch {before['epoch']}) was scored on other data, so the best score is reset" in out
    assert json.loads((tmp_path / "results.json").read_text())["best"]["epoch"] == 3
    assert (tmp_path / "best.pth").samefile(tmp_path / "checkpoint_3.pth")


def test_the_best_epoch_is_kept_if_the_data_are_equal(train, tmp_path):
    train(tmp_path, "--task", "digested", "--epochs", 2, "--num-train", 20, "--batch-size", 8, "--drop-last")
    for more in (["--drop-last"], []):  # the same data, of which the second run leaves out less
        out = train(tmp_path, "--task", "digested", "--epochs", 3, "--num-train", 20, "--batch-size", 8, *more)
        assert "was scored on other data" not in out


# --- several runs -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_more_seeds_extend_finished_runs(command, tmp_path):
    argv = [*TINY, "--width", 5, "--save-dir", tmp_path / "runs"]
    command("main.py", *argv, "--seeds", 2, "--device", "cpu")
    out = command(
        "main.py", *TINY[:4], *TINY[6:], "--save-dir", tmp_path / "runs", "--seeds", 3, "--device", "cpu"
    ).stdout
    assert f"From the run in {tmp_path / 'runs' / 'seed-0'}: --num-train 24, --width 5\n" in out
    assert "finished already: 2" in out
    assert load(tmp_path / "runs" / "seed-2" / "final.pth")["config"]["--width"] == 5


@pytest.mark.parametrize(
    ("settings", "taken"),
    [
        ({"--model": "kgat"}, {"loss": "bpr", "kg_batch_ratio": 2.0}),
        ({"--model": "kg-lightgcn"}, {"loss": "bpr"}),
        ({"--model": "itemknn"}, {}),
        ({"--model": "kgat", "--loss": "softmax"}, {"loss": "softmax", "kg_batch_ratio": 2.0}),
    ],
)
def test_records_of_earlier_versions_keep_their_meaning(settings, taken):
    """An old record lacks --loss, and holds the former default of --kg-batch-ratio, which most models do not use."""
    known, settings = options(KgatFlags), settings | {"--kg-batch-ratio": 2.0}
    found = ConfigFile(Path("config.json"), settings, is_record=True).values(known, all_known=True)
    assert found == ({"model": settings["--model"]} | taken, [])
    given, _ = ConfigFile(Path("mine.toml"), settings).values(known, all_known=True)
    assert given == {flag.removeprefix("--").replace("-", "_"): value for flag, value in settings.items()}
