"""Converts Last.fm from KGCN's files (github.com/hwwang55/KGCN, data/music) to KGAT's layout, for `--task kgat`.

    python benchmarks/split_music.py KGCN/data/music music

A random 20 % of each user's artists are for the test, 10 % for validation, and 70 % for training. Users, items
and entities are numbered in the order of their first occurrence, starting with the entities of items.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np

TEST_SHARE, VALIDATION_SHARE = 0.2, 0.1


class Numbers(dict[str, int]):
    """Numbers names in the order of their first occurrence."""

    def __missing__(self, name: str) -> int:
        self[name] = number = len(self)
        return number


def main() -> None:
    """Writes train.txt, valid.txt, test.txt and kg_final.txt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="KGCN's folder data/music")
    parser.add_argument("target", type=Path, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    entity_of = dict(line.split() for line in lines(given.source / "item_index2entity_id.txt"))
    users, entities = Numbers(), Numbers()
    liked: dict[int, set[int]] = defaultdict(set)
    for line in lines(given.source / "user_artists.dat")[1:]:
        user, artist, _ = line.split()
        if artist in entity_of:
            item = entities[entity_of[artist]]
            liked[users[user]].add(item)
    relations = Numbers()
    triples = set()
    for line in lines(given.source / "kg.txt"):
        head, relation, tail = line.split("\t")
        triples.add((entities[head], relations[relation], entities[tail]))
    given.target.mkdir(parents=True, exist_ok=True)
    write_parts(liked, given.target, np.random.default_rng(given.seed))
    (given.target / "kg_final.txt").write_text("".join("{} {} {}\n".format(*triple) for triple in sorted(triples)))
    print(f"{len(users)} users, {len(entities)} entities, {len(relations)} relations, {len(triples)} triples")


def write_parts(liked: dict[int, set[int]], target: Path, rng: np.random.Generator) -> None:
    """Writes a line `user item item ...` per user to each split; if a user has too few items, all are for training."""
    parts: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for user in sorted(liked):
        items = np.array(sorted(liked[user]))
        rng.shuffle(items)
        num_test, num_valid = (round(share * len(items)) for share in (TEST_SHARE, VALIDATION_SHARE))
        if num_test + num_valid >= len(items):
            num_test = num_valid = 0
        test, valid, train = np.split(items, [num_test, num_test + num_valid])
        for name, part in zip(parts, (train, valid, test), strict=True):
            parts[name].append(" ".join(map(str, [user, *part.tolist()])) + "\n")
    for name, rows in parts.items():
        (target / f"{name}.txt").write_text("".join(rows))


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


if __name__ == "__main__":
    main()
