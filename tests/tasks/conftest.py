import pytest

from tests.helpers.small_seqrec import SMALL, write_interactions
from trainer.commands.build import build_task
from trainer.commands.parse import parse


@pytest.fixture(scope="module")
def data_file(tmp_path_factory):
    return write_interactions(tmp_path_factory.mktemp("seqrec") / "interactions.txt")


@pytest.fixture
def argv(data_file, cache_dir):
    """Returns the command line of a small seqrec model on the small file for one epoch."""
    return [
        "--task", "seqrec", "--data-dir", str(data_file), "--k-core", "0", "--cache-dir", str(cache_dir), *SMALL,
        "--epochs", "1", "--batch-size", "16", "--num-threads", "1",
    ]  # fmt: skip


@pytest.fixture
def make_task(cache_dir):
    """Returns a function that builds the task of a command line, with its data."""

    def make(*argv):
        flags, problems = parse([*map(str, argv), "--cache-dir", str(cache_dir / "lockstep")], several_devices=False)
        assert problems == []
        return build_task(flags)

    return make
