"""`--keep-best` keeps the best checkpoints after saves, damage, losses, kills and going back."""

import json
import math
import random
from dataclasses import dataclass

import pytest

from tests.checkpoint.conftest import Crash, checkpoints, state_at
from tests.conftest import TINY, assert_same_bits, load
from trainer.checkpoint.manifest import Entry, best_first
from trainer.common.errors import UserError
from trainer.loading.order import Position

VALUES = (None, 0.1, 0.2, 0.3, 0.4, 0.5, -math.inf, math.nan)


@dataclass
class Known:
    """Checkpoint in the directory, as the reference knows it."""

    file: str
    moment: tuple[int, Position]
    value: float | None
    is_best: bool
    intact: bool = True
    abandoned: bool = False


class Life:
    """Run with random saves and accidents, and a reference of the checkpoints that must exist."""

    def __init__(self, seed, opened):
        self.draw, self.name, self.opened = random.Random(seed), str(seed), opened
        self.keep, self.keep_best = self.draw.choice([1, 2, 3]), self.draw.choice([1, 2, 4])
        self.mode = self.draw.choice(["max", "min"])
        self.known: list[Known] = []
        self.epoch = self.samples = 0
        self.best = None
        self.went_back = False
        self.directory = None
        self.open()

    def open(self):
        if self.directory is not None:
            self.directory.release()
        self.directory, _ = self.opened(self.keep, self.keep_best, self.mode, self.name)

    def is_better(self, value, than):
        return value > than if self.mode == "max" else value < than

    def is_ahead(self, i, j):
        """Whether checkpoint i ranks before j: the one of best.pth first, then the better, then the earlier."""
        one, other = self.known[i], self.known[j]
        best = max((k for k, it in enumerate(self.known) if it.is_best), default=None)
        if i == j or j == best or one.value is None or math.isnan(one.value):
            return False
        return i == best or self.is_better(one.value, other.value) or (one.value == other.value and i < j)

    def stays(self, j):
        """Whether checkpoint j is kept: fewer intact ones are newer, or rank before it, than the directory keeps."""
        value = self.known[j].value
        newer = sum(one.intact for one in self.known[j + 1 :])
        if newer < self.keep or value is None or math.isnan(value):
            return newer < self.keep
        return sum(one.intact for i, one in enumerate(self.known) if self.is_ahead(i, j)) < self.keep_best

    def next_state(self):
        if self.draw.random() < 0.5:
            self.epoch, self.samples = self.epoch + 1, 0
        else:
            self.samples += self.draw.choice([1, 2, 3])
        step = 1000 * self.epoch + self.samples
        value = self.draw.choice(VALUES)
        is_best = value is not None and not math.isnan(value)
        is_best = is_best and (self.best is None or self.is_better(value, self.best["value"]))
        if is_best:
            self.best = {"epoch": self.epoch, "step": step, "value": value}
        verdict = {"best": self.best, "value": value, "is_best": is_best}
        return state_at(self.epoch, self.samples) | {"step": step, **verdict}

    def learn(self, path, state):
        self.known.append(
            Known(path.name, (state["step"], Position(**state["position"])), state["value"], state["is_best"])
        )

    def save(self):
        state = self.next_state()
        self.learn(self.directory.save(state), state)
        self.known = [one for i, one in enumerate(self.known) if self.stays(i)]
        assert [entry.file for entry in self.directory.entries] == [one.file for one in self.known]
        assert all((self.directory.path / one.file).exists() for one in self.known)

    def be_killed(self, failures, operations):
        """Crashes before one of the operations of a save, which ends by deleting checkpoints."""
        state = self.next_state()
        operations.clear()
        failures[self.draw.randrange(10)] = Crash()
        before = checkpoints(self.directory.path)
        try:
            path = self.directory.save(state)
            self.learn(path, state)
            self.known = [one for i, one in enumerate(self.known) if self.stays(i)]
        except Crash:
            failures.clear()
            self.open()
            for name in checkpoints(self.directory.path) - before:
                self.learn(self.directory.path / name, state)
            # The crash may have come before or after the deletion.
            there = checkpoints(self.directory.path)
            self.known = [one for i, one in enumerate(self.known) if self.stays(i) or one.file in there]
        failures.clear()
        return self.restart()

    def damage(self):
        one = self.draw.choice(self.known)
        one.intact = False
        path = self.directory.path / one.file
        path.write_bytes(path.read_bytes()[:-1])

    def restart(self):
        """Resumes from the newest intact checkpoint. Returns False if there is none."""
        self.open()
        try:
            state = self.directory.load_newest()
        except UserError:
            return False
        while self.known and not self.known[-1].intact:
            self.known.pop()
        self.go_on_from(state)
        return True

    def go_on_from(self, state):
        self.epoch, self.samples, self.best = state["position"]["epoch"], state["position"]["samples"], state["best"]

    def lose_manifest(self):
        """Deletes the manifest. The rebuilt one lists no damaged file.

        After going back, a rebuilt manifest cannot know which checkpoints were abandoned, so this is left out.
        """
        if self.went_back:
            return True
        (self.directory.path / "manifest.json").unlink(missing_ok=True)
        self.known = [one for one in self.known if one.intact]
        return self.restart()

    def go_back(self):
        one = self.draw.choice(self.known)
        if not one.intact or one.abandoned:
            return
        self.went_back = True
        state = load(self.directory.path / one.file)
        self.directory.forget_later_values(state)
        for other in self.known:
            if other.moment > one.moment:
                other.value, other.is_best, other.abandoned = None, False, True
        self.go_on_from(state)
        self.save()


def live(seed, opened, disk_operations):
    """Returns a run after at most 27 events."""
    operations, failures = disk_operations
    life = Life(seed, opened)
    life.save()
    for _ in range(25):
        event = life.draw.choice([life.save] * 6 + [life.damage, life.restart, life.lose_manifest, life.go_back, None])
        goes_on = event() if event else life.be_killed(failures, operations)
        if goes_on is False:
            return life
    life.save()
    return life


@pytest.mark.parametrize("num_lives", [15, pytest.param(1000, marks=pytest.mark.slow)])
def test_kept_checkpoints_equal_a_simple_reference(num_lives, opened, disk_operations):
    for seed in range(num_lives):
        live(seed, opened, disk_operations)


def test_the_earlier_of_ties_wins_and_nan_has_no_rank():
    values = [0.3, 0.5, math.nan, None, 0.5, 0.1, -math.inf]
    entries = [
        Entry(f"checkpoint_{epoch}.pth", epoch, 0, 0, epoch, value, epoch == 1, 0, "", None)
        for epoch, value in enumerate(values)
    ]
    assert [entry.epoch for entry in best_first(entries, "max")] == [1, 4, 0, 5, 6]
    entries[1].best, entries[6].best = False, True
    assert [entry.epoch for entry in best_first(entries, "min")] == [6, 5, 0, 1, 4]


# --- in a run ----------------------------------------------------------------------------------------------------


def manifest(directory):
    return json.loads((directory / "manifest.json").read_text())["checkpoints"]


def best_files(entries, num):
    """Returns the files with the highest values in the manifest."""
    judged = [entry for entry in entries if entry["value"] is not None]
    return {entry["file"] for entry in sorted(judged, key=lambda entry: -entry["value"])[:num]}


RUN = ["--epochs", 8, "--keep-checkpoints", 1, "--keep-best", 3, "--lr", 0.3]


@pytest.fixture
def trained(train, tmp_path):
    """Returns a run whose score goes up and down, and the manifest of an equal run that keeps all checkpoints."""
    train(tmp_path / "run", *RUN)
    train(tmp_path / "all", *RUN, "--keep-checkpoints", 0)
    return tmp_path / "run", manifest(tmp_path / "all")


def test_a_run_keeps_its_best_checkpoints(trained):
    run, entries = trained
    kept = checkpoints(run)
    assert kept == best_files(entries, 3) | {"checkpoint_8.pth"}
    assert best_files(manifest(run), 3) == best_files(entries, 3)
    assert (run / "best.pth").samefile(run / next(iter(best_files(entries, 1))))
    assert len(best_files(entries, 3) - {f"checkpoint_{epoch}.pth" for epoch in (6, 7, 8)}) > 0


@pytest.mark.parametrize("lost", [[], ["manifest.json"]])
def test_a_resumed_run_keeps_the_remaining_best_checkpoints(lost, trained, train, tmp_path):
    run, _ = trained
    for name in lost:
        (run / name).unlink()
    train(run, *RUN, "--epochs", 12)
    everything = [*trained[1], *manifest(run)]
    assert checkpoints(run) == best_files({entry["file"]: entry for entry in everything}.values(), 3) | {
        "checkpoint_12.pth"
    }


def test_the_best_exclude_checkpoints_of_an_abandoned_future(trained, train, tmp_path):
    """The run goes back to its first epoch, the worst, and hardly learns. Of equal scores, the earlier ranks first."""
    _, entries = trained
    run = tmp_path / "all"
    assert entries[0]["value"] == min(entry["value"] for entry in entries)
    train(run, *RUN, "--lr", 1e-9, "--resume-from", run / "checkpoint_1.pth")
    assert checkpoints(run) == {f"checkpoint_{name}.pth" for name in ("1", "2_again2", "3", "8")}
    assert {entry["source"] for entry in manifest(run)} == {None, str(run / "checkpoint_1.pth")}


def test_scores_are_copied_to_another_directory(trained, train, tmp_path):
    """The new directory lists the scores of the resumed checkpoint and of the best one beside it."""
    run, _ = trained
    train(tmp_path / "other", *RUN, "--epochs", 9, "--resume-from", run / "last.pth")
    values = {entry["epoch"]: entry["value"] for entry in manifest(run)}
    best = load(run / "best.pth")["position"]["epoch"]
    taken = {entry["epoch"]: entry["value"] for entry in manifest(tmp_path / "other")}
    assert {epoch: taken[epoch] for epoch in (best, 8)} == {epoch: values[epoch] for epoch in (best, 8)}
    assert_same_bits(load(tmp_path / "other" / "best.pth"), load(run / "best.pth"))


def test_keep_best_0_is_refused(refused, tmp_path):
    refused(["--keep-best 0: must be at least 1"], *TINY, "--keep-best", 0, "--save-dir", tmp_path)
