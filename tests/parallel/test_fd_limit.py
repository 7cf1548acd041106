"""The limit of open files is raised for the connections of many processes, or is too low, and this is said."""

import resource

import pytest

from tests.conftest import TINY
from tests.helpers import forks
from trainer.common.errors import UserError
from trainer.parallel.fd_limit import BESIDE, PER_RANK, make_room


@pytest.fixture
def limits(monkeypatch):
    """Sets the (soft, hard) limit that the system is taken to have; returns what it is set to."""
    changed = []

    def pretend(soft, hard):
        monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda which, pair: changed.append(pair))
        return changed

    return pretend


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 524288, [(17024, 524288)]),
        (1024, 4096, [(4096, 4096)]),
        (1024, resource.RLIM_INFINITY, [(17024, resource.RLIM_INFINITY)]),
        (20000, 524288, []),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_it_may(soft, hard, expected, limits):
    changed = limits(soft, hard)
    make_room(1000)
    assert changed == expected


def test_a_hard_limit_that_is_too_low(limits):
    limits(1024, PER_RANK * 1000 + BESIDE - 1)
    with pytest.raises(UserError, match="1000 processes: each has connections to all others and needs at least 3064"):
        make_room(1000)


def few_open_files():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (24, hard))
    return lambda: None


def test_a_group_needs_more_than_the_soft_limit(environment, tmp_path):
    """Two processes open 25 files and more."""
    argv = ["--multi-gpu", "ddp", *TINY, "--device", "cpu", "--save-dir", tmp_path / "run"]
    statuses = forks.run_group(argv, 2, environment, tmp_path / "out", few_open_files)
    assert statuses == [0, 0], (tmp_path / "out").read_text()
