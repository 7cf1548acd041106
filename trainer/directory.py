"""The run directory: its lock, its checkpoints and their manifest; never fewer than one good checkpoint.

A checkpoint is written to a temporary file and flushed; its checksum and position enter `manifest.json`, which is
flushed and renamed; only then is the file renamed into place. Killed at any point, the directory holds either the
old state or the new one.
"""

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from data.errors import BadInput
from data.files import flush_folder
from trainer.checkpoint import read_checkpoint, size_and_sum, write_checkpoint
from trainer.config import FlagGroup, flag
from trainer.plan import Position

MANIFEST = "manifest.json"
RESULTS = "results.json"
CONFIG = "config.json"
LOCK = "lock"


@dataclass
class CheckpointFlags(FlagGroup):
    """The run directory: saving, resuming, evaluating"""

    save_dir: Path = flag(Path("checkpoints/run"), "everything of this run; an unfinished run in it is resumed")
    save_every_steps: int = flag(0, "also save every so many steps; 0 saves at epoch ends only", at_least=0)
    keep_checkpoints: int = flag(3, "checkpoints to keep beside best and final; 0 keeps all", metavar="N", at_least=0)
    resume_from: Path | None = flag(None, "go on from this checkpoint file instead of the newest in --save-dir")
    init_from: Path | None = flag(None, "start with the weights of this checkpoint file, and nothing else of it")
    fresh: bool = flag(False, "start over; what --save-dir holds is moved to a folder previous-N inside it")
    eval_only: bool = flag(
        False, "do not train: score the best weights of --save-dir (or --resume-from FILE) on val and test"
    )

    def problems(self) -> list[str]:
        found = []
        for name, path in (("--resume-from", self.resume_from), ("--init-from", self.init_from)):
            if path is not None and not path.is_file():
                found.append(f"{name} {path}: {'is not a file' if path.exists() else 'does not exist'}")
        if self.resume_from is not None and self.init_from is not None:
            found.append("--resume-from and --init-from: exclude each other; the first goes on, the second starts anew")
        if self.fresh and self.resume_from is not None:
            found.append("--fresh and --resume-from: exclude each other; to start from weights use --init-from")
        if self.eval_only and self.fresh:
            found.append("--eval-only and --fresh: exclude each other; a fresh directory has nothing to score")
        return found


@dataclass
class Entry:
    """One line of the manifest.

    value: the monitored metric, None where there was no validation.
    best: whether it was the best one so far when it was saved.
    source: the `--resume-from` of the run that saved it.
    """

    file: str
    epoch: int
    phase: int
    samples: int
    step: int
    value: float | None
    best: bool
    bytes: int
    sha256: str
    source: str | None


class RunDirectory:
    """Owns `--save-dir` while it is locked. Used on the main process only."""

    def __init__(self, path: Path, keep: int, say: Callable[[str], None]) -> None:
        self.path = path
        self._keep = keep
        self._say = say
        self._entries: list[Entry] = []
        self._lock: IO[str] | None = None

    # --- opening ---------------------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Creates, locks and repairs the directory. Raises BadInput when it cannot be used."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self._read_manifest()
            for leftover in self.path.glob("*.tmp"):
                leftover.unlink()
            self._repair_links()
        except OSError as error:
            raise self._unusable(error, "choose a folder that can be written to") from None

    def look(self) -> None:
        """Reads what is there without taking the lock or changing anything. Raises BadInput when it cannot."""
        try:
            self._read_manifest()
        except OSError as error:
            raise self._unusable(error, "choose the folder of a run") from None

    def _unusable(self, error: OSError, advice: str) -> BadInput:
        return BadInput(f"--save-dir {self.path}: {error.strerror or error}; {advice}")

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def require_space(self, num_bytes: int) -> None:
        """Raises BadInput when the file system has no room for one checkpoint."""
        free = shutil.disk_usage(self.path).free
        if free < num_bytes:
            raise BadInput(
                f"--save-dir {self.path}: a checkpoint needs about {_size(num_bytes)} and {_size(free)} are free; "
                "free some space or choose another folder"
            )

    def _take_lock(self) -> None:
        lock = (self.path / LOCK).open("a+")
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise BadInput(
                f"--save-dir {self.path}: in use by {holder}; wait for it or choose another folder"
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        self._lock = lock

    def start_over(self) -> None:
        """Moves everything of the previous run to a folder `previous-N`. Raises BadInput when it cannot."""
        try:
            self._set_aside_previous_run()
        except OSError as error:
            raise self._unusable(error, "choose another folder") from None
        self._entries = []

    def _set_aside_previous_run(self) -> None:
        old = [p for p in self.path.iterdir() if p.name != LOCK and not p.name.startswith("previous-")]
        if not old:
            return
        number = 1
        while (self.path / f"previous-{number}").exists():
            number += 1
        target = self.path / f"previous-{number}"
        target.mkdir()
        for path in old:
            path.rename(target / path.name)
        self._say(f"Starting over; the previous run was moved to {target}.")

    def _read_manifest(self) -> None:
        manifest = self.path / MANIFEST
        try:
            content = json.loads(manifest.read_text())
            entries = [Entry(**entry) for entry in content["checkpoints"]]
        except FileNotFoundError:
            entries = []
        except (ValueError, KeyError, TypeError):
            self._say(f"{manifest} is damaged.")
            entries = []
        present = [entry for entry in entries if (self.path / entry.file).exists()]
        if not present:
            present = self._entries_from_files()
        self._entries = present

    def _entries_from_files(self) -> list[Entry]:
        """Rebuilds what a lost manifest knew, from the checkpoints themselves."""
        entries = []
        for path in self.path.glob("checkpoint_*.pth"):
            state = self._read(path)
            if state is not None:
                position, best = Position(**state["position"]), state["best"]
                is_best = position.at_epoch_start and best is not None and best["epoch"] == position.epoch
                entries.append(
                    Entry(
                        path.name,
                        **asdict(position),
                        step=state["step"],
                        value=best["value"] if is_best else None,
                        best=is_best,
                        **size_and_sum(path),
                        source=state["config"].get("--resume-from"),
                    )
                )
        if entries:
            self._say(f"{MANIFEST} had no usable entry: rebuilt from {len(entries)} checkpoint files.")
        return sorted(entries, key=lambda entry: entry.step)

    def _repair_links(self) -> None:
        if self._entries:
            self._link("last", self._entries[-1].file)
        if self._best is not None:
            self._link("best", self._best.file)
        if self._entries and self.read_json(RESULTS).get("step") == self.newest_step:
            self.mark_final()

    # --- reading ---------------------------------------------------------------------------------------------

    @property
    def has_checkpoint(self) -> bool:
        return bool(self._entries)

    @property
    def newest_source(self) -> str | None:
        """The `--resume-from` that the newest checkpoint descends from."""
        return self._entries[-1].source if self._entries else None

    def has_checkpoint_of(self, step: int) -> bool:
        """Whether the run of this directory passed that step and saved it."""
        return any(entry.step == step for entry in self._entries)

    @property
    def newest_step(self) -> int | None:
        return self._entries[-1].step if self._entries else None

    @property
    def _best(self) -> Entry | None:
        return next((entry for entry in reversed(self._entries) if entry.best), None)

    def load_newest(self) -> dict[str, Any]:
        """The newest checkpoint that is intact; newer ones that are damaged are named and set aside.

        Raises BadInput when there is none, and then changes nothing.
        """
        damaged: list[Entry] = []
        for entry in reversed(self._entries):
            state = self._load_intact(entry)
            if state is not None:
                for bad in damaged:
                    (self.path / bad.file).rename((self.path / bad.file).with_suffix(".damaged"))
                    self._entries.remove(bad)
                self._repair_links()
                return state
            damaged.append(entry)
        raise BadInput(
            f"--save-dir {self.path}: no checkpoint in it is intact (damaged: "
            f"{', '.join(entry.file for entry in damaged)}); start over with --fresh, or name an intact file with "
            "--resume-from"
        )

    def load_best(self) -> dict[str, Any] | None:
        """The best checkpoint, or None when it is damaged or there is none yet."""
        return self._load_intact(self._best) if self._best is not None else None

    def load_for_use(self) -> dict[str, Any]:
        """The best checkpoint; the newest where there was no validation. Changes nothing. Raises BadInput."""
        entry = self._best or (self._entries[-1] if self._entries else None)
        state = self._load_intact(entry) if entry is not None else None
        if state is None:
            raise BadInput(f"--save-dir {self.path}: holds no intact checkpoint to use; train first")
        return state

    def has_results(self, step: int, of_test: bool) -> bool:
        """Whether results.json is of the run after that many steps, with test scores if these are wanted."""
        results = self.read_json(RESULTS)
        return results.get("step") == step and (results.get("scored") == "test" or not of_test)

    def _load_intact(self, entry: Entry) -> dict[str, Any] | None:
        """The checkpoint of an entry; None, and a line for the user, when it is damaged."""
        path = self.path / entry.file
        if size_and_sum(path)["sha256"] != entry.sha256:
            self._say(f"{path} is damaged: its sha256 is not the one in {MANIFEST}.")
            return None
        return self._read(path)

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            return read_checkpoint(path, str(path))
        except BadInput as error:
            self._say(str(error))
            return None

    # --- writing ---------------------------------------------------------------------------------------------

    def save(self, state: dict[str, Any], value: float | None, is_best: bool) -> Path:
        """Writes one checkpoint and points `last`, and if so `best`, to it.

        value: the monitored metric, None where there was no validation. Raises BadInput when the disk refuses; what
        was there before stays.
        """
        position = Position(**state["position"])
        path = self._unused_path(position)
        temporary = path.with_suffix(".tmp")
        try:
            size, checksum = write_checkpoint(state, temporary)
            entry = Entry(
                path.name,
                **asdict(position),
                step=state["step"],
                value=value,
                best=is_best,
                bytes=size,
                sha256=checksum,
                source=state["config"].get("--resume-from"),
            )
            self._write_manifest([*self._entries, entry])
            temporary.rename(path)
            flush_folder(self.path)
            self._entries.append(entry)
            self._repair_links()
            self._evict()
        except (OSError, RuntimeError) as error:
            temporary.unlink(missing_ok=True)
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise BadInput(
                f"--save-dir {self.path}: cannot write {path.name}: {reason} "
                f"({_size(shutil.disk_usage(self.path).free)} free); earlier checkpoints are intact; free some space "
                "and run the same command again, or choose another folder"
            ) from None
        return path

    def mark_final(self) -> None:
        self._link("final", self._entries[-1].file)

    def restrict_best(self, epoch: int | None) -> None:
        """Forgets any best later than the one of `epoch` (None: every one), for a run that went back."""
        for entry in self._entries:
            entry.best = entry.best and epoch is not None and entry.epoch <= epoch

    def write_json(self, name: str, content: Any) -> None:
        """A small file, replaced as a whole. Raises BadInput when the disk refuses."""
        try:
            _replace_text(self.path / name, json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise BadInput(f"--save-dir {self.path}: cannot write {name}: {error.strerror}") from None

    def discard(self, name: str) -> None:
        """Deletes a file of `write_json`."""
        (self.path / name).unlink(missing_ok=True)

    def read_json(self, name: str) -> dict[str, Any]:
        """A file of `write_json`; empty when there is none or it is damaged."""
        try:
            return json.loads((self.path / name).read_text())
        except (FileNotFoundError, ValueError):
            return {}

    def _unused_path(self, position: Position) -> Path:
        """A file named by position is never overwritten; a run that went back gets another name."""
        name = f"checkpoint_{position.epoch}"
        if not position.at_epoch_start:
            name += f"_{position.phase}_{position.samples}"
        path = self.path / f"{name}.pth"
        repeat = 1
        while path.exists():
            repeat += 1
            path = self.path / f"{name}_again{repeat}.pth"
        return path

    def _evict(self) -> None:
        """Deletes the oldest files beyond `--keep-checkpoints`, never the best or the newest.

        The manifest forgets them at the next save: an entry without a file is ignored.
        """
        if self._keep == 0:
            return
        for entry in self._entries[: -self._keep]:
            if entry is not self._best:
                (self.path / entry.file).unlink(missing_ok=True)
                self._entries.remove(entry)

    def _write_manifest(self, entries: list[Entry]) -> None:
        content = {"checkpoints": [asdict(entry) for entry in entries]}
        _replace_text(self.path / MANIFEST, json.dumps(content, indent=2) + "\n")

    def _link(self, name: str, file: str) -> None:
        """Points NAME.pth to a checkpoint: a hard link, or a copy where the file system has none."""
        target = self.path / f"{name}.pth"
        if target.exists() and target.samefile(self.path / file):
            return
        temporary = self.path / f"{name}.tmp"
        temporary.unlink(missing_ok=True)
        try:
            os.link(self.path / file, temporary)
        except OSError:
            shutil.copyfile(self.path / file, temporary)
        temporary.rename(target)


def refuse_altered(path: Path, label: str) -> None:
    """Raises BadInput when the manifest beside a checkpoint knows it by another checksum."""
    try:
        entries = json.loads((path.parent / MANIFEST).read_text())["checkpoints"]
        known = {entry["file"]: entry["sha256"] for entry in entries}
    except (OSError, ValueError, KeyError, TypeError):
        return
    if path.name in known and size_and_sum(path)["sha256"] != known[path.name]:
        raise BadInput(f"{label}: is damaged: its sha256 is not the one in {path.parent / MANIFEST}")


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    flush_folder(path.parent)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"
