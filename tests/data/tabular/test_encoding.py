import json
from dataclasses import asdict

import numpy as np
import pytest

from data.tabular.encoding import Encoding
from data.tabular.screening import labelled_table
from trainer.common.errors import UserError

TRAIN = "n,t,y\n1,b,no\n2,c,yes\n6,,no\n,b,yes\n"


@pytest.fixture
def encoding(read) -> Encoding:
    table = labelled_table(read(TRAIN), "y")
    return Encoding.fit(table.features, table.labels)


def assert_rows(encoded: np.ndarray, *rows: tuple) -> None:
    assert encoded.dtype == np.float32
    np.testing.assert_allclose(encoded, np.array(rows), rtol=1e-6)


def standardised(number: float) -> float:
    return (number - 3) / np.std([1, 2, 6])


def test_numbers_categories_and_missing_values_are_encoded(read, encoding) -> None:
    assert_rows(
        encoding.encode(read(TRAIN)), (standardised(1), 0), (standardised(2), 1), (standardised(6), np.nan), (np.nan, 0)
    )


def test_a_new_table_may_have_other_columns_in_any_order(read, encoding) -> None:
    table = read("other,t,n\nx,c,2\nz,b,1\n")
    assert_rows(encoding.encode(table), (standardised(2), 1), (standardised(1), 0))
    assert encoding.remarks(table) == ["Ignored columns, which training did not use: other."]
    with pytest.raises(UserError, match=r"^--data-dir .*: lacks n; give all columns"):
        encoding.encode(read("t\nc\n"))


def test_unknown_values_are_missing_and_reported(read, encoding) -> None:
    table = read("n,t\n1,new\nmany,b\n,c\n")
    assert_rows(encoding.encode(table), (standardised(1), np.nan), (np.nan, 0), (np.nan, 1))
    assert encoding.remarks(table) == [
        "n: 1 of 3 values, such as 'many', count as missing, because they are not numbers.",
        "t: 1 of 3 values, such as 'new', count as missing, because no training row has them.",
    ]
    assert encoding.remarks(read(TRAIN)) == []
    [remark] = encoding.remarks(read("n,t\n1e300,b\n"))
    assert remark == "n: 1 of 1 values, such as '1e300', count as missing, because they exceed 1e+100."


def test_only_training_rows_count(read) -> None:
    table = labelled_table(read("n,t,y\n1,b,no\n3,b,yes\n100,z,no\n5,a,yes\n"), "y")
    rows = np.array([0, 1, 3])
    encoding = Encoding.fit(table.features.take(rows), table.labels)
    assert encoding.columns[0].mean == 3 and encoding.columns[1].categories == ("a", "b")
    assert np.isnan(encoding.encode(table.features)[2, 1])


def test_numeric_looking_categories_and_arrays_are_encoded(read, read_arrays) -> None:
    table = labelled_table(read("x,y\n1,a\n2,b\n3,a\nother,b\n"), "y")
    encoding = Encoding.fit(table.features, table.labels)
    assert encoding.columns[0].categories == ("1", "2", "3", "other")
    assert encoding.encode(read("x\n3\n1\n")).tolist() == [[2], [0]]
    arrays = read_arrays(X=np.array([[2.0], [3.0], [2.5]]), names=np.array(["x"]))
    np.testing.assert_array_equal(encoding.encode(arrays), [[1], [2], [np.nan]])


def test_small_differences_between_large_numbers_are_kept(read) -> None:
    numbers = 1.7e9 + np.arange(0, 64, 2)
    content = "time,y\n" + "".join(f"{number:.0f},{'ab'[i % 2]}\n" for i, number in enumerate(numbers))
    table = labelled_table(read(content), "y")
    steps = np.diff(Encoding.fit(table.features, table.labels).encode(table.features)[:, 0])
    np.testing.assert_allclose(steps, 2 / numbers.std(), rtol=1e-5)


@pytest.mark.parametrize("number", ["1e99", "-1e99", "1e-99", "5e-320", "0.1"])
def test_every_number_stays_finite(read, number) -> None:
    table = labelled_table(read(f"x,z,y\n{number},1,a\n{number},2,b\n0.5,2,a\n{number},3,b\n"), "y")
    for rows in (np.arange(4), np.array([0, 1, 3]), np.array([2])):
        encoded = Encoding.fit(table.features.take(rows), table.labels).encode(table.features)
        assert np.isfinite(encoded).all() and (np.abs(encoded) <= 1e9).all()
        assert (encoded[rows] == 0).any() or len(rows) == 4


def test_a_table_with_labels_is_not_predicted(read, encoding) -> None:
    encoding.refuse_label(read("n,t\n1,b\n"))
    with pytest.raises(
        UserError, match=r"^--data-dir .*: has the column 'y', which is the label to predict; remove the column$"
    ):
        encoding.refuse_label(read(TRAIN))


def test_the_encoding_survives_json(read, encoding) -> None:
    again = Encoding.from_dict(json.loads(json.dumps(asdict(encoding))))
    assert again == encoding
    np.testing.assert_array_equal(again.encode(read(TRAIN)), encoding.encode(read(TRAIN)))
    earlier = asdict(encoding)
    for column in earlier["columns"]:
        del column["spelling"]
    assert Encoding.from_dict(earlier) == encoding


def test_a_column_that_is_empty_in_training_rows_is_encoded(read) -> None:
    table = labelled_table(read("n,t,y\n,,a\n,,b\n1,x,a\n2,z,b\n"), "y")
    encoding = Encoding.fit(table.features.take(np.array([0, 1])), table.labels)
    assert Encoding.from_dict(asdict(encoding)) == encoding
    assert_rows(encoding.encode(table.features), *[(np.nan, np.nan)] * 2, (1, np.nan), (2, np.nan))
