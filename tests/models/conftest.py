import pytest

from tests.helpers.one_thread import on_one_thread


@pytest.fixture(autouse=True)
def one_thread():
    with on_one_thread():
        yield
