"""Small table whose classes depend on two of its columns."""

import csv
from pathlib import Path

import numpy as np

SMALL_PRIOR = [
    "--num-tables", 40, "--num-val-tables", 6, "--min-rows", 32, "--max-rows", 40, "--max-features", 4,
    "--max-classes", 3,
]  # fmt: skip
SMALL_MODEL = ["--width", 8, "--num-blocks", 2, "--num-heads", 2]


def write_table(path: Path, num_rows: int = 90, seed: int = 0, label: str | None = "kind") -> Path:
    """Writes columns size, colour, weight (some missing) and the label: "big" if the size is large and not green."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["size", "colour", "weight", *([label] if label else [])])
        for _ in range(num_rows):
            size, colour, weight = rng.normal(), rng.choice(["red", "green", "blue"]), rng.normal(50, 9)
            is_big = size > 0.3 and colour != "green"
            row = [f"{size:.4f}", colour, "" if rng.random() < 0.1 else f"{weight:.1f}"]
            writer.writerow([*row, *(["big" if is_big else "small"] if label else [])])
    return path
