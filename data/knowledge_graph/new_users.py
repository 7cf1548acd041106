"""Users to recommend items to: the file of `--predict`."""

from pathlib import Path

import numpy as np

from data.knowledge_graph.catalogue import Catalogue
from data.knowledge_graph.samples import padded
from trainer.loading.errors import BadInput
from trainer.loading.order import SampleKeys

HEADER = "user"


def read_users(path: Path, num_users: int) -> np.ndarray:
    """The users of a file, (n,) int64, as often and in the order as they stand there.

    path: text with one user id a line, as in the training data; a first line `user` is a header. Raises BadInput,
    naming file, line and value, for what is no user of the training data.
    """
    label = f"--predict {path}"
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise BadInput(f"{label}: {error.strerror or error}; give a file with one user id a line") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{label}: is not text in UTF-8 ({error.reason}); give one user id a line") from None
    users: list[int] = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or (not users and text == HEADER):
            continue
        if not (text.isascii() and text.isdigit() and int(text) < num_users):
            what = f"must be one user of the training data, 0 to {num_users - 1}"
            raise BadInput(f"{label}, line {number}: {text[:80]!r}: {what}")
        users.append(int(text))
    return np.array(users, dtype=np.int64)


class Recommendations:
    """The places of a ranking for each user: sample i is place i % num_places of user i // num_places.

    users: (n,) int64.
    """

    def __init__(self, users: np.ndarray, num_places: int, catalogue: Catalogue) -> None:
        self.users = users
        self.num_places = num_places
        self._seen = catalogue.train if catalogue.selects_on_test else catalogue.train.joined_with(catalogue.val)
        self._padding = catalogue.num_items

    def __len__(self) -> int:
        return len(self.users) * self.num_places

    def __getitems__(self, keys: SampleKeys) -> dict[str, np.ndarray]:
        """{"user" (B,), "place" (B,) from 0, "seen" (B, S) items, padded with num_items} int64.

        seen: the items of training and validation, never to be recommended.
        """
        row, place = np.divmod(keys.index, self.num_places)
        users = self.users[row]
        return {"user": users, "place": place, "seen": padded(self._seen, users, self._padding)}
