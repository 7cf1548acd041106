"""`benchmarks/ties.py`: what it counts, and the file that it writes."""

import json
import subprocess
import sys

from data.interactions.reader import load_interactions
from tests.conftest import ROOT

LOG = """user item time
a 7 1
a 5 1
a 9 2
a 6 2
b 5 1
b 6 2
b 7 3
c 9 4
c 5 4
c 7 4
d 5 1
d 6 1
e 5 1
"""


def test_counts_ties_and_swaps_the_last_two_of_those_who_have_one(tmp_path):
    path, swapped = tmp_path / "log.txt", tmp_path / "swapped.tsv"
    path.write_text(LOG)
    command = [sys.executable, "benchmarks/ties.py", "--data-dir", path, "--k-core", "0", "--swapped", swapped]
    done = subprocess.run([*command, "--cache-dir", tmp_path], cwd=ROOT, check=True, capture_output=True, text=True)
    neighbours, users = json.loads(done.stdout.splitlines()[-1]).values()
    assert (neighbours, users) == (5 / 8, 2 / 3)
    before, after = (load_interactions(file, 0, tmp_path) for file in (path, swapped))
    assert after.item_ids == before.item_ids
    assert (after.times == before.times).all() and (after.offsets == before.offsets).all()
    items = [before.item_ids[item - 1] for item in after.items]
    assert items == ["7", "5", "6", "9", "5", "6", "7", "9", "7", "5", "5", "6", "5"]
