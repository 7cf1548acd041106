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
    """Starts a command line in forks; see `tests.faults.lives.StartJob`."""
    return partial(Forks, environment=environment)


@pytest.fixture(scope="session")
def forked_in_parts(environment):
    """The same, with several processes under fsdp."""
    return partial(Forks, environment=environment, form="fsdp")


@pytest.fixture(scope="session")
def typed(environment):
    """Starts a real command line."""
    return partial(CommandLine, environment=environment)


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory, forked):
    """The life of a recipe in a world, undisturbed; each is lived once."""
    known = {}

    def live(recipe, world_size):
        if (recipe, world_size) not in known:
            known[recipe, world_size] = unbroken_life(tmp_path_factory.mktemp("unbroken"), recipe, forked, world_size)
        return known[recipe, world_size]

    return live


@pytest.fixture(scope="session")
def fresh(tmp_path_factory, forked):
    """The whole of an undisturbed life, watched."""
    return watch(Life(tmp_path_factory.mktemp("fresh") / "run", RECIPE), forked)


@pytest.fixture(scope="session")
def resumed(fresh, tmp_path_factory, forked):
    """The rest of a life that was killed, watched."""
    life = Life(tmp_path_factory.mktemp("resumed") / "run", RECIPE)
    kill_in(life, named_points(fresh.operations)["between manifest and rename"], forked)
    return watch(life, forked)


@pytest.fixture
def faulty_run(environment, tmp_path):
    """Starts a group on one of whose ranks something happens; returns how it ended and what was left of it."""
    sessions = []

    def run(fault, start=launcher, world_size=2, more=()):
        process = start_faulty(fault, start, world_size, more, environment, tmp_path)
        sessions.append(process.pid)
        return watch_to_end(process, tmp_path)

    yield run
    for session in sessions:
        end_session(session)
