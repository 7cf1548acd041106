"""How many interactions share a second, so that the order of the file decides which comes first.

    python benchmarks/ties.py --data-dir ml-1m.zip --swapped swapped.tsv
    python main.py --config checkpoints/a/config.json --eval-only --resume-from checkpoints/a/best.pth \
        --data-dir swapped.tsv

The file holds the same interactions, but of users whose test item and validation item share a second these two are
swapped, so that the second line tells what a run's score owes to that order. The other flags are those of `python
main.py --task seqrec`.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.interactions.reader import Interactions, load_interactions
from trainer.commands.parse import parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swapped", type=Path, metavar="FILE", help="write the data with the last two swapped")
    args, others = parser.parse_known_args()
    flags, problems = parse(["--task", "seqrec", *others], several_devices=False)
    config = flags.task
    if problems or config.data_dir is None:
        parser.error("\n".join(problems) or "--data-dir: must name a file of interactions")
    data = load_interactions(config.data_dir, config.k_core, flags.run.cache_dir.expanduser(), config.columns)
    if data.times is None:
        parser.error(f"--data-dir {config.data_dir}: has no times")
    is_first = np.zeros(len(data.items), bool)
    is_first[data.offsets[:-1]] = True
    same = np.diff(data.times) == 0
    last = data.offsets[1:][np.diff(data.offsets) >= 3] - 1  # of users with a test item and a validation item
    tied = same[last - 1]
    share = {
        "neighbouring interactions of a user in the same second": same[~is_first[1:]].mean(),
        "users whose test item has the validation item's time": tied.mean(),
    }
    for name, value in share.items():
        print(f"{name}: {100 * value:.1f} %")
    if args.swapped is not None:
        write_swapped(data, last[tied], args.swapped)
    print(json.dumps({name: float(value) for name, value in share.items()}))


def write_swapped(data: Interactions, places: np.ndarray, path: Path) -> None:
    """All interactions, those at the places swapped with the one before; users by number, items as they are called."""
    order = np.arange(len(data.items))
    order[places], order[places - 1] = places - 1, places
    user = np.repeat(np.arange(data.num_users), np.diff(data.offsets))
    with path.open("w") as file:
        file.write("user\titem\ttime\n")
        for i in order.tolist():
            file.write(f"{user[i]}\t{data.item_ids[data.items[i] - 1]}\t{data.times[i]}\n")


if __name__ == "__main__":
    main()
