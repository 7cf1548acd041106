import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tasks import TASKS
from trainer.commands.parse import parse
from trainer.config import (
    FlagGroup,
    arguments_of,
    build_parser,
    checked_defaults,
    flag,
    options,
    parse_flags,
)
from trainer.flags import TRAINER_GROUPS


@dataclass
class Example(FlagGroup):
    """Example"""

    rate: float = flag(0.5, "a rate", at_least=0, below=1)
    big_count: int = flag(3, "a count", above=0, at_most=10)
    kind: Literal["a", "b"] = flag("a", "a kind")
    sizes: tuple[int, ...] = flag((1, 2), "sizes", at_least=1)
    ids: tuple[int, ...] | None = flag(None, "ids")
    file: Path | None = flag(None, "a file")
    on: bool = flag(False, "turns on")
    extra: bool = flag(True, "leaves out")
    number: int | Literal["auto"] = flag("auto", "a number or a word", at_least=0)

    def problems(self):
        return ["--rate and --kind: do not go together"] if self.rate == 0.25 and self.kind == "b" else []


def read(*argv):
    (example,), problems = parse_flags([Example], argv)
    return example, problems


def test_defaults():
    assert read() == (Example(), [])


def test_every_type_is_read():
    example, problems = read(
        *"--rate .1 --big-count 4 --kind b --sizes 3 4 5 --ids 0,1 --file x/y --on --no-extra --number 0".split()
    )
    assert problems == []
    assert example == Example(0.1, 4, "b", (3, 4, 5), (0, 1), Path("x/y"), True, False, 0)
    assert checked_defaults([Example], {"number": "auto"}) == {"number": "auto"}
    assert arguments_of([Example], {"number": 3}) == (["--number=3"], [])


@dataclass
class Odd(FlagGroup):
    """Flags with invalid defaults."""

    limit: float = flag(float("inf"), "none by default")
    share: float = flag(-1.0, "out of its range", at_least=0)
    name: str = flag(None, "needed")


def test_an_invalid_default_is_an_error_unless_a_value_is_given():
    _, problems = parse_flags([Odd], [])
    assert problems == [
        "--limit inf, its default: must be a finite number",
        "--share -1.0, its default: must be at least 0",
        "--name (none), its default: must be text",
    ]
    assert parse_flags([Odd], ["--limit=3", "--share=0", "--name=x"]) == ([Odd(3.0, 0.0, "x")], [])


@pytest.mark.parametrize("given", ["3,4,5", "3 4 5", "3, 4, 5", "3,4 5"])
def test_lists_are_separated_by_commas_or_spaces(given):
    assert read("--sizes", *given.split())[0].sizes == (3, 4, 5)


def test_help_prints_the_docstring_of_a_group():
    class Described(Example):
        """Example.

        What cannot be said
        of one flag alone.
        """

    for group, text in (
        (Described, "Example:\n  What cannot be said\n  of one flag alone.\n\n"),
        (Example, "Example:\n"),
    ):
        assert f"\n{text}  --rate RATE " in build_parser([group], "").format_help()


def test_underscores_and_equals_signs():
    assert read("--big_count=4", "--no_extra", "--file=a_b")[0] == Example(big_count=4, extra=False, file=Path("a_b"))


@pytest.mark.parametrize(
    ("argv", "on", "extra"),
    [
        ("--on=true --no-extra=true", True, False),
        ("--on --no-extra", True, False),
        ("--on --on=false --no-extra --no_extra=false", False, True),
        ("--on=false --on", True, True),
    ],
)
def test_a_switch_can_be_undone(argv, on, extra):
    example, problems = read(*argv.split())
    assert (example.on, example.extra, problems) == (on, extra, [])


def test_several_files_are_merged_and_may_have_commas_in_their_names():
    @dataclass
    class Files(FlagGroup):
        """Files"""

        files: tuple[Path, ...] | None = flag(None, "files")

    (group,), problems = parse_flags([Files], "--files lr=1,wd=0.toml b --files c".split())
    assert (group.files, problems) == ((Path("lr=1,wd=0.toml"), Path("b"), Path("c")), [])


@pytest.mark.parametrize("names", [("colour, main", "b"), ("a,", ",b"), (",",), ("a\\b", "c"), ("a b", "c")])
def test_names_in_a_list_may_contain_commas(names):
    @dataclass
    class Names(FlagGroup):
        """Names"""

        names: tuple[str, ...] | None = flag(None, "names")

    argv, problems = arguments_of([Names], {"names": names})
    typed = shlex.split(options(Names)["names"].as_typed(names))
    for words in (argv, typed):
        (group,), found = parse_flags([Names], words)
        assert (group.names, problems + found) == (names, [])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--on=yes", "--on yes: must be true or false"),
        ("--no-extra=", "--no-extra: needs a value"),
        ("--rate 1", "--rate 1: must be at least 0 and below 1"),
        ("--rate -0.5", "--rate -0.5: must be at least 0 and below 1"),
        ("--rate nan", "--rate nan: must be a finite number"),
        ("--rate x", "--rate x: must be a number"),
        ("--number many", "--number many: must be auto or a whole number"),
        ("--number -1", "--number -1: must be at least 0"),
        ("--big-count 2.5", "--big-count 2.5: must be a whole number"),
        ("--big-count 0", "--big-count 0: must be above 0 and at most 10"),
        ("--kind c", "--kind c: must be one of a, b"),
        ("--sizes 3 0", "--sizes 0: must be at least 1"),
        ("--sizes", "--sizes: needs at least one value"),
        ("--sizes=", "--sizes: needs at least one value"),
        ("--sizes ,", "--sizes: needs at least one value"),
        ("--sizes 1,,2", "--sizes 1,,2: must have a value before and after each comma"),
        ("--sizes 1 2,", "--sizes 1 2,: must have a value before and after each comma"),
        ("--rate", "--rate: needs a value"),
        ("--rat 1", "--rat: no such flag; did you mean --rate?"),
        ("--sat 1", "--sat: no such flag; see --help"),
        ("stray", "stray: unexpected argument; pass settings as flags, see --help"),
        ("--rate 0.25 --kind b", "--rate and --kind: do not go together"),
    ],
)
def test_each_mistake_names_value_and_flag(argv, message):
    assert read(*argv.split())[1] == [message]


def test_help_names_every_task(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"], several_devices=False)
    shown = capsys.readouterr().out
    assert f"\nBuilt-in tasks: {', '.join(TASKS)}.\n" in shown and "path/to/file.py:ClassName" in shown


@pytest.mark.parametrize(("task", "says"), [("har", True), ("seqrec", False)])
def test_help_describes_what_the_chosen_task_labels(task, says, capsys):
    with pytest.raises(SystemExit):
        parse(["--task", task, "--help-all"], several_devices=False)
    assert ("the CSV file of one recording" in capsys.readouterr().out) == says


def test_fit_accepts_hidden_flags_but_not_launcher_flags():
    argv, problems = arguments_of(TRAINER_GROUPS, {"no_amp": True, "local_rank": 0})
    assert (argv, problems) == (["--no-amp"], ["local_rank: no such setting; see --help"])


def test_earlier_names_of_switches_stay_valid():
    @dataclass
    class Flags(FlagGroup):
        """Flags."""

        no_test: bool = flag(False, "leave the test set alone")

    assert checked_defaults([Flags], {"test": False}) == {"no_test": True}
    assert arguments_of([Flags], {"test": True}) == (["--no-test=false"], [])
    assert arguments_of([Flags], {"no_test": True}) == (["--no-test"], [])
