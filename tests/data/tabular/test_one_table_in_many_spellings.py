"""Tests that one data set gives the same numbers, classes and gaps in every spelling."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.tabular.encoding import Encoding
from data.tabular.reader import read_table
from data.tabular.screening import labelled_table

ROWS = 60
RANDOM = np.random.default_rng(0)
INCOME = [None if i % 7 == 3 else round(float(RANDOM.uniform(200, 90_000)), 2) for i in range(ROWS)]
SHARE = [None if i % 11 == 5 else round(float(RANDOM.uniform(-20, 100)), 1) for i in range(ROWS)]
VISITS = [int(RANDOM.integers(0, 4000)) for _ in range(ROWS)]
SMOKES = [bool(RANDOM.integers(2)) for _ in range(ROWS)]
TOWN = [str(RANDOM.choice(["Rome", "Oslo", "São Paulo"])) for _ in range(ROWS)]
SICK = [int(RANDOM.integers(2)) for _ in range(ROWS)]
NEW = range(0, ROWS, 3)

Write = Callable[[float], str]


def plain(value: float) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def with_point(value: float) -> str:
    return f"{value:,}"


def with_comma(value: float) -> str:
    return plain(value).replace(".", ",")


def german(value: float) -> str:
    return f"{value:,}".translate(str.maketrans(",.", ".,"))


def french(value: float) -> str:
    return f"{value:,}".translate(str.maketrans({",": "\u202f", ".": ","}))


def swiss(value: float) -> str:
    return f"{value:,}".replace(",", "'")


def floats(value: float) -> str:
    return repr(float(value))


class File:
    """File with the data set, or with only the rows `NEW`, without their classes."""

    def __init__(
        self,
        separator: str = ",",
        number: Write = plain,
        income: str = "{}",
        share: str = "{}",
        missing: str = "",
        truths: tuple[str, ...] = ("no", "yes"),
        classes: tuple[str, ...] = ("0", "1"),
        quoted: bool = False,
        blanks: str = "",
        ends: str = "\n",
        start: str = "",
        turned: bool = False,
        packed: bool = False,
    ) -> None:
        def told(value: float | None, form: str = "{}") -> str:
            return missing if value is None else form.format(number(value))

        self.columns = {
            "income": [told(value, income) for value in INCOME],
            "share": [told(value, share) for value in SHARE],
            "visits": [told(value) for value in VISITS],
            "smokes": [truths[value + 2 * (i % (len(truths) // 2))] for i, value in enumerate(SMOKES)],
            "town": TOWN,
            "sick": [classes[value + 2 * (i % (len(classes) // 2))] for i, value in enumerate(SICK)],
        }
        self.separator, self.blanks, self.ends, self.start = separator, blanks, ends, start
        self.quoted, self.turned, self.packed = quoted, turned, packed

    def write(self, folder: Path, is_new: bool) -> Path:
        names = [name for name in self.columns if not (is_new and name == "sick")]
        names = names[::-1] if self.turned else names
        rows = [names, *([self.columns[name][i] for name in names] for i in (NEW if is_new else range(ROWS)))]
        lines = (self.separator.join(map(self._cell, row)) + self.ends for row in rows)
        content = (self.start + "".join(lines)).encode()
        path = folder / f"{'new' if is_new else 'all'}.csv{'.gz' if self.packed else ''}"
        path.write_bytes(gzip.compress(content) if self.packed else content)
        return path

    def _cell(self, text: str) -> str:
        is_quoted = self.quoted or self.separator in text
        return self.blanks + (f'"{text}"' if is_quoted else f"{text}{self.blanks}")


UNITS = {"income": "${}", "share": "{}%"}
SPELLINGS = {
    "plain": File(),
    "semicolons": File(";"),
    "tabs": File("\t"),
    "decimal commas in quotes": File(",", with_comma),
    "decimal commas and semicolons": File(";", with_comma),
    "decimal commas and tabs": File("\t", with_comma),
    "thousands": File(",", with_point),
    "thousands and semicolons": File(";", with_point),
    "German": File(";", german, start="\ufeff", ends="\r\n"),
    "German and tabs": File("\t", german),
    "French": File(";", french, share="{} %"),
    "Swiss": File(",", swiss),
    "units": File(",", plain, **UNITS),
    "units and thousands": File(",", with_point, **UNITS),
    "units behind": File(";", german, income="{} €", share="{} Prozent"),
    "all quoted": File(quoted=True),
    "quotes and blanks": File(number=with_point, quoted=True, blanks=" "),
    "byte order mark": File(start="\ufeff", ends="\r\n"),
    "blank lines": File(start="\n \n", ends="\n\n"),
    "dashes": File(missing="-"),
    "marks of spreadsheets": File(missing="#N/A"),
    "None": File(missing="None", truths=("False", "True"), classes=("False", "True")),
    "a word": File(missing="withheld"),
    "dots and decimal commas": File(";", with_comma, missing="."),
    "nan": File(missing="nan", truths=("n", "y", "N", "Y")),
    "truths in any case": File(truths=("no", "yes", "NO", "YES", "No", "Yes")),
    "capital truths": File(truths=("FALSE", "TRUE"), classes=("NO", "YES")),
    "classes as floats": File(number=floats, classes=("0.0", "1.0")),
    "classes as floats and whole numbers": File(classes=("0", "1", "0.0", "1.0")),
    "classes in any case": File(classes=("false", "true", "False", "TRUE")),
    "columns turned": File(turned=True),
    "packed": File(packed=True),
}


def read(file: File, folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, Encoding]:
    """Returns features by column name, (ROWS, 5), labels, (ROWS,), features of the new rows, and the encoding."""
    table = labelled_table(read_table(file.write(folder, is_new=False)), "sick")
    encoding = Encoding.fit(table.features, table.labels)
    order = np.argsort(table.features.names)
    new = encoding.encode(read_table(file.write(folder, is_new=True)))
    return encoding.encode(table.features)[:, order], table.labels.values, new[:, order], encoding


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_says_the_same(name, tmp_path) -> None:
    features, labels, new, _ = read(SPELLINGS[name], tmp_path)
    income = np.array(INCOME, float)
    np.testing.assert_array_equal(
        features[:, 0], ((income - np.nanmean(income)) / np.nanstd(income)).astype(np.float32)
    )
    assert labels.tolist() == SICK
    expected = read(SPELLINGS["plain"], tmp_path)
    np.testing.assert_array_equal(features, expected[0])
    np.testing.assert_array_equal(new, expected[2])
    np.testing.assert_array_equal(new, features[list(NEW)])


def test_new_rows_may_use_other_separators(tmp_path) -> None:
    """New rows must have the same units and words as the training file."""
    alike = {
        name: file
        for name, file in SPELLINGS.items()
        if {word.lower() for word in file.columns["smokes"]} == {"no", "yes"}
        and not any(cell.endswith(("%", "t")) for cell in file.columns["share"])
    }
    assert len(alike) >= 20
    expected = read(SPELLINGS["plain"], tmp_path)[2]
    for trained in alike:
        encoding = read(alike[trained], tmp_path)[3]
        order = np.argsort([code.name for code in encoding.columns])
        for name in alike if trained == "plain" else ("plain", "German"):
            new = encoding.encode(read_table(alike[name].write(tmp_path, is_new=True)))
            np.testing.assert_array_equal(new[:, order], expected, err_msg=f"{trained}, {name}")
