import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from data.interactions import table as module
from data.interactions.columns import ColumnChoice
from data.interactions.reader import Interactions, load_interactions
from tests.helpers.archives import tarred, zipped
from trainer.common.errors import UserError

# (user, item, rating, time) in no order of time. Users and items sort differently as numbers and as text.
NOON = 978_300_000
LINES = [
    (10, 30, 5, NOON + 300),
    (2, 200, 4, NOON + 150),
    (10, 200, 3, NOON + 100),
    (2, 7, 1, NOON + 150),
    (2, 30, 2, NOON + 50),
    (10, 30, 5, NOON + 200),
]
# Items per user, renumbered 7 -> 1, 30 -> 2, 200 -> 3.
ITEMS = [[2, 3, 1], [3, 2, 2]]
TIMES = [[NOON + t for t in row] for row in ([50, 150, 150], [100, 200, 300])]


@pytest.fixture
def fresh_cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def load(tmp_path: Path, fresh_cache: Path):
    """Returns a function that writes a file and reads it as interactions."""

    def run(content: str | bytes, name: str = "file.txt", k_core: int = 1, **columns: str) -> Interactions:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return load_interactions(path, k_core, fresh_cache, ColumnChoice(**columns))

    return run


def text(columns: str, separator: str = " ", end: str = "\n") -> str:
    """Returns the columns of LINES with the given first letters as a file."""
    chosen = ["uirt".index(letter) for letter in columns]
    return "".join(separator.join(str(line[c]) for c in chosen) + end for line in LINES)


def by_user(interactions: Interactions, values: np.ndarray) -> list[list[int]]:
    assert interactions.offsets[0] == 0 and interactions.offsets[-1] == len(values)
    return [part.tolist() for part in np.split(values, interactions.offsets[1:-1])]


def assert_are_the_lines(interactions: Interactions) -> None:
    assert interactions.num_users == 2 and interactions.num_items == 3
    assert by_user(interactions, interactions.items) == ITEMS
    assert by_user(interactions, interactions.times) == TIMES
    assert interactions.offsets.dtype == interactions.times.dtype == np.int64
    assert interactions.items.dtype == np.int32


# File formats


DAYS = [(user, item, 18_000 + (7 * user + 3 * item) % 40) for user in range(1, 7) for item in range(user, user + 5)]
TIME_FORMS = {
    "seconds": lambda day: day * 86400,
    "seconds as floats": lambda day: f"{day * 86400}.0",
    "milliseconds": lambda day: day * 86_400_000,
    "microseconds": lambda day: day * 86_400_000_000,
    "nanoseconds": lambda day: day * 86_400_000_000_000,
    "dates": lambda day: np.datetime64(day, "D"),
    "moments": lambda day: np.datetime64(day, "D").astype("M8[s]"),
    "with a zone": lambda day: f"{np.datetime64(day, 'D')} 02:00:00+02:00",
    "UTC": lambda day: f"{np.datetime64(day, 'D')} 00:00:00 UTC",
    "digits of days": lambda day: str(np.datetime64(day, "D")).replace("-", ""),
    "digits of days as floats": lambda day: str(np.datetime64(day, "D")).replace("-", "") + ".0",
    "digits of minutes": lambda day: str(np.datetime64(day, "D")).replace("-", "") + "0000",
    "digits of seconds": lambda day: str(np.datetime64(day, "D")).replace("-", "") + "000000",
}


@pytest.mark.parametrize("form", TIME_FORMS)
@pytest.mark.parametrize("draw", range(2))
def test_one_log_in_any_format_is_read_equally(load, form, draw) -> None:
    rng = np.random.default_rng([draw, list(TIME_FORMS).index(form)])
    separator = rng.choice(["\t", ",", ";", "::"])
    names = {"user": ["user_id", "Customer", "USERID"], "item": ["item_id:token", "productId", "sku"]}
    names |= {"time": ["timestamp", "Date", "created_at"], "text": ["title", "note", "name"]}
    order = rng.permutation(list(names))
    quote = '"' if separator != "::" and rng.random() < 0.5 else ""
    lines = [separator.join(rng.choice(names[role]) for role in order)]
    for user, item, day in DAYS:
        values = {"user": user, "item": item, "time": TIME_FORMS[form](day), "text": f"{quote}no {item}{quote}"}
        line = separator.join(str(values[role]) for role in order)
        lines += [line] * rng.integers(1, 3)
    content = ["", "\ufeff"][rng.integers(2)] + rng.choice(["\n", "\r\n"]).join([*lines, ""])
    packed = gzip.compress if rng.random() < 0.3 else bytes
    interactions = load(packed(content.encode()), f"log.csv{'.gz' * (packed is gzip.compress)}")
    ordered = sorted(DAYS, key=lambda line: (line[0], line[2]))
    assert interactions.items.tolist() == [item for _, item, _ in ordered]  # every item keeps its number
    assert interactions.times.tolist() == [86400 * day for _, _, day in ordered]
    is_named = form in ("milliseconds", "microseconds", "nanoseconds", "dates")
    assert any(remark.endswith(f", from {form}") for remark in interactions.remarks) == is_named


@pytest.mark.parametrize("separator", ["\t", " ", ",", "::", ", ", "   "])
@pytest.mark.parametrize("columns", ["uit", "uirt"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_separators_columns_and_line_endings_are_recognised(load, separator, columns, end) -> None:
    assert_are_the_lines(load(text(columns, separator, end)))


def test_two_columns_keep_the_order_of_the_file(load) -> None:
    interactions = load(text("ui"))
    assert interactions.times is None
    assert by_user(interactions, interactions.items) == [[3, 1, 2], [2, 3, 2]]


@pytest.mark.parametrize(
    ("header", "columns", "separator"),
    [
        ("userId,movieId,rating,timestamp", "uirt", ","),
        ("user item time", "uit", " "),
        ("user_id:token\titem_id:token\trating:float\ttimestamp:float", "uirt", "\t"),
        ("reviewer product when", "uit", " "),
        ("timestamp;rating;product_id;CustomerID", "triu", ";"),
        ("rating,item,time,visitor", "ritu", ","),
    ],
)
def test_a_line_of_column_names_is_recognised(load, header, columns, separator) -> None:
    assert_are_the_lines(load(f"{header}\n{text(columns, separator)}"))


def test_a_two_column_header_is_distinguished_from_data(load) -> None:
    assert load("user_id item_id\nann pen\nbob pen\n").num_users == 2
    assert load("ann pen\nbob pen\n", "other.txt").num_users == 2


def test_blank_lines_byte_order_marks_and_unterminated_lines_are_accepted(load) -> None:
    assert_are_the_lines(load("\ufeff\n" + text("uit").replace("\n", "\n\n").rstrip()))


def test_lines_may_cross_blocks(load, monkeypatch) -> None:
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 4)
    assert_are_the_lines(load("user item time\n" + text("uit")))


@pytest.mark.parametrize("others", [["2024-01-05"], ["20240301", "2024-01-05"], [str(NOON), "2024-01-05"]])
def test_times_have_one_kind_in_a_column(load, monkeypatch, others) -> None:
    """The kinds differ across the border of two blocks, or within one."""
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 4)
    times = [*["20240301"] * 4, *others]
    line = 2 + times.index("2024-01-05")
    with pytest.raises(
        UserError,
        match=f"line {line}: .*: the time '2024-01-05' is an ISO date, but earlier times are a number; fix it, or",
    ):
        load("user,item,time\n" + "".join(f"1,{i},{time}\n" for i, time in enumerate(times)))


def test_names_that_are_not_all_numbers_are_sorted_as_text(load) -> None:
    interactions = load("user item time\nb 10 1\nb 9 2\na 10 1\nb x 3\n")
    assert by_user(interactions, interactions.items) == [[1], [1, 2, 3]]
    assert list(interactions.item_ids) == ["10", "9", "x"]
    names = load("user item time\n1 007 1\n1 7 2\n1 10 3\n1 9 4\n", "zeros.txt")  # 007 and 7 are two names
    assert names.items.tolist() == [1, 2, 4, 3]
    assert list(names.item_ids) == ["007", "7", "9", "10"]


def test_whole_numbers_with_and_without_decimals_are_one_name(load) -> None:
    mixed = load("user,item,time\n1.0,7,1\n2,10.0,2\n1,10,3\n2.0,007,4\n", "mixed.csv")
    assert by_user(mixed, mixed.items) == [[2, 3], [3, 1]] and list(mixed.item_ids) == ["007", "7", "10"]
    texts = load("user,item,time\na,7,1\na,7.0,2\na,7.5,3\n", "texts.csv")
    assert list(texts.item_ids) == ["7", "7.0", "7.5"]


def test_a_repeated_header_line_is_refused(load) -> None:
    with pytest.raises(UserError, match="the line of column names, with user and item, occurs"):
        load("user,item\n1,2\n1,3\nuser,item\n2,2\n", "joined.csv")


def test_fractions_of_a_second_determine_the_order(load) -> None:
    interactions = load("user item time\n1 1 7.75\n1 2 7.5\n1 3 -0.5\n1 4 8\n")
    assert interactions.items.tolist() == [3, 2, 1, 4]
    assert interactions.times.tolist() == [-1, 7, 7, 8]


def test_milliseconds_within_a_second_keep_their_order(load) -> None:
    interactions = load(f"user item time\n1 1 {NOON}750\n1 2 {NOON}500\n1 3 {NOON}250\n")
    assert interactions.items.tolist() == [3, 2, 1]
    assert interactions.times.tolist() == [NOON] * 3


def test_a_missing_time_does_not_change_the_unit(load) -> None:
    interactions = load(f"user item time\n1 1 {NOON}000\n1 2 {NOON}500\n1 3 0\n")
    assert interactions.times.tolist() == [0, NOON, NOON]


def test_yyyymmdd_numbers_are_days(load) -> None:
    days = ["2023-12-31", "2024-01-01", "2024-02-29", "2024-05-31"]
    read = [
        load("user,item,time\n" + "".join(f"1,{i},{day}\n" for i, day in enumerate(some)), f"{name}.csv")
        for name, some in {"iso": days, "whole": [day.replace("-", "") for day in days]}.items()
    ]
    assert read[0].times.tolist() == read[1].times.tolist()
    assert read[1].remarks[4] == ("  time    time     2023-12-31 to 2024-05-31, from days such as 20240531")
    moments = load("user,item,time\n1,1,20231231235959\n1,2,20240101000000\n", "moments.csv")
    assert moments.times.tolist() == [read[0].times[1] - 1, read[0].times[1]]
    assert moments.remarks[4].endswith(", from moments such as 20240531183000")
    with_no_day = load("user,item,time\n1,1,20240531\n1,2,20240532\n", "numbers.csv")
    assert with_no_day.times.tolist() == [20240531, 20240532]


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        ("20240131.0 20240201.0 20240203.0", ["2024-01-31", "2024-02-01", "2024-02-03"]),
        ("0 20240131 20240201", ["1970-01-01", "2024-01-31", "2024-02-01"]),
        ("0.0 20240131.0 20240201.0", ["1970-01-01", "2024-01-31", "2024-02-01"]),
        ("202401312350 202402010010 202402030000", ["2024-01-31T23:50", "2024-02-01T00:10", "2024-02-03"]),
        ("20240131235000.0 20240201001000.0 20240203000000.0", ["2024-01-31T23:50", "2024-02-01T00:10", "2024-02-03"]),
        ("197605312350 197605312360 197605312370", ["1976-04-06T02:21:52"] * 3),  # milliseconds, since no minute is 60
    ],
)
def test_yyyymmdd_dates_are_recognised_as_floats_and_beside_zeros(load, times, seconds) -> None:
    interactions = load("user,item,time\n" + "".join(f"1,{i},{time}\n" for i, time in enumerate(times.split())))
    assert interactions.times.tolist() == np.array(seconds, "M8[s]").astype(int).tolist()


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ("20240130 20240131 20240132", r"most times are days such as 20240531, but 20240132 is not; correct it"),
        ("0 202401312350 202401312360 202402030000", r"most times are moments .*, but 202401312360 is not"),
        (f"{NOON} {NOON + 1} {NOON}000", rf"{NOON} looks like seconds, but {NOON}000 like milliseconds; use one unit"),
        (f"{NOON} {NOON}000 {NOON}001", rf"{NOON}000 looks like milliseconds, but {NOON} like seconds"),
    ],
)
def test_times_inconsistent_with_the_others_are_refused(load, times, message) -> None:
    with pytest.raises(UserError, match=message):
        load("user,item,time\n" + "".join(f"1,{i},{time}\n" for i, time in enumerate(times.split())))


def test_repeated_interactions_are_kept_but_equal_lines_count_once(load) -> None:
    interactions = load("user item time\n1 1 1\n2 1 1\n1 1 1\n1 1 2\n1 2 1\n2 1 1.5\n1 1 1\n")
    assert by_user(interactions, interactions.items) == [[1, 2, 1], [1, 1]]
    assert "2 of 7 lines are dropped, because they repeat the user, item " in " ".join(interactions.remarks)
    without_times = load("user item\n1 1\n1 1\n", "order.txt")
    assert without_times.items.tolist() == [1, 1]


def test_quotes_in_tabbed_lines_enclose_fields_or_are_plain_characters(load) -> None:
    head = "user_id\ttitle\titem_id\ttimestamp\n"
    plain = load(
        f'{head}u1\tplain\ti1\t1300000000\nu1\t"Live\ti2\t1300000100\nu2\tbar 7"\ti3\t1300000200\n'
        'u2\t"weird al" yankovic\ti1\t1300000300\nu2\t"a ""b""\tc"\t"i2"\t1300000400\n',
        "titles.tsv",
    )
    assert by_user(plain, plain.items) == [[1, 2], [3, 1, 2]]


def test_quotes_that_swallow_lines_are_refused_but_multiline_cells_are_not(load) -> None:
    head = "user_id,title,item_id,timestamp\n"
    with pytest.raises(UserError, match=r"lines 3 to 4: each line has all columns, .* double them"):
        load(f'{head}u1,plain,i1,1300000000\nu1,"Live,i2,1300000100\nu2,bar",i3,1300000200\n')
    text = load(f'{head}u1,"good,\n\nreally",i1,1300000000\nu1,x,i2,1300000100\n', "texts.csv")
    assert text.items.tolist() == [1, 2]


def test_a_name_that_marks_a_missing_value_is_warned_of(load) -> None:
    remarks = " ".join(load("user,item,time\nNA,1,1\nNA,2,2\nNadia,null,1\n").remarks)
    assert "Warning: 2 of 3 interactions have the user 'NA'" in remarks and "with --user-column." in remarks
    with pytest.raises(UserError, match=r"all interactions have the user 'NA', .* with --user-column"):
        load("user,item,time\nNA,1,1\nNA,2,2\n", "c.csv")
    assert "Warning: 1 of 3 interactions have the item 'null'" in remarks and "with --item-column." in remarks
    assert not [remark for remark in load("user,item,time\nNadia,1,1\n", "b.csv").remarks if "marks" in remark]


def test_equal_times_keep_the_order_of_the_file(load) -> None:
    rng = np.random.default_rng(0)
    lines = [(user, item, time) for item, (user, time) in enumerate(rng.integers(0, (5, 4), (400, 2)), start=1)]
    interactions = load("user item time\n" + "".join(f"{u} {i} {t}\n" for u, i, t in lines))
    expected = [[i for u, i, t in sorted(lines, key=lambda line: line[2]) if u == user] for user in range(5)]
    assert by_user(interactions, interactions.items) == expected


@pytest.mark.parametrize(
    "members",
    [
        {"ml/ratings.dat": text("uirt", "::"), "ml/users.dat": "1::F::1::10::48067", "ml/README": "about"},
        {"ml/u.data": text("uirt", "\t"), "ml/u.item": "1|Toy Story", "ml/u1.base": "1\t1\t1\t1", "ml/": ""},
        {"ml/ratings.csv": text("uirt", ","), "ml/movies.csv": "1,Toy Story", "ml/README.txt": "about"},
        {"README.txt": "about", "shop.inter": text("uit"), "__MACOSX/._shop.inter": b"\0", ".hidden.txt": "x"},
        {"shop.csv.gz": gzip.compress(text("uit", ",").encode()), "shop.pdf": "x"},
    ],
)
def test_a_zip_or_folder_with_one_plausible_file_is_read(load, fresh_cache, tmp_path, members) -> None:
    assert_are_the_lines(load(zipped(members), "data.zip"))
    assert_are_the_lines(load(tarred(members), "data.tar.gz"))
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in members.items():
        if not name.startswith("__MACOSX") and not name.endswith("/"):
            (folder / Path(name).name).write_bytes(content if isinstance(content, bytes) else content.encode())
    before = sorted(tmp_path.rglob("*"))
    assert_are_the_lines(load_interactions(folder, 1, fresh_cache))
    assert [
        path for path in sorted(tmp_path.rglob("*")) if path not in before and fresh_cache not in path.parents
    ] == []


# Finding the columns


@pytest.mark.parametrize(
    ("content", "read"),
    [
        ("customer,product,timestamp,price\n1,2,30,4\n1,3,20,9\n", [[20, 30], [2, 1]]),
        ("1,2,5,978300030\n1,3,4,978300020\n", [[978300020, 978300030], [2, 1]]),
        ("1,2,978300030,5\n1,3,978300020,4\n", [[978300020, 978300030], [2, 1]]),
        ("1 2 978300030000\n1 3 978300020000\n", [[978300020, 978300030], [2, 1]]),
        ("user,item,rating\n1,2,4\n1,3,9\n", [None, [1, 2]]),
        ('"user";"item";"time"\n1;"a;b";7\n1;"c ""d""";6\n', [[6, 7], [2, 1]]),
        ("1,2,1970-01-02T00:00:10\n1,3,1970-01-02 00:00:00Z\n", [[86400, 86410], [2, 1]]),
        ("when\tuid\tasin\n1970-01-02 00:00:00 UTC\t1\t2\n1970-01-01T23:00:00+01:00\t1\t3\n", [[79200, 86400], [2, 1]]),
        ("user,item,date,unixReviewTime\n1,2,x,30\n1,3,y,20\n", [[20, 30], [2, 1]]),
    ],
)  # fmt: skip
def test_columns_are_found_by_name_or_by_content(load, content, read) -> None:
    interactions = load(content)
    times, items = read
    assert (interactions.times is None) if times is None else interactions.times.tolist() == times
    assert interactions.items.tolist() == items


@pytest.mark.parametrize(
    ("content", "chosen"),
    [
        ("who,what,at,price\n1,2,30,4\n1,3,20,9\n", {"user": "who", "item": "what", "time": "at"}),
        ("who,what,at,price\n1,2,30,4\n1,3,20,9\n", {"user": "1", "item": "2", "time": "3"}),
        ("user,buyer,item,time\n7,1,2,30\n7,1,3,20\n", {"user": "buyer"}),
        ("1,2,30\n1,3,20\n", {"time": "3"}),
        ("9,20,2,8,1\n9,30,3,8,1\n", {"user": "5", "item": "3", "time": "none"}),
        ("buyer,article_no\n1,2\n1,3\n", {"user": "1", "item": "2", "time": "none"}),
        ("u,2,978300020,game\nu,3,978300030,book\n", {"user": "1", "item": "2", "time": "none"}),
    ],
)
def test_columns_are_the_named_columns(load, content, chosen) -> None:
    interactions = load(content, **chosen)
    in_time = chosen.get("time") == "none"
    assert interactions.items.tolist() == ([1, 2] if in_time else [2, 1])
    assert (interactions.times is None) if in_time else interactions.times.tolist() == [20, 30]
    assert list(interactions.item_ids) == ["2", "3"]


@pytest.mark.parametrize(
    ("content", "chosen", "message"),
    [
        ("abonnent,title,timestamp\n1,2,3\n", {}, "no column is recognised as "
         "the user or the item; name it with --user-column and --item-column; .* abonnent, title, timestamp$"),
        ("user,item,price\n1,2,3\n", {}, "no column is recognised as the time; .*; use --time-column none"),
        ("1,2,3\n1,3,5\n", {}, r"line 1: '1 2 3' does not name the columns, and no column after the item begins with "
         "a date or .*give the number of the time column .from 1. with --time-column, or use --time-column none"),
        ("1,2,3.5,99.9\n", {}, "no column after the item begins with a date"),
        ("1,2,978300030,978300040\n", {}, "several columns begin with a date"),
        ("1 2 2023-11-20 05:05:46\n", {}, "has the date and the time of day in separate columns; join them"),
        ("abonnent,title\n1,2\n", {}, "the first line, abonnent, title, is not recognised as column names, but"),
        ("user,item,time\n1,2,3\n", {"time": "at"}, "^--time-column at: .* no such column; the columns are "),
        ("1,2,978300030\n", {"item": "4"}, "^--item-column 4: .* has no such column; give a number from 1 to 3"),
        ("user,item,time,order_date\n1,2,1830,2024-01-15\n", {}, "the column time begins with '1830', which is "
         "neither a date nor seconds since 1970, but the column order_date has dates; choose one with --time-column"),
        ("item,user,time\n1,2,3\n", {"user": "1"}, "^--user-column 1: .* this column is named item, so it seems to be "
         "the item column; give the name of the user column"),
        ("user,item,time\n1,2,3\n", {"item": "user"}, "the user is column 1, the item is column 1, the time is column"),
    ],
)  # fmt: skip
def test_unknown_columns_are_refused_with_their_flags(load, content, chosen, message) -> None:
    with pytest.raises(UserError, match=message):
        load(content, **chosen)


def test_columns_are_reported_and_few_times_cause_a_warning(load) -> None:
    lines = "".join(f"{i % 9},{i % 7},{i % 5},{i}\n" for i in range(60))
    doubted = load("user,item,time,price\n" + lines)
    table = [
        "Interactions: 60, from these columns:",
        "  column  read as   values",
        "  user    user      9, such as 0",
        "  item    item      7, such as 0",
        "  time    time      numbers from 0 to 4",
        "  price   not read",
    ]
    assert list(doubted.remarks[:6]) == table
    words = load("u1,i1,viewed\nu1,i2,liked\nu2,i2,viewed\n", "words.csv", user="1", item="2", time="none").remarks[-1]
    assert "The first line was read as column names; if it is an interaction, add a line of column names above" in words
    assert "the 60 interactions have 5 distinct times" in doubted.remarks[6] and "--time-column" in doubted.remarks[6]
    assert len(load("user,item,x,time\n" + lines, "other.csv").remarks) == 6
    parts_of_a_year = "".join(f"{i % 9},{i % 7},{i / 60}\n" for i in range(60))
    assert "60 distinct times become 1, because" in load("user,item,time\n" + parts_of_a_year, "0.csv").remarks[-1]
    assert load("1,2,978300030\n", "bare.csv").remarks[2:] == (
        "  column 1  user     1, such as 1",
        "  column 2  item     1, such as 2",
        "  column 3  time     2000-12-31 to 2000-12-31",
    )


# Invalid files


HEAD = "user item time\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0 1 2 3 4 5 6\n1 2 3\n", "is a line with a user and all items .*7 columns, but 3 in .*#one-user-a-line"),
        ("", r"file.txt: is empty"),
        ("\n  \n", r"file.txt: is empty"),
        ("user item time\n", r"file.txt: has only a line of column names"),
        (HEAD + "1 2 3\n\n1 2\n", r"line 4: '1 2': has 2 columns instead of 3"),
        (HEAD + "1 2 3\n1 2 3 4\n", r"line 3: '1 2 3 4': has 4 columns instead of 3"),
        ("7\n", r"line 1: '7': has 1 column, because no tab, .* separates values; expected `user item`"),
        ("1 2 3 4 5\n", r"line 1: '1,2,3,4,5': has 5 columns; expected `user item`.* --user-column and --item-column"),
        (HEAD + "1 2 soon\n", r"line 2: '1 2 soon': 'soon' is not a time: a number, or a date such as 2024-05-31"),
        ("1,2,978300000\n1,2,\n", r"line 2: '1 2 ': '' is not a time"),
        (HEAD + "1 2 nan\n", r"line 2: '1 2 nan': 'nan' is not a time"),
        (HEAD + "1 2 3\n1 2 -inf\n", r"line 3: .*'-inf' is not a time"),
        (HEAD + "1 2 99999999999999999999\n", r"line 2: .*'99999999999999999999' is not a time"),
        ("user,item,time\n1,,3\n", r"line 2: '1  3': the user or item is empty"),
        ("user\titem\ttime\n \t2\t3\n", r"line 2: .*is empty"),
        ('user,item,time\n1,"2\n2",3\n', r"line 3: .*is empty or contains a line break"),
        ('user,item,time\n1,"2,3\n', r"line 2: a quotation mark opens but never closes"),
        (
            HEAD + "1 2 3\n1 2 2024-05-31\n",
            r"line 3: .*: the time '2024-05-31' is an ISO date, but earlier times are a number",
        ),
        (HEAD + "1 2 2024-05-31\n1 2 3\n", r"line 3: .*: the time '3' is a number, but earlier times are an ISO date"),
        (HEAD + 300 * "x", r"line 2: 'x{77}\.\.\.': has 1 column instead of 3"),
        (b"1 2 3\n1 \xff\xfe 3\n", r"file.txt: is not text in UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_line_and_reason(load, content, message) -> None:
    with pytest.raises(UserError, match="^--data-dir .*" + message) as caught:
        load(content)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_paths_without_one_data_file_are_refused(load, tmp_path, fresh_cache) -> None:
    with pytest.raises(UserError, match=r"^--data-dir .*missing.txt: no such file"):
        load_interactions(tmp_path / "missing.txt", 1, fresh_cache)
    with pytest.raises(UserError, match=r"data.zip: 2 of its files could be .* found: a.txt, b.csv, c.pdf$"):
        load(zipped({"b.csv": "", "a.txt": "", "c.pdf": ""}), "data.zip")
    with pytest.raises(UserError, match=r"data.zip: 2 of its files .* found: x/u.data, y/u.data$"):
        load(zipped({"x/u.data": "", "y/u.data": ""}), "data.zip")
    with pytest.raises(UserError, match=r"data.zip: 0 of its files .* n0, n1, n10, .*, \.\.\.$"):
        load(zipped({f"n{i}": "" for i in range(40)}), "data.zip")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(UserError, match=r"folder: 0 of its files .* found: no files$"):
        load_interactions(folder, 1, fresh_cache)


def test_damaged_archives_are_named(load) -> None:
    rng = np.random.default_rng(0)
    lines = HEAD.encode() + "".join(f"{u} {i} {t}\n" for u, i, t in rng.integers(0, 1000, (2000, 3))).encode()
    packed, archive = gzip.compress(lines), zipped({"a.txt": lines})
    for whole, suffix in (packed, "gz"), (archive, "zip"):
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 0xFF
        for name, content in {
            "text": b"not packed",
            "cut": whole[: len(whole) // 2],
            "flipped": bytes(flipped),
        }.items():
            with pytest.raises(UserError, match=rf"{name}.{suffix}.* is damaged|{name}.{suffix}.*not text"):
                load(content, f"{name}.{suffix}")


# The k-core


def slow_k_core(pairs: list[tuple[int, int]], k: int) -> list[tuple[int, int]]:
    while True:
        users, items = [u for u, _ in pairs], [i for _, i in pairs]
        kept = [(u, i) for u, i in pairs if users.count(u) >= k and items.count(i) >= k]
        if kept == pairs:
            return kept
        pairs = kept


def test_the_k_core_equals_a_slow_reference(load) -> None:
    rng = np.random.default_rng(0)
    dropped = set()
    for k in (0, 1, 2, 3, 4, 5):
        pairs = [(int(u), int(i)) for u, i in rng.integers(0, (25, 30), (110, 2))]
        expected = slow_k_core(pairs, k)
        content = "".join(f"{u} {i}\n" for u, i in pairs)
        if not expected:
            with pytest.raises(UserError, match=rf"^--k-core {k}: no interaction in .*file{k}.txt remains"):
                load(content, f"file{k}.txt", k)
            dropped.add("all")
            continue
        interactions = load(content, f"file{k}.txt", k)
        users, items = (sorted(set(column)) for column in zip(*expected, strict=True))
        assert interactions.num_users == len(users) and interactions.num_items == len(items)
        left = f"--k-core {k} leaves {len(expected)} of 110 interactions, {len(users)} of "
        assert any(remark.startswith(left) for remark in interactions.remarks) == (len(expected) < len(pairs))
        lists = [[items.index(i) + 1 for u, i in expected if u == user] for user in users]
        assert by_user(interactions, interactions.items) == lists
        dropped.add("some" if len(expected) < len(pairs) else "none")
    assert dropped == {"none", "some", "all"}


# The cache


def test_the_cache_distinguishes_files_and_cores_and_is_shared(load, tmp_path, fresh_cache) -> None:
    first = load(text("uit"))
    again = load_interactions(tmp_path / "file.txt", 0, fresh_cache)
    assert again.key == first.key and not again.items.flags.writeable
    assert load_interactions(tmp_path / "file.txt", 2, fresh_cache).key != first.key
    changed = load(text("uit") + "3 7 978300000\n")
    assert changed.key != first.key and changed.num_users == 3


def test_cached_data_are_not_read_again(load, tmp_path, fresh_cache) -> None:
    load(text("uit"))
    path = tmp_path / "file.txt"
    status = path.stat()
    path.write_text("x" * status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert_are_the_lines(load_interactions(path, 1, fresh_cache))


# The real data


def real(name: str) -> Path:
    folder = os.environ.get("LOCKSTEP_DATA")
    if not folder or not Path(folder, name).is_file():
        pytest.skip(f"set LOCKSTEP_DATA to a folder with {name}")
    return Path(folder, name)


@pytest.mark.slow
def test_movielens_1m_has_the_published_size(cache_dir) -> None:
    interactions = load_interactions(real("ml-1m/ml-1m_complete_order.txt.gz"), 5, cache_dir)
    assert (interactions.num_users, interactions.num_items, len(interactions.items)) == (6040, 3416, 999611)
    owner = np.repeat(np.arange(6040), np.diff(interactions.offsets))
    assert (np.diff(interactions.times)[owner[1:] == owner[:-1]] >= 0).all()
    assert interactions.items.min() == 1 and interactions.items.max() == 3416


@pytest.mark.slow
def test_movielens_1m_in_its_published_archive(cache_dir) -> None:
    interactions = load_interactions(real("ml-1m/ml-1m_985427.zip"), 1, cache_dir)
    assert (interactions.num_users, interactions.num_items, len(interactions.items)) == (6040, 3669, 985427)


def test_movielens_100k_in_its_published_archive(cache_dir) -> None:
    interactions = load_interactions(real("ml-100k/ml-100k.zip"), 1, cache_dir)
    assert (interactions.num_users, interactions.num_items, len(interactions.items)) == (943, 1682, 100000)
