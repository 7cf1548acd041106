"""How many interactions share a second, so that the order of the file decides which comes first.

    python benchmarks/ties.py --data-dir ml-1m.zip

The flags are those of `python main.py --task seqrec`.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.interactions.reader import load_interactions
from trainer.commands.parse import parse
from trainer.config import refuse


def main() -> None:
    flags, problems = parse(["--task", "seqrec", *sys.argv[1:]], several_devices=False)
    refuse(problems)
    config = flags.task
    data = load_interactions(config.data_dir, config.k_core, flags.run.cache_dir.expanduser(), config.columns)
    is_first = np.zeros(len(data.items), bool)
    is_first[data.offsets[:-1]] = True
    same = np.diff(data.times) == 0
    last = data.offsets[1:] - 1
    share = {
        "neighbouring interactions of a user in the same second": same[~is_first[1:]].mean(),
        "users whose test item has the validation item's time": same[last - 1].mean(),
    }
    for name, value in share.items():
        print(f"{name}: {100 * value:.1f} %")
    print(json.dumps({name: float(value) for name, value in share.items()}))


if __name__ == "__main__":
    main()
