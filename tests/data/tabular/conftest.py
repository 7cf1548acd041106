from pathlib import Path

import numpy as np
import pytest

from data.tabular.reader import read_table
from data.tabular.table import Table


@pytest.fixture
def read(tmp_path: Path):
    """Returns a function that writes a file and reads it as a table."""

    def run(content: str | bytes, name: str = "t.csv") -> Table:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return read_table(path)

    return run


@pytest.fixture
def read_arrays(tmp_path: Path):
    """Returns a function that saves arrays as .npz and reads it as a table."""

    def run(**arrays: np.ndarray) -> Table:
        path = tmp_path / "t.npz"
        np.savez(path, **arrays)
        return read_table(path)

    return run
