"""Reads checkpoints as far as they are what the manifest says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.checkpoint.file import read_checkpoint, size_and_sum
from trainer.checkpoint.manifest import MANIFEST, Entry
from trainer.loading.errors import BadInput
from trainer.loading.files import stamp


class CheckpointReader:
    """Of one folder. say: gets a line for whatever is damaged.

    The checksum of a file is not worked out again while the file does not change.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._verified: dict[str, tuple[str, int, int]] = {}
        """File -> its stamp when it last matched its checksum."""

    def read(self, entry: Entry) -> dict[str, Any] | None:
        """The checkpoint, or None when it is damaged."""
        path = self._folder / entry.file
        flaw = self._flaw(entry)
        if flaw is not None:
            self._say(f"{path} is damaged: {flaw}.")
            return None
        return read_or_say(path, self._say, verified=True)

    def is_intact(self, entry: Entry) -> bool:
        return self._flaw(entry) is None

    def trust(self, entry: Entry) -> None:
        """Takes note that a file was just written with this checksum."""
        self._verified[entry.file] = stamp(self._folder / entry.file)

    def _flaw(self, entry: Entry) -> str | None:
        path = self._folder / entry.file
        try:
            if self._verified.get(entry.file) != stamp(path):
                if size_and_sum(path)["sha256"] != entry.sha256:
                    return f"its sha256 is not the one in {MANIFEST}"
                self.trust(entry)
        except OSError as error:
            return error.strerror
        return None


def read_or_say(path: Path, say: Callable[[str], None], verified: bool = False) -> dict[str, Any] | None:
    """A checkpoint, or None and a line about what is wrong with it. verified: see `read_checkpoint`."""
    try:
        return read_checkpoint(path, str(path), verified=verified)
    except BadInput as error:
        say(str(error))
        return None
