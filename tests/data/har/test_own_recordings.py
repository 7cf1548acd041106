"""Tests that users' own CSV recordings are cut into windows, or refused with one message."""

import csv
import gzip
import io
import re

import numpy as np
import pytest

from data.har.augmentation import Augmentation, WindowAugmenter
from data.har.own_recordings import OwnFormat, are_own, load_own_recordings
from data.har.recording import read_new_windows
from data.har.windows import WindowFormat, split_by_subject, triplets_first, with_test_subjects
from data.table_files import Reading
from trainer.common.errors import UserError

USUAL = OwnFormat(subject_column=None, label_column=None, channels=None, length=10, hop=4)
NAMES = ["time", "heart_rate", "acc_z", "acc_x", "acc_y", "subject", "activity"]


def rows_of(bouts, seed=0):
    """Returns rows [index, four random values, subject, activity] for each (subject, activity, number of rows)."""
    rng, rows = np.random.default_rng(seed), []
    for subject, activity, num in bouts:
        for _ in range(num):
            rows.append([len(rows), *(f"{value:.4f}" for value in rng.normal(size=4)), subject, activity])
    return rows


def write(path, rows, names=NAMES, delimiter=","):
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([names, *rows])
    return path


@pytest.fixture
def load(tmp_path):
    def run(path, **changes):
        return load_own_recordings(path, tmp_path / "cache", OwnFormat(**(vars(USUAL) | changes)))

    return run


def has_row(loaded, *cells):
    """Returns whether the table of columns has a row whose cells match the patterns."""
    return any(re.fullmatch(" +".join(cells), line.strip()) for line in loaded.remarks)


BOUTS = [("10", "walk", 25), ("10", "sit", 9), ("10", "walk", 10), ("9", "walk", 14), ("9", "", 30), ("9", "sit", 13)]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_windows_are_those_of_a_slow_loop(load, tmp_path, delimiter):
    rows = rows_of(BOUTS)
    loaded = load(write(tmp_path / "mine.csv", rows, delimiter=delimiter))
    found, order = loaded.recordings, [NAMES.index(name) for name in ("acc_x", "acc_y", "acc_z", "heart_rate")]
    assert found.channels == ("acc_x", "acc_y", "acc_z", "heart_rate")
    assert (found.classes, found.subject_names) == (("sit", "walk"), ("9", "10"))
    expected, start = [], 0
    for subject, activity, num in BOUTS:
        for first in range(0, num - 9, 4):
            window = [[float(row[i]) for row in rows[start + first : start + first + 10]] for i in order]
            expected += [(window, subject, activity)] if activity else []
        start += num
    np.testing.assert_array_equal(found.signals, np.array([w for w, _, _ in expected], np.float32))
    assert [found.name_of(s) for s in found.subjects] == [subject for _, subject, _ in expected]
    assert [found.classes[i] for i in found.labels] == [activity for _, _, activity in expected]
    text = "\n".join(loaded.remarks)
    assert has_row(loaded, "subject", "subject", "2 people")
    assert has_row(loaded, "activity", "label", "2 classes; 30 rows without a label")
    assert has_row(loaded, "time", "clock", "0 to 100") and has_row(loaded, "acc_x", "channel", r"-\d.* to \d.*")
    assert "clock runs back" not in text
    assert "1 stretches of one activity that are shorter than a window, with 9 rows in total" in text


def test_no_window_crosses_files_of_a_folder(load, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    bouts = [("a", "walk", 12), ("a", "sit", 12)]
    write(folder / "1.csv", rows_of(bouts, 1))
    other = [[row[i] for i in (6, 5, 4, 3, 2, 1, 0)] for row in rows_of([("a", "sit", 12), ("b", "sit", 11)], 2)]
    write(folder / "2.csv", other, NAMES[::-1])
    found = load(folder).recordings
    assert are_own(folder) and len(found.signals) == 4
    assert [found.name_of(s) for s in found.subjects] == ["a", "a", "a", "b"]
    assert found.signals[2, 2, 0] == np.float32(float(rows_of([("a", "sit", 1)], 2)[0][2]))  # acc_z


def test_a_folder_with_only_hidden_tables_contains_no_table(tmp_path):
    write(tmp_path / "._mine.csv", rows_of(BOUTS))
    assert not are_own(tmp_path)


def test_decimal_commas_and_chosen_columns_are_read(load, tmp_path):
    rows = [[f"{i / 4:.2f}".replace(".", ","), "note", i, "p", "ab"[i // 12]] for i in range(24)]
    path = write(tmp_path / "mine.csv", rows, ["level", "note", "t2", "who", "does"], ";")
    chosen = {"subject_column": "who", "label_column": "does", "channels": ("level",)}
    found = load(path, **chosen).recordings
    assert found.channels == ("level",) and found.signals[0, 0].tolist() == [i / 4 for i in range(10)]


def test_clocks_and_label_copies_are_not_channels(load, tmp_path):
    names = ["Time (s)", "seconds_elapsed", "timestamp_ms", "acc", "light", "subject", "activity", "activity_id"]
    rows = [[i, i, i, i % 3, i % 5, "p", "ab"[i // 12], i // 12] for i in range(24)]
    path = write(tmp_path / "mine.csv", rows, names)
    loaded = load(path)
    assert loaded.recordings.channels == ("acc", "light")
    for name in (r"Time \(s\)", "seconds_elapsed", "timestamp_ms"):
        assert has_row(loaded, name, "clock", "0 to 23")
    assert has_row(loaded, "activity_id", "left out", "its name suggests a row number, a person or an activity")
    assert load(path, channels=("acc", "seconds_elapsed")).recordings.channels == ("acc", "seconds_elapsed")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (lambda i: i % 12 // 2, "only rises within recordings, like a clock or counter"),
        (lambda i: 100 - i // 7, "only falls within recordings, like a battery level"),
        (lambda i: i // 12, "never changes within a recording"),
        (lambda i: 5, "never changes within a recording"),
        (lambda i: 1000 * (i // 12) + 0.1 * (i % 3), "hardly changes within a recording, only between recordings"),
    ],
)
def test_a_column_without_motion_is_not_a_channel(load, tmp_path, values, why):
    names = ["level", "acc", "subject", "activity"]
    rows = [[values(i), i % 3, "p", "ab"[i // 12]] for i in range(24)]
    path = write(tmp_path / "mine.csv", rows, names)
    loaded = load(path)
    assert loaded.recordings.channels == ("acc",)
    assert has_row(loaded, "level", "left out", why)
    assert load(path, channels=("level",)).recordings.channels == ("level",)
    with pytest.raises(UserError, match=rf"has no column to use as a channel \(level {why}\); choose columns"):
        load(write(tmp_path / "levels.csv", [[row[0], *row[2:]] for row in rows], [names[0], *names[2:]]))


NO_SIGNALS = [
    "Battery", "batteryLevel", "lat", "lon", "Longitude (deg)", "GPS Speed", "horizontalAccuracy", "Step count",
    "device",
]  # fmt: skip


def test_columns_named_like_places_or_devices_are_not_channels(load, tmp_path):
    """A name that only contains such a word (acc_lateral contains lat) stays a channel."""
    kept = ["acc_lateral", "platform_x", "relative_altitude"]
    names = [*NO_SIGNALS, *kept, "subject", "activity"]
    rows = [[*(i * 7 % 5 for _ in NO_SIGNALS[1:]), "Pixel 7", *(i * 7 % 5 for _ in kept), "p", "ab"[i // 12]]
            for i in range(24)]  # fmt: skip
    loaded = load(write(tmp_path / "mine.csv", rows, names))
    assert loaded.recordings.channels == tuple(kept)
    assert has_row(loaded, "Battery", "left out", "its name suggests a place or a device, not a motion signal")
    assert has_row(loaded, "device", "left out", "text, such as 'Pixel 7'")


def test_spellings_of_a_name_are_one_class_and_one_person(load, tmp_path):
    """pandas writes 1 as 1.0 if its column has empty cells. Letters that differ by case may be two codes."""
    folder = tmp_path / "folder"
    folder.mkdir()
    bouts = {
        "1.csv": [("1", "1", 12), ("1", "2", 12), ("1", "yes", 12), ("1", "w", 12), ("1", "NaN", 12)],
        "2.csv": [("1.0", "1.0", 5), ("1", "1", 7), ("2.0", "3.0", 12), ("2.0", "YES", 6), ("2.0", "yes", 6)],
        "3.csv": [("02", "W", 12), ("2", "nan", 12), ("2", "", 12)],
    }
    for name, rows in bouts.items():
        write(folder / name, rows_of(rows))
    loaded = load(folder)
    found = loaded.recordings
    assert (found.classes, found.subject_names) == (("1", "2", "3", "W", "w", "yes"), ("1", "2"))
    assert np.bincount(found.labels).tolist() == [2, 1, 1, 1, 1, 2]
    assert "These spellings count as one name: 1 and 1.0; 02 and 2 and 2.0; 1 and 1.0; YES and yes." in loaded.remarks
    assert has_row(loaded, "activity", "label", "6 classes; 36 rows without a label")
    alone = load(write(tmp_path / "alone.csv", rows_of([("a", "1.0", 12), ("a", "2.0", 12)])))
    assert alone.recordings.classes == ("1.0", "2.0") and "spellings" not in " ".join(alone.remarks)


def clocks(style):
    """Returns a function that writes the time of row k, at 50 rows per second."""
    return lambda k: style.format(s=k * 0.02, ms=k * 20, ns=k * 20_000_000, row=k)


PLAIN = {"delimiter": ",", "clock": clocks("{s:.2f}"), "labels": ("1", "2"), "more": {}, "point": "."}
SPELLINGS = [
    {"delimiter": ";"}, {"delimiter": "\t"}, {"delimiter": ";", "point": ","}, {"packed": True},
    {"clock": clocks("{ms}")}, {"clock": clocks("{ns}")}, {"clock": clocks("{row}")}, {"clock": clocks("noon")},
    {"clock": clocks("2024-05-31T18:30:{s:06.3f}Z")}, {"clock": clocks("2024-05-31 18:30:{s:06.3f}")},
    {"clock": clocks("31.05.2024 18:30:{s:06.3f}")}, {"clock": clocks("5/31/2024 6:30:{s:06.3f} PM")},
    {"clock": clocks("18:30:{s:06.3f}")}, {"labels": ("1.0", "2.0")}, {"labels": ("1", "2.0")},
    {"unlabelled": "NaN"}, {"unlabelled": "<NA>"}, {"more": {"battery": "7", "lat": "52.1", "device": "Pixel 7"}},
    {"more": {"level": "3", "index": "9"}}, {"mark": True}, {"reverse": True}, {"quoting": csv.QUOTE_ALL},
]  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: "-".join(map(str, spelling.values()))[:30])
def test_one_data_set_in_many_formats_is_read_equally(load, tmp_path, spelling):
    """Class names that all end in .0 keep this ending."""

    def wrote(folder, spelling):
        style = PLAIN | spelling
        rng, folder = np.random.default_rng(0), tmp_path / folder
        folder.mkdir()
        for name in range(3):
            rows, number = [], 0
            for label in (*style["labels"], style.get("unlabelled", ""), style["labels"][0]):
                for _ in range(13):
                    acc = [f"{value:.4f}".replace(".", style["point"]) for value in rng.normal(size=2)]
                    rows.append([style["clock"](number), *acc, *style["more"].values(), f"p{name}", label])
                    number += 1
            names = ["time", "acc", "gyro", *style["more"], "subject", "activity"]
            if style.get("reverse"):
                names, rows = names[::-1], [row[::-1] for row in rows]
            text = io.StringIO()
            csv.writer(text, delimiter=style["delimiter"], quoting=style.get("quoting", 0)).writerows([names, *rows])
            content = text.getvalue().encode("utf-8-sig" if style.get("mark") else "utf-8")
            packed = style.get("packed", False)
            (folder / f"{name}.csv{'.gz' * packed}").write_bytes(gzip.compress(content) if packed else content)
        return load(folder).recordings

    plain, other = wrote("plain", {}), wrote("other", spelling)
    np.testing.assert_array_equal(other.labels, plain.labels)
    np.testing.assert_array_equal(other.subjects, plain.subjects)
    order = [other.channels.index(name) for name in plain.channels]
    np.testing.assert_array_equal(other.signals[:, order], plain.signals)
    assert (len(other.channels), other.subject_names) == (2, plain.subject_names)
    assert [name.removesuffix(".0") for name in other.classes] == list(plain.classes)


def timed(people, length=30):
    """Returns rows [time in s, value, name, activity] in two activities for each (name, rows per second)."""
    return [
        [f"{k / rate:.4f}", k % 7, name, activity]
        for name, rate in people
        for activity in ("sit", "walk")
        for k in range(length)
    ]


def test_people_at_different_rates_are_refused_by_name(load, tmp_path):
    names = ["time", "acc", "subject", "activity"]
    path = write(tmp_path / "mine.csv", timed([("a", 50), ("b", 50), ("c", 52), ("d", 25), ("e", 25)]), names)
    with pytest.raises(UserError, match=r"\(d, e: 25 rows per second; all others: 50\)") as refused:
        load(path)
    assert "resample to one rate" in str(refused.value)
    halves = timed([("a", 50), ("b", 25)], length=31)
    with pytest.raises(UserError, match=r"\(a: 50 rows per second; all others: 25\)"):
        load(write(path, halves, names))
    write(path, [[index, *rest] for index, (_, *rest) in enumerate(halves)], names)
    assert load(path).rate_hz is None  # row numbers do not tell the rate


def test_recordings_of_a_person_at_another_rate_are_reported(load, tmp_path):
    names = ["time", "acc", "subject", "activity"]
    rows = timed([("a", 50), ("b", 50)])
    rows += [[f"{k / 25:.4f}", k % 7, "b", "run"] for k in range(30)]
    loaded = load(write(tmp_path / "mine.csv", rows, names))
    assert loaded.rate_hz == pytest.approx(50)
    assert "6 windows come from recordings whose clock shows another rate, such as 25 rows per second instead" in (
        " ".join(loaded.remarks)
    )


def dated(style, day=31):
    """Returns two activities of 20 rows at 50 rows per second, the first with a gap of 5 s after 10 rows."""
    rows = []
    for k in range(40):
        second = k * 0.02 + 5 * (k >= 10)
        rows.append([style.format(day=day, second=second), k * 3 % 7, "p", "ab"[k // 20]])
    return rows


@pytest.mark.parametrize(
    "style",
    [
        "2024-05-{day:02} 18:30:{second:06.3f}",
        "{day:02}/05/2024 18:30:{second:06.3f}",
        "05/{day:02}/2024 18:30:{second:06.3f}",
        "{day}.5.2024, 18:30:{second:06.3f}",
        "05-{day:02}-2024 6:30:{second:06.3f} PM",
        "18:30:{second:06.3f}",
    ],
)
@pytest.mark.parametrize("name", ["time", "measured"])
def test_date_clocks_show_gaps_and_the_rate(load, tmp_path, style, name):
    """The order of day and month does not matter if all rows have the same date."""
    for day in (31, 4):
        loaded = load(write(tmp_path / "mine.csv", dated(style, day), [name, "acc", "subject", "activity"]))
        assert "divided at 1 gaps" in " ".join(loaded.remarks)
        assert loaded.rate_hz == pytest.approx(50) and loaded.recordings.channels == ("acc",)
        assert len(loaded.recordings.signals) == 1 + 1 + 3


def test_an_unreadable_clock_is_reported(load, tmp_path):
    names = ["time", "acc", "subject", "activity"]
    rows = dated("31/05/24 18h30m{second:06.3f}")
    loaded = load(write(tmp_path / "mine.csv", rows, names))
    assert has_row(loaded, "time", "clock", "cannot be read: its value '31/05/24 18h30m00.000' is not a time")
    assert "the column time has the name of a clock, but its value '31/05/24 18h30m00.000' is not a time" in (
        " ".join(loaded.remarks)
    )
    some = dated("18:30:{second:06.3f}")
    some[7][0], some[17][0] = "?", "half past"
    assert has_row(
        load(write(tmp_path / "mine.csv", some, names)),
        "time",
        "clock",
        "cannot be read: its value 'half past' is not a time",
    )
    # From 3/4 to 4/4 is either a day or a month.
    midnight = [[f"{3 + (k >= 10)}/4/2024 {'23:59' if k < 10 else '00:00'}:{k % 10 + 50 * (k < 10):02}", *rest]
                for k, (_, *rest) in enumerate(rows)]  # fmt: skip
    assert "its value '3/4/2024 23:59:50' can begin with the day or the month, so gaps" in " ".join(
        load(write(tmp_path / "mine.csv", midnight, names)).remarks
    )


def test_rows_out_of_clock_order_are_reported(load, tmp_path):
    """No warning comes for clocks that restart, cross 10:00, have an empty cell or show the milliseconds of another."""
    names = ["time", "acc", "subject", "activity"]
    rows = [[i, i % 3, "p", "ab"[i // 12]] for i in range(24)]
    rows[3:6], rows[15:17] = rows[5:2:-1], rows[16:14:-1]
    said = "Warning: the clock runs backwards"
    assert f"{said} 3 times" in " ".join(load(write(tmp_path / "mine.csv", rows, names)).remarks)
    fine = {
        "anew.csv": [[row % 6, *rest] for row, (_, *rest) in enumerate(rows)],
        "texts.csv": [[f"9:59:{58 + i}" if i < 2 else f"10:00:{i:02}", *rest] for i, (_, *rest) in enumerate(rows)],
        "empty.csv": [["" if i == 4 else i, *rest] for i, (_, *rest) in enumerate(rows)],
    }
    for name, some in fine.items():
        assert said not in " ".join(load(write(tmp_path / name, some, names)).remarks)
    two = [[i * 500 % 1000, i // 2, *rest] for i, (_, *rest) in enumerate(rows)]
    assert said not in " ".join(load(write(tmp_path / "two.csv", two, ["millis", "second", *names[1:]])).remarks)


def test_unordered_rows_are_refused(load, tmp_path):
    """The second clock repeats each value, beside a date that never changes."""
    names, wanted = ["time", "acc", "subject", "activity"], WindowFormat(("acc",), ("sit", "walk"), 10, 10, 50.0)
    for rate, first in ((25, names), (0.5, ["date", *names])):
        rows = [
            ["2024-05-31"] * (len(first) - 4) + [int(float(t) * rate), *row] for t, *row in timed([("a", 1), ("b", 1)])
        ]
        path = write(tmp_path / "mine.csv", rows, first)
        assert len(load(path, channels=("acc",)).recordings.signals) == 4 * 6
        refusal = rf"mine.csv: the clock \({', '.join(first[:-3])}\) often goes back .*; sort the rows by time"
        shuffled = [rows[k] for k in np.random.default_rng(0).permutation(len(rows))]
        for wrong in (rows[::-1], [*rows[59::-1], *rows[:59:-1]], sorted(shuffled, key=lambda row: row[-2:])):
            write(path, wrong, first)
            with pytest.raises(UserError, match=f"--data-dir .*{refusal}"):
                load(path, channels=("acc",))
            with pytest.raises(UserError, match=f"--predict .*{refusal}"):
                read_new_windows(path, wanted)


def test_no_window_spans_a_gap_or_two_trials(load, tmp_path):
    """Person p has a jittering clock with a gap at row 17; person q has two trials without a gap between them."""
    names = ["time_ms", "acc", "trial", "subject", "activity"]
    rng = np.random.default_rng(0)
    rows = [[20 * i + int(rng.integers(9)) + (9000 if i >= 17 else 0), i, "1", "p", "walk"] for i in range(40)]
    rows += [[20 * i, 100 + i, str(1 + i // 15), "q", "sit"] for i in range(30)]
    loaded = load(write(tmp_path / "mine.csv", rows, names), channels=("acc",))
    first = loaded.recordings.signals[:, 0, 0].astype(int).tolist()
    assert first == [0, 4, 17, 21, 25, 29, 100, 104, 115, 119]
    assert "divided at 1 gaps, where the clock jumps by more than 10 times its usual" in " ".join(loaded.remarks)
    assert loaded.rate_hz == pytest.approx(50, abs=2)


def test_a_clock_of_whole_seconds_gives_the_sampling_rate(load, tmp_path):
    """Rows before the clock's first change and after its last one must not count: they would give a higher rate."""
    names = ["time", "acc", "subject", "activity"]
    rows = [[100 + i // 50, i, "p", "walk" if i < 200 else "sit"] for i in range(400)]
    assert load(write(tmp_path / "mine.csv", rows, names), channels=("acc",)).rate_hz == 50


def test_missing_channels_are_named_with_their_flag(load, tmp_path):
    path = write(tmp_path / "mine.csv", rows_of(BOUTS))
    with pytest.raises(UserError, match=r"^--channels nope: .*mine.csv has no such columns; the columns are time, h"):
        load(path, channels=("acc_x", "nope"))


def test_the_finest_clock_shows_gaps(load, tmp_path):
    """A clock of tenths of a second at 50 rows per second has its gap where the date changes."""
    names = ["date", "time", "acc", "subject", "activity"]
    rows = [[20240531 + (i >= 20), i // 5 / 10 + 500 * (i >= 20), i, "pq"[i >= 40], "ab"[i >= 40]] for i in range(80)]
    loaded = load(write(tmp_path / "mine.csv", rows, names), channels=("acc",))
    assert "divided at 1 gaps" in " ".join(loaded.remarks)
    assert loaded.rate_hz == pytest.approx(50, rel=0.2)


def test_the_reason_for_no_window_is_reported(load, tmp_path):
    names = ["acc", "subject", "activity"]
    apart = [[i, "pq"[i % 2], "walk"] for i in range(40)]
    for rows, said in (
        ([[i, "p", ""] for i in range(40)], r"no row has a label in the column activity; .* with --label-column"),
        (apart, r"activity of one person has 1; sort the rows by person and time, or choose a smaller --window"),
    ):
        with pytest.raises(UserError, match=said):
            load(write(tmp_path / "mine.csv", rows, names), channels=("acc",))


def test_classes_and_people_without_a_window_are_named(load, tmp_path):
    names = ["acc", "subject", "activity"]
    bouts = [("p", "walk", 12), ("p", "Jump", 9), ("p", "sit", 10), ("q", "run", 9), ("r", "", 40), ("p", "jump", 9)]
    rows = [[k % 7, subject, activity] for subject, activity, num in bouts for k in range(num)]
    text = " ".join(load(write(tmp_path / "mine.csv", rows, names)).remarks)
    assert re.findall(r"these (\w+) have no window: (.*?)[.]", text) == [
        ("people", "q, r"),
        ("classes", "Jump, jump, run"),
    ]
    remarks = load(write(tmp_path / "mine.csv", rows[:12] + rows[21:31], names)).remarks
    assert "no window:" not in " ".join(remarks)


def test_an_exact_column_name_precedes_a_similar_one(load, tmp_path):
    names = ["activity_id", "Activity", "acc", "subject"]
    rows = [[i // 12 + 5, "ab"[i // 12], i % 3, "p"] for i in range(24)]
    assert load(write(tmp_path / "mine.csv", rows, names)).recordings.classes == ("a", "b")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"channels": ("acc_x", "activity")}, r"^--channels activity: is the label column of .*mine.csv; leave it"),
        ({"channels": ("subject",)}, r"^--channels subject: is the subject column of "),
        ({"subject_column": "activity"}, r"line 1: activity is both the subject and the label; choose another column "),
    ],
)
def test_a_column_has_one_role(load, tmp_path, chosen, message):
    with pytest.raises(UserError, match=message):
        load(write(tmp_path / "mine.csv", rows_of(BOUTS)), **chosen)


def test_triplets_are_rotated_together_and_other_channels_scaled_separately():
    names = ["hr", "gyro_x", "gyro_y", "gyro_z", "AccX", "AccY", "AccZ", "box", "temp_x"]
    ordered, num = triplets_first(names)
    assert (ordered, num) == (["gyro_x", "gyro_y", "gyro_z", "AccX", "AccY", "AccZ", "hr", "box", "temp_x"], 2)
    signals = np.random.default_rng(0).normal(size=(5, 9, 20)).astype(np.float32)
    augment = WindowAugmenter(Augmentation(45.0, 0.0, 0.0, 0.0), np.ones(9), seed=0, num_triplets=2)
    turned = augment(signals, 0, np.arange(5))
    lengths = [np.linalg.norm(part[:, :6].reshape(5, 2, 3, 20), axis=2) for part in (signals, turned)]
    np.testing.assert_allclose(*lengths, rtol=1e-4)
    assert np.abs(turned[:, :6] - signals[:, :6]).max() > 0.1
    np.testing.assert_array_equal(turned[:, 6:], signals[:, 6:])
    scaled = WindowAugmenter(Augmentation(45.0, 0.3, 0.0, 0.0), np.ones(9), seed=0, num_triplets=2)
    factors = scaled(signals, 0, np.arange(5))[:, 6:] / signals[:, 6:]
    np.testing.assert_allclose(factors, factors[:, :, :1] * np.ones(20), rtol=1e-4)
    assert factors[:, :, 0].std() > 0.1


def test_test_subjects_are_the_named_or_every_fifth_person(load, tmp_path):
    bouts = [(f"p{i}", activity, 10) for i in range(7) for activity in ("sit", "walk")]
    recordings = load(write(tmp_path / "mine.csv", rows_of(bouts))).recordings

    def tested(names):
        chosen = with_test_subjects(recordings, names)
        return {chosen.name_of(s) for s in chosen.subjects[chosen.is_test]}

    assert tested(None) == {"p4"} and tested(["p1", "p6"]) == {"p1", "p6"}
    splits = split_by_subject(with_test_subjects(recordings, None), 0, [0])
    assert {name: len(part) for name, part in splits.items()} == {"train": 10, "val": 2, "test": 2}
    with pytest.raises(UserError, match=r"^--test-subjects eve zoe: no such subjects; the subjects are p0 p1"):
        tested(["eve", "p1", "zoe"])
    with pytest.raises(UserError, match=r"^--test-subjects p0 .*: leaves none of the 7 subjects"):
        tested([f"p{i}" for i in range(7)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: ["a,b,c", "1,2,3"], "has no column for the subject (name it with --subject-column) and the "
         "label (name it with --label-column); the columns are a, b, c"),
        (lambda lines: [*lines[:3], "2,oops,1,1,1,p,walk"], "line 4, column 2 (heart_rate): 'oops' is not a number; "
         "fix it, choose channels with --channels, or add --on-bad drop"),
        (lambda lines: [*lines[:3], "2,1,1"], "line 4: has 3 columns, but there are 7 column names"),
        (lambda lines: [*lines[:3], "2,1,1,1,1,,walk"], "data row 3 has no subject; fill it in"),
        (lambda lines: lines[:9], "a window has 10 rows, but the longest uninterrupted activity of one person"),
        (lambda lines: lines[:12], "has windows of only one class, walk; give at least two, each with"),
        (lambda lines: lines[:1], "has column names, but no readable rows"),
        (lambda lines: [lines[0].replace("acc_x", '"acc\nx"'), *lines[1:]], "the column name 'acc\\nx' has a line"),
        (lambda lines: [], "is empty"),
        (lambda lines: [f"time,time,{lines[0]}", *(f"1,1,{line}" for line in lines[1:])],
         "line 1: has several columns named time; keep one column per name"),
        (lambda lines: [line.replace("walk", "confidence") for line in lines], "label 'confidence' is also a column"),
        (lambda lines: [line.replace(",p,", ',"p,q",') for line in lines], "subject 'p,q' begins with '-' or contains"),
    ],
)  # fmt: skip
def test_unusable_tables_are_refused(load, tmp_path, change, message):
    path = write(tmp_path / "mine.csv", rows_of([("p", "walk", 12), ("p", "sit", 12)]))
    path.write_text("\n".join(change(path.read_text().splitlines())))
    with pytest.raises(UserError) as refused:
        load(path)
    text = str(refused.value)
    assert message in text and text.startswith("--data-dir ") and "mine.csv" in text and "\n" not in text


def with_holes(tmp_path, holes, name="mine.csv"):
    """Writes 200 rows of a ramp and a wave, 100 per person, with empty cells at the (row, column) of holes."""
    rows = [[k, k / 4, (k * 7) % 11, "ab"[k // 100], ("sit", "walk")[k // 50 % 2]] for k in range(200)]
    for row, column in holes:
        rows[row][column] = ""
    return write(tmp_path / name, rows, ["row", "ramp", "wave", "subject", "activity"])


@pytest.mark.parametrize("on_bad", ["drop", "interpolate"])
def test_rows_with_empty_cells_are_dropped_or_filled_in(load, tmp_path, on_bad):
    """Interpolation fills short holes of the wave, but not a long one, one at the end or a row without a subject."""
    short, long = [(k, 2) for k in (10, 30, 31)], [(k, 2) for k in range(110, 140)]
    holes = [*short, *long, (199, 1), (60, 3)]
    path = with_holes(tmp_path, holes)
    with pytest.raises(UserError, match=r"line 12, column 3 \(wave\): '' is not a number; .*--on-bad drop or interp"):
        load(path, channels=("ramp", "wave"))
    loaded = load(path, channels=("ramp", "wave"), hop=1, reading=Reading(on_bad=on_bad))
    dropped = {row for row, _ in holes} - ({row for row, _ in short} if on_bad == "interpolate" else set())
    expected = [
        start for start in range(191)
        if start // 50 == (start + 9) // 50 and not dropped & set(range(start, start + 10))
    ]  # fmt: skip
    signals = loaded.recordings.signals
    assert (signals[:, 0, 0] * 4).astype(int).tolist() == expected
    first = signals[expected.index(30 if on_bad == "interpolate" else 32)]
    if on_bad == "interpolate":
        before, after = (29 * 7) % 11, (32 * 7) % 11
        np.testing.assert_allclose(first[1, :2], [before + (after - before) / 3, before + 2 * (after - before) / 3])
    filled = 3 if on_bad == "interpolate" else 0
    such_as = f", such as --data-dir {path}, line 12, column 3 (wave): '' is not a number."
    told = {text.removesuffix(such_as) for text in loaded.remarks if text.endswith(such_as)}
    expected = {f"Left out: {len(dropped)} unreadable rows, at which recordings are divided"}
    expected |= {f"Interpolated: {filled} values that were not numbers"} if filled else set()
    assert told == expected


def test_a_row_without_a_subject_is_reported(load, tmp_path):
    loaded = load(with_holes(tmp_path, [(60, 3)]), reading=Reading(on_bad="drop"))
    told = "Left out: 1 unreadable rows, .* such as data row 61, which has no subject."
    assert any(re.match(told, text) for text in loaded.remarks)


def test_lines_of_another_width_start_a_new_recording(load, tmp_path):
    path = with_holes(tmp_path, [])
    lines = path.read_text().splitlines()
    lines[21] += ",1"
    path.write_text("\n".join(lines) + "\n")
    loaded = load(path, channels=("ramp", "wave"), reading=Reading(on_bad="interpolate"))
    assert not any(19 - 9 < window[0, 0] * 4 <= 20 for window in loaded.recordings.signals)
    assert any("line 22: has 6 columns, but there are 5 column names" in text for text in loaded.remarks)


def test_new_recordings_with_holes_keep_their_times(tmp_path):
    path = with_holes(tmp_path, [(k, 2) for k in range(40)])
    wanted = WindowFormat(("ramp", "wave"), ("sit", "walk"), 10, 10, 2.0)
    with pytest.raises(UserError, match=r"line 2, column 3 \(wave\): '' is not a number; .*--on-bad drop"):
        read_new_windows(path, wanted)
    found = read_new_windows(path, wanted, reading=Reading(on_bad="drop"))
    assert found.start_s.tolist()[:2] == [20.0, 25.0] and found.signals[0, 0, 0] == 10
    assert found.remarks[0].startswith("Left out: 40 unreadable rows")
