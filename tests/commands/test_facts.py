"""Tests the facts about code and data that a checkpoint records, and their use by a later start."""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, WEIGHTED, load
from tests.helpers.weighted_task import Weighted, WeightedFlags
from trainer import load as load_run
from trainer.commands import facts
from trainer.commands.facts import identify_code, read_git
from trainer.commands.resume import Changes, code_changes
from trainer.common.errors import UserError

TASK = ["--task", "tests/helpers/lexicon_task.py:Lexicon", "--num-threads", 1, "--lr", 1.0]
ONE = {"commit": "1" * 40, "changed": False, "task_file": "my.py", "task_sha256": "a"}


@pytest.fixture
def git(tmp_path, monkeypatch):
    """Runs git in a new repository below `tmp_path`, and reads the repository afterwards."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    folder = tmp_path / "repository" / "trainer"
    folder.mkdir(parents=True)
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]

    def run(*argv):
        done = subprocess.run(["git", *identity, *argv], cwd=folder, check=True, capture_output=True, text=True)
        read_git.cache_clear()
        return done.stdout.strip(), read_git(folder)

    run("init", "--quiet", "..")
    run.folder = folder
    yield run
    read_git.cache_clear()


def test_the_commit_and_changes_of_tracked_files_are_recorded(git, monkeypatch):
    assert git("status")[1] == (None, None)  # no commit yet
    file = git.folder / 'with "quotes" and ünïcödé.py'
    file.write_text("1")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    commit, found = git("rev-parse", "HEAD")
    assert found == (commit, False)
    (git.folder / "new.py").write_text("1")  # an untracked file
    os.utime(file, (0, 0))  # git status would rewrite its index, because the time changed
    index = git.folder.parent / ".git" / "index"
    before = index.read_bytes()
    read_git.cache_clear()
    assert read_git(git.folder) == (commit, False)
    assert index.read_bytes() == before
    file.write_text("2")
    monkeypatch.setenv("GIT_DIR", str(ROOT / ".git"))  # as git does in a hook
    read_git.cache_clear()
    assert read_git(git.folder) == (commit, True)


def test_without_git_or_a_repository_no_commit_is_recorded(tmp_path, monkeypatch):
    (tmp_path / "plain").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert read_git.__wrapped__(tmp_path / "plain") == (None, None)
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(facts, "GIT_TIMEOUT_S", 0.1)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert read_git.__wrapped__(ROOT) == (None, None)
    monkeypatch.setenv("PATH", str(tmp_path / "plain"))
    assert read_git.__wrapped__(ROOT) == (None, None)


def test_a_task_without_a_file_has_no_source_file(monkeypatch):
    assert identify_code(Weighted)["task_file"] == "weighted_task.py"
    monkeypatch.delattr(sys.modules[Weighted.__module__], "__file__")
    assert (identify_code(Weighted)["task_file"], identify_code(Weighted)["task_sha256"]) == (None, None)
    monkeypatch.setattr(Weighted, "__module__", "forgotten")  # as if its file had been run without being registered
    assert identify_code(Weighted)["task_file"] is None


@pytest.mark.parametrize(
    ("then", "now", "changes"),
    [
        ({}, {}, []),
        ({}, {"commit": "2" * 40}, ["the code (commit 1111111 -> 2222222)"]),
        ({"commit": None, "changed": None}, {"changed": True}, []),
        ({}, {"changed": True}, ["the code (uncommitted changes: none -> some)"]),
        ({"changed": True}, {}, ["the code (uncommitted changes: some -> none)"]),
        ({"changed": True}, {"changed": True}, []),
        ({}, {"task_sha256": "b"}, ["the task's file my.py"]),
        ({"task_sha256": None}, {}, []),
    ],
)
def test_changed_facts_are_reported_if_both_are_known(then, now, changes):
    assert code_changes(ONE | then, ONE | now) == changes


def test_a_resume_reports_changed_code_and_an_edited_task_file(train, cli, tmp_path, monkeypatch):
    file = shutil.copy(WEIGHTED.rpartition(":")[0], tmp_path / "edited_task.py")
    monkeypatch.setattr(facts, "read_git", lambda folder: ("1" * 40, False))
    own = ["--task", f"{file}:Weighted"]
    train(tmp_path / "run", *own)
    code = load(tmp_path / "run" / "last.pth")["code"]
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    assert code == {"commit": "1" * 40, "changed": False, "task_file": "edited_task.py", "task_sha256": digest}
    assert code == json.loads((tmp_path / "run" / "config.json").read_text())["code"]

    Path(file).write_text(Path(file).read_text() + "\n# edited\n")
    monkeypatch.setattr(facts, "read_git", lambda folder: ("2" * 40, True))
    changed = [
        "Changed since the checkpoint: --epochs 1 -> 2",
        "Changed since the checkpoint: the code (commit 1111111 -> 2222222)",
        "Changed since the checkpoint: the code (uncommitted changes: none -> some)",
        "Changed since the checkpoint: the task's file edited_task.py",
    ]
    out = train(tmp_path / "run", *own, "--epochs", 2)
    assert [line for line in out.splitlines() if "Changed" in line] == changed

    def fail(folder):
        raise AssertionError("nothing but training asks git")

    monkeypatch.setattr(facts, "read_git", fail)
    train(tmp_path / "run", *own, "--eval-only")


# --- facts about the training data ----------------------------------------------------------------------------------


@pytest.fixture
def trained(on_cpu, tmp_path):
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("abcabcabcabc" * 8)
    on_cpu(*TASK, "--text", text, "--epochs", 6, "--save-dir", run)
    return text, run


def test_a_run_is_used_without_its_data(trained, on_cpu, tmp_path):
    text, run = trained
    assert load(run / "best.pth")["data_facts"] == {"letters": "abc"}
    assert json.loads((run / "config.json").read_text())["data_facts"] == {"letters": "abc"}
    text.unlink()
    new = tmp_path / "new.txt"
    new.write_text("bac")
    told = f"From the run in {run}: {shlex.join(TASK[:2])}, --text {text}"
    assert on_cpu("--predict", new, "--save-dir", run, "--num-threads", 1) == ("next\nc\nb\na\n", [told])
    assert load_run(run).weight.shape == (3, 3)


@pytest.mark.parametrize(("more", "advice"), [(["--epochs", 7], ", or start over with --fresh"), (["--eval-only"], "")])
def test_weights_are_refused_for_other_data_of_the_same_size(more, advice, trained, on_cpu):
    text, run = trained
    text.write_text("abdabdabdabd" * 8)
    _, err = on_cpu(*TASK, "--text", text, "--save-dir", run, *more, status=2)
    assert len(err) == 1 and " differ in letters: " in err[0], err
    assert err[0].endswith(f": abd instead of abc; use the same data{advice}")


@pytest.mark.parametrize("join", ["\n".join, list])
def test_long_facts_are_reported_by_their_difference(join, tmp_path):
    task = Weighted(WeightedFlags(), 0, tmp_path)
    names = list(map(str, range(100)))
    then, now = {"items": join(names)}, {"items": join([*names[1:], "new one", "another"])}
    with pytest.raises(UserError, match=r"in items: 2 new \(.*another.*\) and 1 missing \(0\); use the same data"):
        Changes({"data_facts": then}, {"data_facts": now, "config": {}}, task).refuse_other_data("")


def test_flags_that_name_other_data_are_reported(trained, on_cpu, tmp_path):
    text, run = trained
    other = tmp_path / "other.txt"
    other.write_text("abdabdabdabd" * 8)
    for more, advice in (["--eval-only"], ""), (["--epochs", 7], ", or choose another --save-dir"):
        _, err = on_cpu(*TASK, "--text", other, "--save-dir", run, *more, status=2)
        assert err[0].endswith(f": abd instead of abc; undo the change to --text (was {text}){advice}"), err
