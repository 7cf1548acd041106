"""Fixtures for the tests of data/tabular/prior/."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small only wait for a second thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
