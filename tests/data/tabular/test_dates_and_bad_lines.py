import numpy as np
import pytest

from data.table_files import Reading
from data.tabular.encoding import Encoding
from data.tabular.reader import read_table
from data.tabular.screening import labelled_table
from trainer.common.errors import UserError


@pytest.fixture
def table(tmp_path):
    def run(texts, name="t.csv"):
        path = tmp_path / name
        path.write_text("when;y\n" + "".join(f"{text};{'ab'[i % 2]}\n" for i, text in enumerate(texts)))
        return read_table(path)

    return run


@pytest.mark.parametrize(
    ("texts", "order"),
    [
        (["2024-01-31 06:00", "2023-12-01 18:30", "", "2024-02-29 00:00"], ""),
        (["31/01/2024 06:00", "01/12/2023 18:30", "", "29/02/2024"], ", day first"),
        (["01/31/2024 6:00 AM", "12/01/2023 6:30 PM", "", "2/29/2024 12:00 AM"], ", month first"),
    ],
)
def test_dates_are_features(texts, order, table):
    found = labelled_table(table(texts * 5), "y")
    names = [f"when ({part}{order})" for part in ("days", "month", "weekday", "hour")]
    assert list(found.features.names) == names
    values = [column.values[:4].tolist() for column in found.features.columns]
    expected = [
        [19753.25, 19692 + 18.5 / 24, np.nan, 19782],
        [1, 12, np.nan, 2],
        [2, 4, np.nan, 3],
        [6, 18.5, np.nan, 0],
    ]
    np.testing.assert_allclose(values, expected)
    [report] = [report for report in found.reports if report.name == "when"]
    assert (report.kind, report.num_missing) == ("date", 5) and names[1] in report.note

    encoding = Encoding.fit(found.features, found.labels)
    new = table(["28/03/2024", "", "soon"] if "day" in order else ["2024-03-28", "", "soon"], "new.csv")
    encoded = encoding.encode(new) * [code.std for code in encoding.columns] + [code.mean for code in encoding.columns]
    if order != ", month first":
        np.testing.assert_allclose(encoded[0], [19810, 3, 3, 0], atol=1e-3)
    assert np.isnan(encoded[1:]).all()
    assert encoding.encode(found.features).shape == (20, 4)


def test_constant_date_parts_are_dropped(table):
    found = labelled_table(table([f"2024-05-{day:02}" for day in range(6, 26)]), "y")
    assert found.features.names == ("when (days)", "when (weekday)")


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["01/02/2024", "03/05/2024"], "ambiguous order of day and month; write 2024-05-31"),
        (["1/2/24", "13/2/24"], "20 of 20 dates, such as '1/2/24', cannot be read; write 2024-05-31"),
        (["2024/5/31", "2024/5/31"], "all dates are equal"),
    ],
)
def test_the_reason_for_dropped_dates_is_reported(texts, why, table):
    with pytest.raises(UserError, match=rf"has no column to learn from \(when: {why}\); add columns"):
        labelled_table(table(texts * 10), "y")


@pytest.mark.parametrize("form", ["{y}-{m}-{d}", "{y}/{m}/{d}", "{y}/{m:02}/{d:02} 00:00", "{y}-{m}-{d} 0:00"])
def test_dates_may_have_the_year_first(form, table):
    days = [(2023, 12, 1), (2024, 2, 29), (2024, 10, 5)] * 10
    expected = labelled_table(table([f"{y}-{m:02}-{d:02}" for y, m, d in days]), "y")
    found = labelled_table(table([form.format(y=y, m=m, d=d) for y, m, d in days]), "y")
    for column, of_iso in zip(found.features.columns, expected.features.columns, strict=True):
        assert column.name == of_iso.name and np.array_equal(column.values, of_iso.values)


def test_cells_that_are_not_dates_are_counted(table):
    found = labelled_table(table([*(f"2024-05-{day:02}" for day in range(1, 31)), "20240531"]), "y")
    [report] = [report for report in found.reports if report.name == "when"]
    assert (
        report.num_missing == 1 and "1 of 31 dates, such as '20240531', cannot be read; write 2024-05-31" in report.note
    )


@pytest.mark.parametrize(
    ("trained", "new", "lost"),
    [
        ("{d:02}/{m:02}/{y}", ["01/02/2024", "31.05.22", "", "28/03/2024"], "1 of 4 values, such as '31.05.22'"),
        ("{m:02}/{d:02}/{y}", ["44000", "hello", "12:30", "2024-05-31"], "3 of 4 values, such as '12:30'"),
        ("{y}-{m:02}-{d:02}", ["31/05/2024", "05/05/2024"], "1 of 2 values, such as '31/05/2024'"),
        ("{d:02}/{m:02}/{y}", ["01/02/2024", "2024-05-31"], ""),
    ],
)
def test_new_dates_that_cannot_be_read_are_reported_once(trained, new, lost, table):
    dates = [trained.format(y=2024, m=1 + k % 12, d=k + 1) for k in range(28)]
    found = labelled_table(table(dates), "y")
    remarks = Encoding.fit(found.features, found.labels).remarks(table(new, "new.csv"))
    how = {"{d": "31/05/2024", "{m": "05/31/2024", "{y": "2024-05-31"}[trained[:2]]
    assert remarks == [f"when: {lost}, count as missing, because they are not dates such as {how}."] * bool(lost)


def test_new_dates_in_the_other_order_are_refused(table):
    found = labelled_table(table([f"{day:02}/01/2024" for day in range(1, 29)]), "y")
    encoding = Encoding.fit(found.features, found.labels)
    new = table(["02/03/2024", "03/28/2024"], "new.csv")
    says = "new.csv: when: '03/28/2024' has the month first, but the dates of the training rows have the day first;"
    for use in (encoding.encode, encoding.remarks):
        with pytest.raises(UserError, match=says):
            use(new)


def test_malformed_lines_are_refused_or_skipped_and_counted(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,y\n1,a\n2,b,c\n3\n4,b\n" + "1,a\n4,b\n" * 9)
    with pytest.raises(UserError, match=r"line 3: has 3 fields, .* has 2: '2,b,c'; fix .*--on-bad drop"):
        read_table(path)
    table = read_table(path, reading=Reading(on_bad="drop"))
    assert table.column("x").distinct_texts == ["1", "4"]
    assert labelled_table(table, "y").warnings[0].startswith("Left out: 2 lines that cannot be read, such as --data")
