"""Copies a file of interactions, and shuffles each user's interactions of the same second.

    python benchmarks/ties.py ml-1m_complete_order.txt.gz shuffled.tsv

Many logs record one time for all interactions on a page, so the file's order decides which interaction is the last. A
model may learn this order, which is useless for recommendations. The model's score on the shuffled file is then lower.
The last printed line is the share of neighbouring interactions with the same time.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data.interactions.columns import FIND_OUT
from data.interactions.reader import find_files
from data.interactions.table import read_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="file of interactions in a format of --task seqrec")
    parser.add_argument("target", type=Path, help="file to write: user, item and time, sorted by user and time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--users", type=int, help="number of users to write, from the first (default: all)")
    parser.add_argument("--keep", action="store_true", help="keep the order of interactions with equal times")
    given = parser.parse_args()
    share = write_shuffled(given.source, given.target, None if given.keep else given.seed, given.users)
    print(f"{share:.1%} of a user's neighbouring interactions have the same time")


def write_shuffled(source: Path, target: Path, seed: int | None = 0, num_users: int | None = None) -> float:
    """Writes the file; returns the share of neighbouring interactions with equal times. seed: None keeps the order."""
    table = read_table(find_files(source), FIND_OUT)
    assert table.times is not None, f"{source} has no times"
    seconds = np.floor(table.times).astype(np.int64)
    drawn = np.arange(len(seconds)) if seed is None else np.random.default_rng(seed).permutation(len(seconds))
    order = np.lexsort((drawn, seconds, table.users))
    order = order[table.users[order] < (num_users or len(table.user_ids))]
    users, times = table.users[order], seconds[order]
    with target.open("w", encoding="utf-8") as file:
        file.write("user\titem\ttime\n")
        for user, item, time in zip(users.tolist(), table.items[order].tolist(), times.tolist(), strict=True):
            file.write(f"{table.user_ids[user]}\t{table.item_ids[item]}\t{time}\n")
    is_neighbour = users[1:] == users[:-1]
    return float((is_neighbour & (times[1:] == times[:-1])).sum() / max(1, is_neighbour.sum()))


if __name__ == "__main__":
    main()
