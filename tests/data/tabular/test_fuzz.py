"""Tests that damaged tables are read or refused in one sentence, quickly and without writing files."""

import io
import time
import zipfile
from collections.abc import Iterator

import numpy as np
import pytest

from data.overview import overview
from data.tabular.encoding import Encoding
from data.tabular.reader import read_table
from data.tabular.screening import HEADING, labelled_table
from tests.helpers.mutations import mutations
from trainer.common.errors import UserError

COMMAS = "id,fare,sex,when,y\n" + "".join(
    f'{i},"${1 + i},250.00",{"MF"[i % 2]},2024-05-{i + 1:02},{i % 2}\n' for i in range(8)
)
SEMICOLONS = "\ufeffage;town;y\r\n" + "".join(f"{i},5;Rome {i % 3};{'yes' if i % 2 else 'NO'}\r\n" for i in range(8))
ARRAYS = {"X": np.arange(16.0).reshape(8, 2), "y": np.array(["u", "v"] * 4), "names": np.array(["a", "b"])}


def with_damaged_arrays(count: int, seed: int) -> Iterator[bytes]:
    """Yields archives with correct checksums, each with one damaged array."""
    whole = {}
    for name, array in ARRAYS.items():
        content = io.BytesIO()
        np.save(content, array)
        whole[name] = content.getvalue()
    for name, content in whole.items():
        for damaged in mutations(content, count // len(whole), seed):
            archive = io.BytesIO()
            with zipfile.ZipFile(archive, "w") as file:
                for other, same in whole.items():
                    file.writestr(f"{other}.npy", damaged if other == name else same)
            yield archive.getvalue()


def damaged_archives(count: int, seed: int) -> Iterator[bytes]:
    content = io.BytesIO()
    np.savez_compressed(content, **ARRAYS)
    return mutations(content.getvalue(), count, seed)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("t.csv", mutations(COMMAS.encode(), 250, 1)),
        ("t.csv", mutations(SEMICOLONS.encode(), 150, 2)),
        ("t.npz", with_damaged_arrays(200, 3)),
        ("t.npz", damaged_archives(100, 4)),
    ],
    ids=["commas", "semicolons", "arrays", "archives"],
)
@pytest.mark.filterwarnings("error")
def test_damaged_tables_are_read_or_refused(name, files, tmp_path) -> None:
    path, refused = tmp_path / name, []
    for i, content in enumerate(files):
        path.write_bytes(content)
        start = time.process_time()
        try:
            table = labelled_table(read_table(path), "y")
            encoded = Encoding.fit(table.features, table.labels).encode(table.features)
            assert not np.isinf(encoded).any()
            assert all(line.isprintable() for line in overview(HEADING, [report.cells for report in table.reports]))
        except UserError as error:
            refused.append(str(error))
        assert time.process_time() - start < 2, i
    assert [each.name for each in tmp_path.iterdir()] == [name]
    assert 0.1 * i < len(refused) < i
    assert all(message.startswith(f"--data-dir {path}") and len(message) < 800 for message in refused)
