import pytest


@pytest.fixture
def on_cpu(cli):
    """Runs a command line in this process: (standard output, lines of standard error)."""

    def run(*args, status=0):
        found, out, err = cli(*args, "--device", "cpu")
        assert found == status, err
        return out, err

    return run
