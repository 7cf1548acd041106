"""Limits the size of each folder of trainer/, of the tests and benchmarks, and of the code of one training step.

A commit that raises a limit says why.
"""

from tests.helpers import budget

LINES_AND_FILES = {
    "checkpoint": (2097, 7),
    "commands": (3429, 15),
    "common": (1008, 8),
    "failure": (676, 4),
    "loading": (1809, 11),
    "logs": (795, 6),
    "loop": (6674, 32),
    "parallel": (3086, 14),
    "trainer": (2989, 8),
}
"""Maximum lines and files of each folder of trainer/ except profiling; "trainer" stands for the files in no folder."""
BENCHMARKS = 5115
TESTS = 54940
FUNCTIONS_WITH_RUN = {"commands": 4, "loop": 10}
FILES_OF_STEP, FUNCTIONS_OF_STEP = 20, 57
"""Maximum numbers of files and functions that a step of har enters in one process."""


def test_folders_stay_within_their_limits():
    over = {
        room: found
        for room, found in budget.lines_and_files_of_rooms().items()
        if any(own > most for own, most in zip(found, LINES_AND_FILES.get(room, (0, 0)), strict=True))
    }
    assert not over, f"(lines, files) beyond LINES_AND_FILES: {over}"
    assert budget.num_lines(budget.sources(budget.ROOT / "benchmarks")) <= BENCHMARKS
    assert budget.num_lines(budget.sources(budget.ROOT / "tests")) <= TESTS


def test_few_functions_take_a_run():
    found = budget.functions_with_run()
    over = {room: names for room, names in found.items() if len(names) > FUNCTIONS_WITH_RUN.get(room, 0)}
    assert not over, f"functions that take a Run beyond FUNCTIONS_WITH_RUN: {over}"


def test_few_functions_make_a_step(capsys, signals_restored):
    entered = budget.step_of_har()
    files = {file for file, _, _ in entered}
    capsys.readouterr()
    assert any(name == "train_step" for _, name, _ in entered)
    assert len(files) <= FILES_OF_STEP, sorted(files)
    assert len(entered) <= FUNCTIONS_OF_STEP, sorted(entered)
    lines = budget.lengths_of_functions()
    too_long = {name for file, name, _ in entered if lines.get((file, name.rpartition(".")[2]), 0) > 60}
    assert not too_long
