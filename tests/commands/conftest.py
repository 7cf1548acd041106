import pytest


@pytest.fixture
def on_cpu(cli):
    """Runs a command line on the CPU in this process: (stdout, lines of stderr)."""

    def run(*args, status=0):
        found, out, err = cli(*args, "--device", "cpu")
        assert found == status, err
        return out, err

    return run
