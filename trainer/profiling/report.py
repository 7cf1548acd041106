"""Results on the console and in a file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.loading.errors import BadInput
from trainer.loading.files import replace_text
from trainer.profiling.targets import unusable


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be, the first one flush left, the others flush right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def note_of_cut_batch(measured: Mapping[str, Any]) -> str | None:
    """What to say where a step has fewer samples than asked for, as there are no more. measured: of `measure`."""
    asked, full = measured["requested_global_batch_size"], measured["global_batch_size"]
    return f"Steps of {asked} samples were asked for; the training data has {full}." if full < asked else None


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    """Writes the results if there is a file to write them to. Raises BadInput if it cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise BadInput(unusable(f"--json {path}", error, "file")) from None
    print(f"Results: {path}")
