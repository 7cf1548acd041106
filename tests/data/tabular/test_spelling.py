from dataclasses import asdict

import numpy as np
import pytest

from data.tabular.encoding import Encoding
from data.tabular.screening import labelled_table
from data.tabular.spelling import PLAIN, UNKNOWN, Likely, Spelling, reading_of

MARKS = ["-", "--", ".", "#N/A", "#NA", "None", "nan", "-nan", "1.#IND", "NULL", "#DIV/0!", "inf", ""]


def read_as(*texts: str, likely: Likely = UNKNOWN, counts=None):
    """Returns the numbers of a column, or None if it is categorical."""
    reading = reading_of(texts, np.array(counts or [1] * len(texts)), likely)
    return None if reading.spelling is None else [reading.spelling.number(text) for text in texts]


def doubt(*texts: str, counts=None) -> str:
    return reading_of(texts, np.array(counts or [1] * len(texts))).doubt


@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        (["50,321.12", "7.5"], [50321.12, 7.5]),
        (["50.321,12", "7,5"], [50321.12, 7.5]),
        (["1,234,567", "1,234", "12"], [1234567, 1234, 12]),
        (["1,234.5", "1500"], [1234.5, 1500]),
        (["1,234", "12,34"], [1.234, 12.34]),
        (["1,234", "0,500"], [1.234, 0.5]),
        (["1,234", "12,500", "950"], [1234, 12500, 950]),
        (["1 234,5", "12,5"], [1234.5, 12.5]),
        (["1\u202f234", "12\u00a0500"], [1234, 12500]),
        (["1'234.50", "1\u2019000"], [1234.5, 1000]),
        (["$50,321.12", "-$7.50", "$-8"], [50321.12, -7.5, -8]),
        (["US$5", "US$6"], [5, 6]),
        (["12,50 €", "7,00€"], [12.5, 7]),
        (["50.3%", "7 %"], [50.3, 7]),
        (["70 kg", "65.5 kg"], [70, 65.5]),
        (["36 months", "60 months"], [36, 60]),
        (["50k", "1.2M", "3B", "900"], [50e3, 1.2e6, 3e9, 900]),
        (["\u22125", "7"], [-5, 7]),
    ],
)
def test_every_number_format_that_a_cell_proves_is_read(texts, numbers) -> None:
    assert read_as(*texts) == pytest.approx(numbers, rel=1e-15)


def test_a_comma_between_semicolons_is_decimal_unless_it_groups_thousands() -> None:
    assert read_as("1,234", "12,500", likely=Likely(",")) == [1.234, 12.5]
    assert read_as("1,234", "1,234,567", likely=Likely(",")) == [1234, 1234567]
    assert read_as("1.234", "12.5", likely=Likely(",")) == [1.234, 12.5]
    grouped = ["1.234", "12.500", "7.000", "9.999", "1.200", "950"]
    assert read_as(*grouped, likely=Likely(",")) == [1234, 12500, 7000, 9999, 1200, 950]
    assert read_as(*grouped)[0] == 1.234
    assert read_as(*grouped, "0.123", likely=Likely(","))[0] == 1.234


def test_ambiguous_numbers_are_read_like_other_columns(read) -> None:
    def numbers(content: str) -> list[float]:
        return read(content).column("x").typed().values.tolist()

    assert numbers("x;z\n1.234;3,5\n950;4,25\n") == [1234, 950]
    assert numbers("x\tz\n1.234\t3,5\n950\t4,25\n") == [1234, 950]
    assert numbers("x\tz\n1.234\t3.5\n950\t4.25\n") == [1.234, 950]
    assert numbers("x;z\n1,234;3.5\n950;4.25\n") == [1234, 950]
    assert numbers('x,z\n"1,234",3.5\n1500,4.25\n') == [1234, 1500]
    assert numbers("x;z;u\n1.234;3,5;1.5\n950;4,25;2.5\n") == [1.234, 950]
    assert read_as("1.234", "950", likely=Likely(",", True)) == [1234, 950] and read_as(
        "1.5", "950", likely=Likely(",", True)
    ) == [
        1.5,
        950,
    ]


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["12,5", "2.5"], "numbers in different formats: '2.5', '12,5'"),
        (["1,234", "12,34", "1,234,567"], "numbers in different formats: '1,234,567', '12,34'"),
        (["1,234", "1500", "7"], "the comma in '1,234' may mark thousands or decimals, because '1500' has no comma"),
        (["70 kg", "80 kg", "154 lb"], "numbers in different formats: '70 kg', '154 lb'"),
        (["70 kg", "80 kg", "65"], "numbers in different formats: '70 kg', '65'"),
        (["0", "1", "2", "other"], "text among the numbers: 'other'"),
        (["A1", "A2", "B1"], ""),
        (["10.0.0.1", "192.168.1.1"], ""),
        (["2024-05-31", "2024-06-01"], ""),
        (["48.1,11.5", "49.2,12.0"], ""),
    ],
)
def test_categorical_columns_have_a_reason(texts, reason) -> None:
    assert read_as(*texts) is None and doubt(*texts) == reason


def test_a_rare_spelling_of_a_number_is_not_parsed() -> None:
    np.testing.assert_array_equal(read_as("2.5", "3.5", "12,5", counts=[500, 500, 3]), [2.5, 3.5, np.nan])
    assert read_as("1,234", "12,34", "1,234,567", counts=[1000, 1, 30]) == [
        1234,
        pytest.approx(np.nan, nan_ok=True),
        1234567,
    ]


@pytest.mark.parametrize("mark", MARKS)
def test_any_number_of_missing_value_marks_among_numbers_is_accepted(read, mark) -> None:
    column = read("x,y\n1.5,a\n2.5,b\n" + f"{mark},a\n" * 98).column("x").typed()
    assert column.texts is None and column.is_missing.sum() == 98


def test_one_unknown_word_among_numbers_marks_missing_values() -> None:
    numbers = [str(i) for i in range(11)]
    counts = [1] * 11 + [9]
    assert np.isnan(read_as(*numbers, "withheld", counts=counts)[-1])
    assert read_as(*numbers[:10], "withheld", counts=counts[1:]) is None
    assert read_as(*numbers, "withheld", "refused", counts=[*counts, 9]) is None
    assert read_as(*numbers, "10 or more", counts=counts) is None


def test_marks_among_texts_are_categories(read) -> None:
    assert read("x,y\n+,a\n-,b\nNone,c\n").column("x").typed().texts == ("+", "-", "None")


def test_a_long_text_is_not_a_number_and_is_parsed_fast() -> None:
    digits = "1" * 100_000
    for text in (digits, f"{digits}x", f"1.{digits}x", f"{',' * 100_000}1", f"{'1,234' * 20_000}x"):
        assert read_as(text, "1") is None and np.isnan(PLAIN.number(text))


def test_new_rows_are_read_like_training_rows_by_default(read) -> None:
    def encoded(content: str) -> list[float]:
        code = encoding.columns[0]
        return [round(value * code.std + code.mean, 3) for value in encoding.encode(read(content))[:, 0].tolist()]

    table = labelled_table(read('x,y\n"1,5",a\n"12,25",b\n"7,5",a\n"3,5",b\n'), "y")
    encoding = Encoding.from_dict(asdict(Encoding.fit(table.features, table.labels)))
    assert encoding.columns[0].spelling == Spelling(",")
    assert encoded('x\n"1,234"\n') == [1.234]
    assert encoded('x\n"1,234.5"\n"1,234"\n') == [1234.5, 1234]
    assert "x: '1,234.5' is read as 1234.5, although" in encoding.remarks(read('x\n"1,234.5"\n'))[0]
    assert encoded("x\n5.5\n") == [5.5] and encoding.remarks(read('x\n"1,5"\n')) == []


def test_new_rows_need_the_unit_of_training(read) -> None:
    table = labelled_table(read("x,y\n70 kg,a\n80 kg,b\n75 kg,a\n71 kg,b\n"), "y")
    encoding = Encoding.fit(table.features, table.labels)
    assert np.isnan(encoding.encode(read("x\n154 lb\n70\n70 kg\n"))).tolist() == [[True], [True], [False]]
    assert encoding.remarks(read("x\n154 lb\n70 kg\n")) == [
        "x: 1 of 2 values, such as '154 lb', count as missing, because they are not numbers with the unit kg."
    ]


@pytest.mark.parametrize(
    ("texts", "kept"),
    [
        (["yes", "YES", "no", "No"], {"yes", "no"}),
        (["TRUE", "True", "TRUE", "FALSE"], {"TRUE", "FALSE"}),
        (["Y", "y", "N", "N"], {"Y", "N"}),
        (["y", "Y", "x", "x"], {"y", "Y", "x"}),
        (["Sox2", "SOX2", "a", "A"], {"Sox2", "SOX2", "a", "A"}),
        (["1", "1.0", "2.", "other"], {"1", "2", "other"}),
        (["1.0", "1.10", "1.1", "other"], {"1.0", "1.10", "1.1", "other"}),
        (["007", "7", "x", "x"], {"007", "7", "x"}),
    ],
)
def test_spellings_of_one_category_are_merged(read, texts, kept) -> None:
    assert set(read("x,y\n" + "".join(f"{text},a\n" for text in texts)).column("x").typed().texts) == kept


def test_new_rows_may_spell_categories_differently(read) -> None:
    table = labelled_table(read("x,z,y\nyes,1,a\nno,2,b\nno,other,a\nyes,1,b\n"), "y")
    encoding = Encoding.fit(table.features, table.labels)
    assert encoding.encode(read("x,z\nYES,1.0\nNo,other\n")).tolist() == [[1, 0], [0, 2]]
