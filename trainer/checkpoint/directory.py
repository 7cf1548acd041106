"""Saves and loads the checkpoints of a run directory, and never deletes the last intact checkpoint.

A checkpoint is written to a temporary file and flushed to disk. Then `manifest.json`, which lists the checkpoint with
its checksum and training position, is replaced and flushed, and the temporary file gets its final name. If the process
is killed at any point, the directory contains either the old or the new state.
"""

import itertools
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from errno import ENOSPC
from pathlib import Path
from typing import Any

from trainer.checkpoint.background import NoRoom, state_bytes
from trainer.checkpoint.file import CheckpointReader, NewerFormat, read_checkpoint, size_and_sum, write_checkpoint
from trainer.checkpoint.lock import KERNEL_LOCK, LOCK, Lock, LockTaken, take_lock
from trainer.checkpoint.manifest import (
    CHECKPOINT_NAME,
    LINKS,
    MANIFEST,
    RESULTS,
    Entry,
    Retention,
    as_json,
    evict,
    link,
    newest_best,
    read_config,
    read_json,
    read_manifest,
    unused_path,
    update_links,
    write_manifest,
)
from trainer.common.errors import DiskError, UserError, reason
from trainer.common.files import DISK_FULL, FOLDER_GONE, flush_path, refusing_disk_errors
from trainer.loading.order import Position

METRICS = "metrics.jsonl"
_MOVING = "previous-unfinished"
"""Name of the folder `previous-N` until it contains the whole previous run."""


def refuse_links(folder: Path) -> None:
    """Raises UserError for a symbolic link through which a run would write to or delete files outside of its folder."""
    links = (path for path in [*folder.iterdir(), *(folder / "logs").glob("*")] if path.is_symlink())
    replaced = (".pth", ".json", ".jsonl")  # files that a new file replaces
    if (link := next((path for path in links if path.suffix not in replaced), None)) is not None:
        raise UserError(
            f"--save-dir {folder}: {link.relative_to(folder)} is a symbolic link, through which the run would write "
            "outside of this folder; remove the link"
        )


class RunDirectory:
    """The `--save-dir` folder of a run, which this process locks. Only rank 0 uses this class, or its successor.

    entries: the run's checkpoints, oldest first. earlier_attempt: config.json of an earlier attempt of this job, if
    torchrun restarted the job. token_of_rank_0: identifies rank 0's lock on all ranks.
    """

    def __init__(self, path: Path, retention: Retention, say: Callable[[str], None]) -> None:
        self.path = path
        self.entries: list[Entry] = []
        self.earlier_attempt: dict[str, Any] | None = None
        self.token_of_rank_0 = ""
        self._retention = retention
        self._say = say
        self.lock: Lock | None = None
        self._reader = CheckpointReader(path, say)
        self._lost: list[str] = []
        """Sentences about lost checkpoints, if the directory contains no usable checkpoint."""

    # --- opening ---------------------------------------------------------------------------------------------

    def acquire(self, agents: Sequence[str] = (), gone: str | None = None) -> str:
        """Creates, locks and repairs the directory; returns the lock's token. Raises UserError if a step fails.

        agents: torchrun agents of this job; if one of them also started the previous attempt, this process takes the
        lock without waiting to see whether its holder is alive. gone: token of a holder that has exited; the directory
        must then exist.
        """
        with refusing_disk_errors(f"--save-dir {self.path}", "choose a folder that can be written to"):
            config = read_config(self.path, self._say)
            if gone is None:
                self.path.mkdir(parents=True, exist_ok=True)
            elif not (self.path / KERNEL_LOCK).exists():
                raise UserError(f"--save-dir {self.path}: {FOLDER_GONE}; run the same command again")
            refuse_links(self.path)
            agents_before = config.get("torchrun_agents")
            if isinstance(agents_before, list) and any(agent in agents_before for agent in agents):
                self.earlier_attempt = config
            self.lock = take_lock(self.path, self.earlier_attempt is not None, self._say, gone)
            self._move_back()
            claim_temporary_files(self.path, self.lock)
            self.entries, self._lost = find_checkpoints(self.path, self._say)
            put_in_place(self.path, self.entries, self._say, self.lock)
            for leftover in self.path.glob("*.tmp"):
                self.writer.delete(leftover)
            self._update_links()
        return self.lock.holder.token

    @property
    def writer(self) -> Lock:
        assert self.lock is not None
        return self.lock

    def release(self) -> None:
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def write_json(self, name: str, content: Any) -> None:
        """Replaces a JSON file atomically and durably. Raises UserError on disk errors, or LockTaken."""
        with refusing_disk_errors(f"--save-dir {self.path}: cannot write {name}"):
            self.writer.replace_text(self.path / name, as_json(content))

    def delete(self, name: str) -> None:
        """Deletes a file if it exists. Raises UserError on disk errors, or LockTaken."""
        with refusing_disk_errors(f"--save-dir {self.path}: cannot delete {name}"):
            self.writer.delete(self.path / name)

    def require_space(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self.path).free
        if free < num_bytes:
            raise UserError(
                f"--save-dir {self.path}: a checkpoint needs about {_size(num_bytes)}, but only {_size(free)} are "
                "free; free some space or choose another folder"
            )

    def start_over(self) -> None:
        """Moves the previous run to a new folder `previous-N`. Raises UserError on disk errors.

        After an error, all files are in their place again; after a kill, `acquire` moves them back.
        """
        with refusing_disk_errors(f"--save-dir {self.path}", "choose another folder"):
            stay = (LOCK, KERNEL_LOCK)
            old = [p for p in self.path.iterdir() if p.name not in stay and not p.name.startswith("previous-")]
            if old:
                moving = self.path / _MOVING
                moving.mkdir()
                try:
                    for path in old:
                        self.writer.rename(path, moving / path.name)
                except OSError as error:
                    self._move_back()
                    raise OSError(error.errno, f"cannot move {path.name}: {error.strerror}") from None
                folders = (self.path / f"previous-{number}" for number in itertools.count(1))
                target = next(folder for folder in folders if not folder.exists())
                self.writer.rename(moving, target)
                self._say(f"Starting over; the previous run was moved to {target}.")
        self.entries, self._lost = [], []

    def _move_back(self) -> None:
        """Moves back the files of a previous run that `start_over` did not move as a whole. Raises OSError."""
        moving = self.path / _MOVING
        if moving.is_dir():
            for path in moving.iterdir():
                self.writer.rename(path, self.path / path.name)
            moving.rmdir()

    def _update_links(self) -> None:
        is_finished = bool(self.entries) and read_json(self.path / RESULTS).get("step") == self.entries[-1].step
        update_links(self.path, self.entries, is_finished, self.writer)

    # --- loading ---------------------------------------------------------------------------------------------

    @property
    def has_checkpoint(self) -> bool:
        """Returns whether the directory has a checkpoint, or signs of a lost one, which `load_newest` reports."""
        return bool(self.entries or self._lost)

    def load_newest(self) -> dict[str, Any]:
        """Loads the newest intact checkpoint; reports and renames damaged checkpoints that are newer.

        Raises UserError, without changing files, if no checkpoint is intact.
        """
        damaged: list[Entry] = []
        for entry in reversed(self.entries):
            state = self._reader.read(entry)
            if state is not None:
                with refusing_disk_errors(f"--save-dir {self.path}", "check the file system"):
                    for bad in damaged:
                        set_aside(self.path / bad.file, self.writer)
                        self.entries.remove(bad)
                    self._update_links()
                return state
            damaged.append(entry)
        reasons = self._lost or [f"{entry.file} is damaged" for entry in damaged]
        raise UserError(
            f"--save-dir {self.path}: contains no intact checkpoint ({', '.join(reasons)}); start over with --fresh, "
            "or name an intact file with --resume-from"
        )

    def load_best(self) -> dict[str, Any] | None:
        best = newest_best(self.entries)
        return self._reader.read(best) if best is not None else None

    # --- saving ----------------------------------------------------------------------------------------------

    def save(self, state: dict[str, Any]) -> Path:
        """Writes a checkpoint and updates `last.pth`, and `best.pth` if the checkpoint is the best.

        Raises UserError on disk errors, NoRoom if the disk is full, or LockTaken if another process took over the
        directory. Deletes no checkpoint before the new one is written.
        """
        path = unused_path(self.path, Position(**state["position"]))
        temporary = self.writer.temporary(path)
        needed = state_bytes(state)
        try:
            # leaves the remaining space of a nearly full disk to the logs
            if shutil.disk_usage(self.path).free < needed:
                raise OSError(ENOSPC, os.strerror(ENOSPC))
            self._flush_metrics()
            entry = Entry.of(state, path.name, write_checkpoint(state, temporary), self._inherited_source)
            write_manifest(self.path / MANIFEST, [*self.entries, entry], self.writer)
            self.writer.rename(temporary, path)
            flush_path(self.path)
            self._reader.trust(entry)
        except (OSError, RuntimeError) as error:
            self._forget_attempt(temporary)
            raise self._refusal(error, path.name, needed) from None
        except LockTaken:
            temporary.unlink(missing_ok=True)
            raise
        self.entries.append(entry)
        self._tidy()
        return path

    def mark_final(self) -> None:
        """Links `final.pth` to the newest checkpoint and flushes metrics. Raises UserError on disk errors."""
        with refusing_disk_errors(f"--save-dir {self.path}", "check the file system and run the same command again"):
            update_links(self.path, self.entries, is_finished=True, writer=self.writer)
            self._flush_metrics()

    def forget_values(self) -> None:
        """Clears `value` and `best` of all entries, before another run continues in this directory."""
        for entry in self.entries:
            entry.value, entry.best = None, False

    def forget_later_values(self, state: Mapping[str, Any]) -> None:
        """Clears `value` and `best` of checkpoints later than `state`, from which the run resumes."""
        now, best = (state["step"], Position(**state["position"])), state["best"] or {"step": -1}
        for entry in self.entries:
            if (entry.step, entry.position) > now or (entry.best and entry.step > best["step"]):
                entry.value, entry.best = None, False

    def _flush_metrics(self) -> None:
        """Flushes metrics to disk before the checkpoint, so that after a power loss no checkpoint lacks its metrics."""
        metrics = self.path / METRICS
        if metrics.exists():
            flush_path(metrics)

    def _forget_attempt(self, temporary: Path) -> None:
        """Deletes the files of a failed save. Raises LockTaken if another process took over the directory."""
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
            self.writer.require()
            if not self.entries:
                # the manifest may list the failed checkpoint, which the next start would report as missing
                self.writer.delete(self.path / MANIFEST)

    @property
    def _inherited_source(self) -> str | None:
        """Returns `Entry.source` of the newest checkpoint; None if this source is in the same directory."""
        source = self.entries[-1].source if self.entries else None
        return None if source is None or Path(source).parent == self.path.resolve() else source

    def _refusal(self, error: OSError | RuntimeError, file: str, needed: int) -> DiskError:
        try:
            free = shutil.disk_usage(self.path).free
        except FileNotFoundError:
            return DiskError(f"--save-dir {self.path}: cannot write {file}: {FOLDER_GONE}; run the same command again")
        cause = getattr(error, "strerror", None) or reason(error)
        problem = (
            f"--save-dir {self.path}: cannot write {file}: {cause}; it needs about {_size(needed)}, and {_size(free)} "
            "are free; earlier checkpoints are intact"
        )
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            return NoRoom(problem)
        return DiskError(f"{problem}; check the file system, or choose another folder, and run the same command again")

    def _tidy(self) -> None:
        try:
            try:
                self._update_links()
            finally:  # eviction frees disk space, which the next update of links may need
                self.entries = evict(self.path, self.entries, self._retention, self._reader.is_intact, self.writer)
        except OSError as error:
            if error.errno not in DISK_FULL:  # if the disk is full, the next save or start updates the links
                what = f"--save-dir {self.path}: cannot delete old files: {error.strerror}"
                raise DiskError(f"{what}; check the file system and run the same command again") from None


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"


# --- finding checkpoints, also in damaged directories --------------------------------------------------------------


def claim_temporary_files(folder: Path, writer: Lock) -> None:
    """Renames or deletes temporary files, so that a suspended previous holder of the lock cannot complete them.

    Renames checkpoints, which may be complete and listed in the manifest, and deletes other temporary files.
    Raises OSError.
    """
    for path in folder.glob("*.tmp"):
        with suppress(FileNotFoundError):  # another process has just renamed it
            if path.name.startswith("checkpoint_"):
                writer.rename(path, writer.temporary(path))
            else:
                writer.delete(path)


def find_checkpoints(folder: Path, say: Callable[[str], None]) -> tuple[list[Entry], list[str]]:
    """Returns a folder's checkpoints, oldest first, and, only if there are none, sentences about lost checkpoints.

    Also finds checkpoints under temporary names. Changes no file. say: prints messages about damage. Raises OSError.
    """
    listed = read_manifest(folder / MANIFEST, say)
    best = newest_best(listed)
    # the newest and the best checkpoint are never evicted, so a missing one was lost
    missing = [entry for entry in listed if entry in (listed[-1], best) and not (folder / entry.file).is_file()]
    if missing:
        files = _files_under_other_names(folder)
        for entry in missing:
            entry.file = files.get(entry.sha256, entry.file)
    entries = [entry for entry in listed if (folder / entry.file).is_file()]
    if entries:
        return entries, []
    entries, lost = _entries_from_files(folder, say)
    lost += [f"{entry.file} is missing" for entry in missing]
    if read_json(folder / RESULTS):
        lost.append(f"{RESULTS} shows that the run had checkpoints")
    return entries, [] if entries else lost


def put_in_place(folder: Path, entries: Sequence[Entry], say: Callable[[str], None], writer: Lock) -> None:
    """Links standard names to checkpoints found under other names, and updates the entries. Raises OSError."""
    for entry in entries:
        if re.fullmatch(CHECKPOINT_NAME, entry.file):
            continue
        source, target = folder / entry.file, unused_path(folder, entry.position)
        link(target, source, writer)
        flush_path(folder)
        entry.file = target.name
        if source.suffix == ".pth":
            say(f"{target} was missing and has been restored from {source.name}.")


def set_aside(path: Path, writer: Lock) -> None:
    """Renames a damaged checkpoint to .damaged and deletes its links. Raises OSError, or LockTaken."""
    for name in LINKS:
        link_to = path.with_name(name)
        if link_to.exists() and link_to.samefile(path):
            writer.delete(link_to)
    writer.rename(path, path.with_suffix(".damaged"))


def _files_under_other_names(folder: Path) -> dict[str, str]:
    """Finds links, and checkpoints that a killed process did not rename; returns file names by sha256."""
    found = {}
    for path in [*(folder / name for name in LINKS), *sorted(folder.glob("checkpoint_*.tmp"))]:
        with suppress(FileNotFoundError):  # no such link, or a running job has just renamed it
            found[size_and_sum(path)["sha256"]] = path.name
    return found


def _entries_from_files(folder: Path, say: Callable[[str], None]) -> tuple[list[Entry], list[str]]:
    """Rebuilds the entries of a lost manifest from checkpoint files; returns (entries, sentences about damage)."""
    files: dict[int, Path] = {}
    for path in [*sorted(folder.glob("checkpoint_*.pth")), *(folder / name for name in LINKS)]:
        if path.is_file():
            files.setdefault(path.stat().st_ino, path)  # keeps one name of a file with several links
    entries: dict[str, Entry] = {}
    lost: list[str] = []
    for path in files.values():
        try:
            state = read_checkpoint(path, str(path))
        except (DiskError, NewerFormat):
            raise
        except UserError as error:
            say(str(error))
            lost.append(f"{path.name} is damaged")
            continue
        entry = Entry.of(state, path.name, size_and_sum(path))
        entries.setdefault(entry.sha256, entry)
    if entries:
        say(f"{MANIFEST} had no usable entry and has been rebuilt from {len(entries)} checkpoint files.")
    return sorted(entries.values(), key=lambda entry: entry.step), lost
