"""Users to recommend items to: the file of `--predict`."""

from pathlib import Path

import numpy as np

from data.csv_lines import plain_name
from data.knowledge_graph.catalogue import Catalogue
from data.knowledge_graph.samples import padded
from trainer.common.errors import UserError
from trainer.common.files import MOST_WHOLE, read_whole
from trainer.loading.order import SampleKeys

HEADER = "user"
_MOST_DIGITS = 18
"""Of a number in 64 bits."""


def read_users(path: Path, catalogue: Catalogue) -> np.ndarray:
    """The users of a file, (n,) int64, as often and in the order as they stand there.

    path: text with one user id a line, as in the training data; a first line such as `user` or `user_id` is a header.
    Raises UserError, naming file, line and value, for what is no user that was trained on.
    """
    is_trained_on = catalogue.train.sizes > 0
    label = f"--predict {path}"
    try:
        lines = read_whole(path, MOST_WHOLE).decode("utf-8-sig").splitlines()
    except OSError as error:
        raise UserError(f"{label}: {error.strerror or error}; give a file with one user id a line") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{label}: is not text in UTF-8 ({error.reason}); give one user id a line") from None
    users: list[int] = []
    for number, line in enumerate(lines, start=1):
        text = line.strip().strip('"')
        if not text or (number == 1 and plain_name(text) == HEADER):
            continue
        is_id = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
        if not (is_id and int(text) < len(is_trained_on) and is_trained_on[int(text)]):
            what = f"must be the id of a user with training items, between 0 and {len(is_trained_on) - 1}, and no more"
            raise UserError(f"{label}, line {number}: {text[:80]!r}: {what}")
        users.append(int(text))
    return np.array(users, dtype=np.int64)


class Recommendations:
    """The places of a ranking for each user, one after another."""

    def __init__(self, users: np.ndarray, num_places: int, catalogue: Catalogue) -> None:
        """users: (n,) int64. Raises UserError where a user has fewer items left than num_places."""
        self.users = users
        self.num_places = num_places
        self._seen = catalogue.seen
        self._padding = catalogue.num_items
        num_left = catalogue.num_items - len(catalogue.unknown_items) - self._seen.sizes[users]
        if len(users) and num_left.min() < num_places:
            user = users[num_left.argmin()]
            raise UserError(f"--top-k {num_places}: user {user} has only {num_left.min()} items left; choose fewer")

    def __len__(self) -> int:
        return len(self.users) * self.num_places

    def __getitems__(self, keys: SampleKeys) -> dict[str, np.ndarray]:
        """{"user" (B,), "place" (B,) from 0, "seen" (B, S) items, padded with num_items} int64.

        seen: the items of training and validation, never to be recommended.
        """
        row, place = np.divmod(keys.index, self.num_places)
        users = self.users[row]
        return {"user": users, "place": place, "seen": padded(self._seen, users, self._padding, keys)}
