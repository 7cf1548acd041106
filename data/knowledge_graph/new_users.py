"""Reads the file of `--predict`: users to whom a model recommends items."""

import io
from pathlib import Path

import numpy as np

from data.csv_lines import plain_name, without_point
from data.files import shown
from data.interactions.columns import NAMES
from data.knowledge_graph.catalogue import Catalogue
from data.knowledge_graph.samples import padded
from data.table_files import STRICT, LeftOut, Reading, decoded
from trainer.common.errors import UserError
from trainer.common.files import MOST_WHOLE, read_whole
from trainer.loading.order import SampleKeys


def read_users(path: Path, catalogue: Catalogue, reading: Reading = STRICT) -> tuple[np.ndarray, list[str]]:
    """Returns users in the order of the file, with repetitions, as (n,) int64, and remarks to print.

    path: text file with one user id per line, plain or quoted as in a CSV file, optionally below a header such as
    `user_id`. Raises UserError, with file, line and value, for users without training items, unless `reading` drops bad
    lines.
    """
    number_of = {catalogue.user_name(user): user for user in np.flatnonzero(catalogue.train.sizes).tolist()}
    label = f"--predict {path}"
    try:
        content = read_whole(path, MOST_WHOLE)
    except OSError as error:
        raise UserError(f"{label}: {error.strerror or error}; give a file with one user id per line") from None
    users: list[int] = []
    unknown = LeftOut(reading)
    for number, line in enumerate(io.StringIO(decoded(content, label, unknown), None), start=1):
        line = line.strip()
        unquoted = line[1:-1].replace('""', '"').strip() if line[:1] == line[-1:] == '"' else line
        user = next((number_of[name] for name in (line, unquoted, without_point(unquoted)) if name in number_of), None)
        if user is not None:
            users.append(user)
        if user is not None or not unquoted or (number == 1 and plain_name(unquoted) in NAMES["user"]):
            continue
        line_shown = f"{label}, line {number}: {line[:80]!r}"
        unknown.add(
            line_shown,
            f"{line_shown}: give the id of a user with training items, such as {shown(list(number_of)[:3])}, or skip "
            "invalid lines with --on-bad drop",
            "lines without the id of a user with training items",
        )
    return np.array(users, dtype=np.int64), unknown.remarks()


class Recommendations:
    """Data set of recommendations: sample i asks for the item at rank i % num_places for users[i // num_places]."""

    def __init__(self, users: np.ndarray, num_places: int, catalogue: Catalogue) -> None:
        """Raises UserError if a user has fewer than num_places unseen items. users: (n,) int64."""
        self.users = users
        self.num_places = num_places
        self._seen = catalogue.seen
        self._padding = catalogue.num_items
        num_left = catalogue.num_items - len(catalogue.unknown_items) - self._seen.sizes[users]
        if len(users) and num_left.min() < num_places:
            user = users[num_left.argmin()]
            raise UserError(
                f"--top-k {num_places}: only {num_left.min()} items are left to recommend to user "
                f"{catalogue.user_name(user)}; choose a smaller --top-k"
            )

    def __len__(self) -> int:
        return len(self.users) * self.num_places

    def __getitems__(self, keys: SampleKeys) -> dict[str, np.ndarray]:
        """Returns {"user": (B,), "place": (B,), "seen": (B, S)}, all int64.

        "place" is the rank, from 0. "seen" contains the users' items in `Catalogue.seen`, padded with num_items.
        """
        row, place = np.divmod(keys.index, self.num_places)
        users = self.users[row]
        return {"user": users, "place": place, "seen": padded(self._seen, users, self._padding, keys)}
