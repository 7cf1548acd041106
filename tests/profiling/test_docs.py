"""The profiler's commands in the documents parse."""

import re

import pytest
import torch

from tests.docs.test_docs import DOCUMENTS, code_blocks
from trainer.commands.parse import parse
from trainer.config import parse_flags
from trainer.profiling import cli
from trainer.profiling.cli import COMMANDS
from trainer.profiling.meters import LARGE_BYTES
from trainer.profiling.processes import FOR_SEVERAL_DEVICES


def documented_commands():
    texts = [path.read_text() for path in DOCUMENTS]
    blocks = [block for text in texts for block in code_blocks(text)]
    blocks += [re.sub(r" {3,}\S.*", "", command.about[1]) for command in COMMANDS.values()]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [line.split("profiler.py ", 1)[1].split("  #")[0].split() for line in lines if "profiler.py " in line]
    return [arguments for arguments in found if arguments[0] in COMMANDS]


@pytest.mark.parametrize("arguments", documented_commands(), ids=" ".join)
def test_documented_command_parses(arguments, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    name, *argv = arguments
    if "--help" in argv:
        return
    if name == "check":
        _, problems = parse_flags([COMMANDS[name].tool], argv)
    else:
        several = cli.names_several_devices(argv) or COMMANDS[name].run is cli.in_worlds
        argv = [*argv, *FOR_SEVERAL_DEVICES] if COMMANDS[name].run is cli.in_worlds else argv
        _, problems = parse(argv, several, COMMANDS[name].tool)
    # The reader has data sets that this machine may lack.
    assert [text for text in problems if not text.startswith("--data-dir ")] == []


def test_documents_show_every_command():
    assert {arguments[0] for arguments in documented_commands()} == COMMANDS.keys()
    assert LARGE_BYTES == 64 * 2**20  # the documents state this size
