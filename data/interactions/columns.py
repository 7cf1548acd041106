"""Detects the user, item and time columns of a file of interactions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data.csv_lines import plain_name
from data.files import not_read
from data.interactions.times import is_calendar_time, is_time, is_time_of_day
from trainer.common.errors import UserError

NO_TIMES = "none"
ROLES = ("user", "item", "time")
NAMES = {
    "user": (
        *("user", "customer", "client", "visitor", "member", "reviewer", "account", "person", "session", "username"),
        "u",
    ),
    "item": (
        *("item", "product", "movie", "article", "asin", "isbn", "book", "track", "song", "artist", "sku", "video"),
        *("content", "game", "business", "parentasin", "aid", "i"),
    ),
    "time": (
        *("timestamp", "time", "unixtime", "unixreviewtime", "eventtime", "datetime", "date", "createdat", "ts"),
        *("orderdate", "purchasedate", "reviewtime", "when"),
    ),
    "rating": ("rating", "ratings", "score", "stars", "overall", "label", "weight", "count"),
}
"""Usual names of columns, normalised by `plain_name`, in order of preference."""
_UNUSUAL_NAMES = (
    "The first line was read as column names; if it is an interaction, add a line of column names above it."
)


@dataclass(frozen=True)
class ColumnChoice:
    """Columns chosen by flags, by name or by number from 1; None means that the column is detected.

    time: NO_TIMES means that no column contains times.
    """

    user: str | None = None
    item: str | None = None
    time: str | None = None

    def of(self, role: str) -> str | None:
        chosen: str | None = getattr(self, role)
        return chosen

    def arranged(self, columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
        """Names and orders columns, given by role, as this choice expects them; empty columns fill gaps."""
        chosen = {role: self.of(role) or role for role in columns}
        numbers = {int(text): role for role, text in chosen.items() if text.isdecimal()}
        places = [numbers.get(number, f"other {number}") for number in range(1, max(numbers, default=0) + 1)]
        named = {text: columns[role] for role, text in chosen.items() if role not in places}
        return {place: columns.get(place, [""] * len(columns["user"])) for place in places} | named


FIND_OUT = ColumnChoice()


@dataclass(frozen=True)
class Layout:
    """Columns of a file, and which of the columns contain users, items and times.

    names: names of columns; without a header, "column 1" and so on.
    user, item, time: column indices from 0; time: None without times.
    remarks: lines to print.
    """

    names: Sequence[str]
    user: int
    item: int
    time: int | None
    has_names: bool
    remarks: Sequence[str]


def find_layout(first: Sequence[str], second: Sequence[str], choice: ColumnChoice, where: str) -> Layout:
    """Detects the layout of a file from its first two lines.

    first, second: fields of these lines; second: [] if there is no second line. where: the first line's name in
    messages.

    With a header, columns are found by name: a chosen name, otherwise a usual name. Without a header, the first two
    columns are user and item, and the time is the only other column that begins with a date, or with a Unix time from
    1973 to 2099 in seconds or milliseconds.

    Raises UserError, with the flags to give, if the layout is ambiguous.
    """
    has_names = _are_names(first, choice) or (choice != FIND_OUT and _are_unlike(first, second))
    found = _by_name(first, second, choice, where) if has_names else _by_place(first, second, choice, where)
    columns = [column for column in found.values() if column is not None]
    if len(set(columns)) < len(columns):
        places = ", ".join(f"the {role} is column {column + 1}" for role, column in found.items() if column is not None)
        raise UserError(f"{where}: {places}, but each needs its own column; specify the columns with {_flags(found)}")
    user, item = found["user"], found["item"]
    assert user is not None and item is not None
    names = first if has_names else [f"column {column}" for column in range(1, len(first) + 1)]
    is_usual = any(plain_name(name) in NAMES[role] for name in first for role in ROLES)
    remarks = [_UNUSUAL_NAMES] if has_names and not is_usual else []
    return Layout(names, user, item, found["time"], has_names, remarks)


def _are_names(first: Sequence[str], choice: ColumnChoice) -> bool:
    """Returns whether a line is a header.

    It is one if the user chose a column by name. Otherwise, it is one if it has a usual name, or at least three columns
    and no number; but a line with a date or Unix time is not a header: a word such as "book" is an item there.
    """
    chosen = [choice.of(role) for role in ROLES]
    if any(text is not None and text != NO_TIMES and not text.isdecimal() for text in chosen):
        return True
    if any(map(is_calendar_time, first)):
        return False
    if any(plain_name(name) in NAMES["user"] + NAMES["item"] for name in first if len(name) > 1):
        return True
    return len(first) > 2 and not any(is_time(field) for field in first)


def _are_unlike(first: Sequence[str], second: Sequence[str]) -> bool:
    """Returns whether the first line has two words and the second line two numbers; the words are then column names."""
    return len(first) == len(second) == 2 and not any(map(is_time, first)) and all(map(is_time, second))


def _by_name(names: Sequence[str], second: Sequence[str], choice: ColumnChoice, where: str) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for role in ROLES:
        chosen = choice.of(role)
        found[role] = _usual(role, names) if chosen is None else _chosen(role, chosen, names, where)
    missing = [role for role in ROLES if found[role] is None and choice.of(role) is None]
    rest = [name for i, name in enumerate(names) if i not in found.values() and plain_name(name) not in NAMES["rating"]]
    if missing == ["time"] and not rest:
        missing = []  # only a rating remains, so there is no time
    if missing:
        advice = f"; use --time-column {NO_TIMES} if there are no times" if "time" in missing else ""
        raise UserError(
            f"{where}: no column is recognised as the {' or the '.join(missing)}; name it with "
            f"{_flags(missing)}{advice}; the columns are {', '.join(names)}"
        )
    if choice.time is None and found["time"] is not None and len(second) == len(names):
        _refuse_time_of_day(names, second, found["time"], where)
    return found


def _refuse_time_of_day(names: Sequence[str], second: Sequence[str], time: int, where: str) -> None:
    """Raises UserError if the time column contains only times of day and another column contains the date."""
    dates = [i for i, name in enumerate(names) if plain_name(name) in NAMES["time"] and is_calendar_time(second[i])]
    if dates and time not in dates:
        raise UserError(
            f"{where}: the column {names[time]} begins with {second[time]!r}, which is neither a date nor seconds "
            f"since 1970, but the column {names[dates[0]]} has dates; choose one with --time-column, or join the "
            "date and the time of day in one column"
        )


def _by_place(first: Sequence[str], second: Sequence[str], choice: ColumnChoice, where: str) -> dict[str, int | None]:
    columns = f"{len(first)} column{'s' * (len(first) != 1)}"
    if second and len(second) != len(first) and all(map(str.isdecimal, (*first, *second))):
        what = f"a line with a user and all items of this user ({columns}, but {len(second)} in the next line)"
        raise not_read(where, what, "one-user-a-line")
    if not 2 <= len(first) <= 4 and any(choice.of(role) is None for role in ROLES):
        if len(first) == 1:
            columns += ", because no tab, ::, semicolon, comma, | or blank separates values"
        raise UserError(
            f"{where}: {','.join(first)[:80]!r}: has {columns}; expected `user item`, `user item time`, `user item "
            f"rating time` or column names; specify the columns with {_flags(ROLES)}, counted from 1"
            + "; if each line has a user and all items of this user, see docs/formats.md#one-user-a-line"
            * (len(first) > 4)
        )
    if choice == FIND_OUT and _are_unlike(first, second):
        raise UserError(
            f"{where}: the first line, {', '.join(first)}, is not recognised as column names, but has text where the "
            "next line has numbers; specify --user-column and --item-column"
        )
    usual = {"user": 0, "item": 1}
    found: dict[str, int | None] = {}
    for role, column in usual.items():
        chosen = choice.of(role)
        found[role] = column if chosen is None else _numbered(role, chosen, first, where)
    if choice.time is not None:
        found["time"] = None if choice.time == NO_TIMES else _numbered("time", choice.time, first, where)
        return found
    others = [column for column in range(len(first)) if column not in found.values()]
    times = [column for column in others if is_calendar_time(first[column])]
    if others and len(times) != 1:
        which = "several columns begin" if times else "no column after the item begins"
        raise UserError(
            f"{where}: {' '.join(first)[:80]!r} does not name the columns, and {which} with a date or seconds "
            "since 1970; give the number of the time column (from 1) with --time-column, or use "
            f"--time-column {NO_TIMES} if there are no times"
        )
    found["time"] = times[0] if times else None
    if times and any(is_time_of_day(first[column]) for column in others):
        raise UserError(
            f"{where}: {' '.join(first)[:80]!r} has the date and the time of day in separate columns; join them, "
            "as in 2024-05-31T18:30:00, or choose only the date column with --time-column"
        )
    return found


def _usual(role: str, names: Sequence[str]) -> int | None:
    cores = [plain_name(name) for name in names]
    return next((cores.index(name) for name in NAMES[role] if name in cores), None)


def _chosen(role: str, chosen: str, names: Sequence[str], where: str) -> int | None:
    if role == "time" and chosen == NO_TIMES:
        return None
    if chosen in names:
        return names.index(chosen)
    if chosen.isdecimal():
        column = _numbered(role, chosen, names, where)
        others = [other for other in ROLES if other != role and plain_name(names[column]) in NAMES[other]]
        if others and plain_name(names[column]) not in NAMES[role]:
            raise UserError(
                f"--{role}-column {chosen}: in {where}, this column is named {names[column]}, so it seems to be "
                f"the {others[0]} column; give the name of the {role} column"
            )
        return column
    raise UserError(f"--{role}-column {chosen}: {where} has no such column; the columns are {', '.join(names)}")


def _numbered(role: str, chosen: str, fields: Sequence[str], where: str) -> int:
    if not chosen.isdecimal() or not 1 <= int(chosen) <= len(fields):
        raise UserError(f"--{role}-column {chosen}: {where} has no such column; give a number from 1 to {len(fields)}")
    return int(chosen) - 1


def _flags(roles: Sequence[str] | dict[str, int | None]) -> str:
    return " and ".join(f"--{role}-column" for role in roles)
