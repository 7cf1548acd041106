from functools import partial

import pytest

from tests.conftest import launcher
from tests.faults.faulty_group import start_faulty, watch_to_end
from tests.faults.job import CommandLine, Forks
from tests.faults.lives import Life, unbroken_life
from tests.faults.watched import RECIPE, kill_in, named_points, watch
from tests.helpers.processes import end_session


@pytest.fixture(scope="session")
def forked(environment):
    """Returns a `tests.faults.lives.StartJob` that starts forked processes."""
    return partial(Forks, environment=environment)


@pytest.fixture(scope="session")
def forked_in_parts(environment):
    """Returns a `StartJob` that starts forked processes; several processes use FSDP."""
    return partial(Forks, environment=environment, form="fsdp")


@pytest.fixture(scope="session")
def typed(environment):
    """Returns a `StartJob` that starts a new interpreter, as a user does."""
    return partial(CommandLine, environment=environment)


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory, forked):
    """Returns a function that trains a recipe without interruption, once per world size, and returns its `Life`."""
    known = {}

    def live(recipe, world_size):
        if (recipe, world_size) not in known:
            known[recipe, world_size] = unbroken_life(tmp_path_factory.mktemp("unbroken"), recipe, forked, world_size)
        return known[recipe, world_size]

    return live


@pytest.fixture(scope="session")
def fresh(tmp_path_factory, forked):
    """Returns the `Watched` record of an uninterrupted run."""
    return watch(Life(tmp_path_factory.mktemp("fresh") / "run", RECIPE), forked)


@pytest.fixture(scope="session")
def resumed(fresh, tmp_path_factory, forked):
    """Returns the `Watched` record of the second attempt of a run that was killed in a save."""
    life = Life(tmp_path_factory.mktemp("resumed") / "run", RECIPE)
    kill_in(life, named_points(fresh.operations)["between manifest and rename"], forked)
    return watch(life, forked)


@pytest.fixture
def faulty_run(environment, tmp_path):
    """Returns a function that runs a group of processes with a fault on one rank, and returns an `Ended`."""
    sessions = []

    def run(fault, start=launcher, world_size=2, more=()):
        process = start_faulty(fault, start, world_size, more, environment, tmp_path)
        sessions.append(process.pid)
        return watch_to_end(process, tmp_path)

    yield run
    for session in sessions:
        end_session(session)
