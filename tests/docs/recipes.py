"""Runs the code of docs/own_task.md."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.conftest import ROOT
from trainer import SampleKeys


def recipe(heading: str, **names: Any) -> dict[str, Any]:
    """Returns the names that the code below a heading defines. names: other names that the code uses."""
    text = (ROOT / "docs" / "own_task.md").read_text()
    text = text.partition(f"### {heading}\n")[2]
    names |= {"np": np, "torch": torch, "Path": Path, "SampleKeys": SampleKeys}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    return names
