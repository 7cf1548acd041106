"""Every block of docs/multi_gpu_guide.md runs or says what it needs, and quotes what the program prints."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.distributed.run import get_args_parser

from tests.conftest import ROOT, WEIGHTED
from tests.docs.test_docs import SCRIPTS, code_in
from tests.helpers import forks
from trainer.commands.parse import parse
from trainer.loop import blocks as blocks_of_models
from trainer.loop.plan import split_batch
from trainer.loop.schedule import device_scaling_factor

GUIDE = (ROOT / "docs" / "multi_gpu_guide.md").read_text()
TINY = ["--num-threads", "1", "--cache-dir", "cache", "--task"]
WITH_BLOCKS = f"{ROOT / 'tests' / 'helpers' / 'ragged_task.py'}:Ragged"
SHORT = ["--steps", "2", "--settling-steps", "1"]
NEEDS = ("GPUs", "several nodes", "SLURM")
MARKER = re.compile(rf"# needs ({'|'.join(NEEDS)})\b.*\n")


class Block(NamedTuple):
    """Commands, and the output that the guide shows for them."""

    line: int
    language: str
    commands: str
    printed: list[str]

    @property
    def needs_more(self) -> bool:
        return MARKER.match(self.commands) is not None

    @property
    def is_slow(self) -> bool:
        """Whether the commands start processes that import torch or its compiler."""
        return any(word in self.commands for word in ("torchrun", "profiler.py", "--compile"))

    @property
    def trains(self) -> bool:
        return any(script in self.commands for script in SCRIPTS)


def blocks(text: str) -> list[Block]:
    """Returns every fenced block. A block of output belongs to the commands right before it."""
    found: list[Block] = []
    end_of_last = -1
    for match in re.finditer(r"^```(\w*)\n(.*?)^```\n", text, re.MULTILINE | re.DOTALL):
        language, content = match.groups()
        if language == "text" and match.start() == end_of_last + 1:
            found[-1].printed.extend(content.splitlines())
        else:
            found.append(Block(text.count("\n", 0, match.start()) + 1, language, content, []))
        end_of_last = match.end()
    return found


BLOCKS = blocks(GUIDE)


def commands_of(block: Block) -> list[str]:
    """Returns the commands as a shell reads them: continued lines and quoted line breaks belong to one command."""
    found, pending = [], ""
    for line in block.commands.splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        try:
            is_empty = not shlex.split(pending, comments=True)
        except ValueError:  # an open quotation
            pending += "\n"
            continue
        found += [] if is_empty else [pending]
        pending = ""
    return [*found, pending] if pending else found


# --- running it --------------------------------------------------------------------------------------------------


def folder_with_program(path: Path) -> Path:
    """Makes a folder in which commands run as in the repository, but keep what they write."""
    for name in (*SCRIPTS, "profiler.py", "examples", "configs"):
        (path / name).symlink_to(ROOT / name)
    return path


def enter(folder: Path) -> Callable[[], None]:
    """Prepares a fork: enters the folder, and lets --compile work without a C++ compiler."""
    os.chdir(folder)
    blocks_of_models.BACKEND = "aot_eager"
    return lambda: None


def tiny(arguments: list[str]) -> list[str]:
    """Returns the arguments with a tiny task, and with one epoch unless the command sets a length."""
    num_epochs = "5" if "--config" in arguments else "1"  # a preset's warm-up must fit into its epochs
    epochs = [] if {"--epochs", "--max-steps"} & set(arguments) else ["--epochs", num_epochs]
    task = WITH_BLOCKS if {"--compile", "--grad-checkpointing"} & set(arguments) else WEIGHTED
    return [*arguments, *TINY, task, *epochs]


def train(script: str, arguments: list[str], folder: Path, environment: dict[str, str]) -> int:
    """Trains in forks, where the command would start new processes; returns the exit status."""
    printed, prepare = folder / "printed", partial(enter, folder)
    if script == "main.py":
        process = forks.start(tiny(arguments), environment, printed, printed, prepare=prepare)
        process.join(120)
        process.kill()
        return process.exitcode
    world_size = int(arguments[arguments.index("--nproc") + 1])
    statuses = forks.run_group(tiny(arguments), world_size, environment, printed, prepare)
    return next((status for status in statuses if status != 0), 0)


def run(command: str, folder: Path, environment: dict[str, str]) -> int:
    """Runs a command, and the one after `||` if it fails. Writes folder/printed; returns the exit status."""
    for part in command.split(" || "):
        tokens = shlex.split(part, comments=True)
        if tokens[0] == "python" and tokens[1] in SCRIPTS:
            status = train(tokens[1], tokens[2:], folder, environment)
        else:
            status = run_in_shell(part, tokens, folder, environment)
        if status == 0:
            break
    return status


def run_in_shell(command: str, tokens: list[str], folder: Path, environment: dict[str, str]) -> int:
    if "profiler.py" in tokens and tokens[tokens.index("profiler.py") + 1] != "check":
        command = shlex.join([*tokens, *TINY, WEIGHTED, *SHORT])
    elif tokens[0] == "torchrun":
        command = shlex.join(tiny(tokens))
    with (folder / "printed").open("a") as printed:
        return subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=printed,
            stderr=subprocess.STDOUT, timeout=240,
        ).returncode  # fmt: skip


@pytest.fixture(scope="module")
def shell(environment):
    """Returns the environment of a shell in which the interpreter of these tests comes first."""
    return environment | {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, shell):
    """Returns a folder with a finished run of `main.py`, for commands that look at a run."""
    folder = folder_with_program(tmp_path_factory.mktemp("run"))
    assert train("main.py", ["--log-interval", "1", "--save-dir", "checkpoints/har"], folder, shell) == 0, (
        folder / "printed"
    ).read_text()
    return folder


def runnable() -> list:
    return [
        pytest.param(block, id=f"line {block.line}", marks=[pytest.mark.slow] if block.is_slow else [])
        for block in BLOCKS
        if not block.needs_more
    ]


@pytest.mark.parametrize("block", runnable())
def test_block_runs_and_prints_what_is_quoted(block, tmp_path, shell, request):
    assert block.language == "bash", "only output follows its commands in a block of text; all else is to be run"
    folder = folder_with_program(tmp_path) if block.trains else request.getfixturevalue("finished_run")
    printed = folder / "printed"
    printed.write_text("")
    commands = commands_of(block)
    assert commands
    statuses = [run(command, folder, shell) for command in commands]
    assert not any(statuses), printed.read_text()
    for line in block.printed:
        assert line in printed.read_text()


def test_only_known_commands_are_left_to_slow_tests():
    """A missing marker is detected without the slow tests."""
    slow = [command for block in BLOCKS if block.is_slow and not block.needs_more for command in commands_of(block)]
    starts = ("python profiler.py ", "torchrun --standalone ", "python main.py --device cpu ")
    assert all(command.startswith(starts) for command in slow)
    assert all("--device cpu" in command for command in slow if command.startswith("torchrun"))


def test_every_code_block_is_tested():
    """Other tests would miss code that is indented, or fenced with tildes."""
    fences = re.findall(r"^\s*(?:```|~~~)", GUIDE, re.MULTILINE)
    assert len(fences) == 2 * len(BLOCKS) + 2 * sum(bool(block.printed) for block in BLOCKS)
    prose = re.sub(r"^```.*?^```$", "", GUIDE, flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"^( {4}|\t)", prose, re.MULTILINE)


# --- code blocks that cannot run here -----------------------------------------------------------------------------


def test_marked_code_blocks_quote_no_output():
    """No test could check the output of such blocks."""
    assert not [block.line for block in BLOCKS if block.needs_more and block.printed]


def launches() -> list[tuple[str, ...]]:
    """Returns the arguments of every torchrun command in the guide."""
    commands = [command for block in BLOCKS for command in commands_of(block)]
    commands += [code for code in code_in(GUIDE) if code.startswith("torchrun ") and ".py" in code]
    tokens = [shlex.split(command, comments=True) for command in commands]
    return [tuple(t[t.index("torchrun") + 1 :]) for t in tokens if "torchrun" in t]


@pytest.mark.parametrize("arguments", launches(), ids=" ".join)
def test_torchrun_parses_its_arguments(arguments):
    known = get_args_parser().parse_args(list(arguments))
    assert known.training_script in (*SCRIPTS, "profiler.py")
    assert not any(option.startswith(("--nn", "--nproc", "--rdzv")) for option in known.training_script_args)


# --- arithmetic -------------------------------------------------------------------------------------------------


def arithmetic() -> list[tuple[str, ...]]:
    section = GUIDE.split("| flags | devices |")[1].split("\n\n")[0]
    return [tuple(cell.strip("` ") for cell in line.strip("|").split("|")) for line in section.splitlines()[2:]]


@pytest.mark.parametrize("row", arithmetic(), ids=lambda row: " ".join(row[:2]))
def test_batch_arithmetic_of_the_page_is_right(row):
    argv, num_devices, *shown = row
    flags, problems = parse(shlex.split(argv), several_devices=False)
    assert not problems
    batch = flags.batch
    split = split_batch(
        batch.batch_size, batch.grad_accum_steps, batch.global_batch_size, int(num_devices), int(num_devices)
    )
    one_device = batch.batch_size * batch.grad_accum_steps
    rates = [0.001 * device_scaling_factor(rule, split.global_batch_size, one_device) for rule in ("linear", "sqrt")]
    expected = [split.batch_size, split.grad_accum_steps, split.global_batch_size]
    assert shown == [*map(str, expected), *(f"{rate:g}" for rate in rates)]


# --- links ------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Returns the names under which a document's headings can be linked to."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_links_to_headings_exist():
    for path, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", GUIDE):
        text = (ROOT / "docs" / path).read_text() if path else GUIDE
        assert anchor in anchors(text), f"{path}#{anchor}"
