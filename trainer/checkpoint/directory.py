"""The run directory: its checkpoints, read and written; never fewer than one good checkpoint.

A checkpoint is written to a temporary file and flushed; its checksum and position enter `manifest.json`, which is
flushed and renamed; only then is the file renamed into place. Killed at any point, the directory holds either the
old state or the new one.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from errno import ENOSPC
from pathlib import Path
from typing import Any

from trainer.checkpoint.file import size_and_sum, write_checkpoint
from trainer.checkpoint.lock import LOCK, DirectoryLock
from trainer.checkpoint.manifest import MANIFEST, Entry, write_manifest
from trainer.checkpoint.recovery import LINKS, read_or_say, take_inventory
from trainer.checkpoint.snapshot import state_bytes
from trainer.loading.errors import BadInput
from trainer.loading.files import DISK_FULL, flush_path, replace_text, stamp
from trainer.loading.order import Position

RESULTS = "results.json"
CONFIG = "config.json"
METRICS = "metrics.jsonl"


class NoRoom(BadInput):
    """A checkpoint did not fit; what was there before stays. problem: what happened, without advice."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; free some space and run the same command again, or choose another folder")
        self.problem = problem


class RunDirectory:
    """Owns `--save-dir` while it is locked. Used on the main process only."""

    def __init__(self, path: Path, keep: int, say: Callable[[str], None]) -> None:
        self.path = path
        self._keep = keep
        self._say = say
        self._lock = DirectoryLock(path)
        self._entries: list[Entry] = []
        self._lost: list[str] = []
        """Without any usable checkpoint: what shows that there was one."""
        self._verified: dict[str, tuple[str, int, int]] = {}
        """File -> its stamp when it last matched its checksum."""
        self.earlier_attempt: dict[str, Any] | None = None
        """config.json of an earlier attempt of the same job, which torchrun has started again."""

    # --- opening ---------------------------------------------------------------------------------------------

    def acquire(self, take_over_lock: bool = False, agents: Sequence[str] = ()) -> None:
        """Creates, locks and repairs the directory. Raises BadInput when it cannot be used.

        take_over_lock: also when a job on another host left its lock. agents: the torchrun agents of this job. If one
        of them started the attempt before too, the job goes on without the node that left its lock.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.earlier_attempt = self._attempt_of(agents)
            self._lock.take(take_over_lock or self.earlier_attempt is not None)
            self._take_inventory()
            for entry in self._entries:
                self._put_in_place(entry)
            for leftover in self.path.glob("*.tmp"):
                leftover.unlink()
            self._repair_links()
        except OSError as error:
            raise self._unusable(error, "choose a folder that can be written to") from None

    def _attempt_of(self, agents: Sequence[str]) -> dict[str, Any] | None:
        config = self.read_json(CONFIG)
        before = config.get("torchrun_agents")
        return config if isinstance(before, list) and any(agent in before for agent in agents) else None

    def look(self) -> None:
        """Reads what is there without taking the lock or changing anything. Raises BadInput when it cannot."""
        try:
            self._take_inventory()
        except OSError as error:
            raise self._unusable(error, "choose the folder of a run") from None

    def _take_inventory(self) -> None:
        inventory = take_inventory(self.path, self._say)
        self._entries, self._lost = inventory.entries, inventory.lost
        if not self._entries and self.read_json(RESULTS):
            self._lost.append(f"{RESULTS} is of a run that had some")

    def _unusable(self, error: OSError, advice: str) -> BadInput:
        return BadInput(f"--save-dir {self.path}: {error.strerror or error}; {advice}")

    def release(self) -> None:
        self._lock.release()

    def require_space(self, num_bytes: int) -> None:
        """Raises BadInput when the file system has no room for one checkpoint."""
        free = shutil.disk_usage(self.path).free
        if free < num_bytes:
            raise BadInput(
                f"--save-dir {self.path}: a checkpoint needs about {_size(num_bytes)} and {_size(free)} are free; "
                "free some space or choose another folder"
            )

    def start_over(self) -> None:
        """Moves everything of the previous run to a folder `previous-N`. Raises BadInput when it cannot."""
        try:
            self._set_aside_previous_run()
        except OSError as error:
            raise self._unusable(error, "choose another folder") from None
        self._entries, self._lost = [], []

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

    # --- repairing -------------------------------------------------------------------------------------------

    def _put_in_place(self, entry: Entry) -> None:
        """Gives a checkpoint that was found under another name its own."""
        if entry.file.startswith("checkpoint_") and entry.file.endswith(".pth"):
            return
        source, target = self.path / entry.file, self._unused_path(entry.position)
        self._point(target, source)
        flush_path(self.path)
        entry.file = target.name
        if source.suffix == ".pth":
            self._say(f"{target} was missing: restored from {source.name}.")

    def _repair_links(self) -> None:
        if self._entries:
            self._link("last", self._entries[-1].file)
        if self._best is not None:
            self._link("best", self._best.file)
        if self._entries and self.read_json(RESULTS).get("step") == self.newest_step:
            self._mark_final()

    # --- reading ---------------------------------------------------------------------------------------------

    @property
    def has_checkpoint(self) -> bool:
        """Or at least the traces of one: `load_newest` then says what has become of it."""
        return bool(self._entries or self._lost)

    @property
    def holds_run(self) -> bool:
        """Whether a run was ever opened in it."""
        return self.has_checkpoint or (self.path / CONFIG).exists()

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
                    self._set_aside(bad)
                self._repair_links()
                return state
            damaged.append(entry)
        reasons = self._lost or [f"{entry.file} is damaged" for entry in damaged]
        raise BadInput(
            f"--save-dir {self.path}: no checkpoint in it is intact ({', '.join(reasons)}); start over with --fresh, "
            "or name an intact file with --resume-from"
        )

    def _set_aside(self, damaged: Entry) -> None:
        path = self.path / damaged.file
        for name in self._links_to(path):
            (self.path / f"{name}.pth").unlink()
        path.rename(path.with_suffix(".damaged"))
        self._entries.remove(damaged)

    def _links_to(self, path: Path) -> list[str]:
        links = {name: self.path / f"{name}.pth" for name in LINKS}
        return [name for name, link in links.items() if link.exists() and link.samefile(path)]

    def load_best(self) -> dict[str, Any] | None:
        """The best checkpoint, or None when it is damaged or there is none yet."""
        return self._load_intact(self._best) if self._best is not None else None

    def load_for_use(self) -> dict[str, Any]:
        """The best intact checkpoint; the newest where there was no validation. Changes nothing. Raises BadInput."""
        newest_first = self._entries[::-1]
        for entry in sorted(newest_first, key=lambda entry: not entry.best):
            state = self._load_intact(entry)
            if state is not None:
                return state
        raise BadInput(f"--save-dir {self.path}: holds no intact checkpoint to use; train first")

    def has_results(self, step: int, of_test: bool) -> bool:
        """Whether results.json is of the run after that many steps, with test scores if these are wanted."""
        results = self.read_json(RESULTS)
        return results.get("step") == step and (results.get("scored") == "test" or not of_test)

    def _load_intact(self, entry: Entry) -> dict[str, Any] | None:
        """The checkpoint of an entry; None, and a line for the user, when it is damaged."""
        path = self.path / entry.file
        flaw = self._flaw(entry)
        if flaw is not None:
            self._say(f"{path} is damaged: {flaw}.")
            return None
        return read_or_say(path, self._say, verified=True)

    def _flaw(self, entry: Entry) -> str | None:
        """Why a file is not what it was; its checksum is not worked out again while it does not change."""
        path = self.path / entry.file
        try:
            current = stamp(path)
            if self._verified.get(entry.file) != current:
                if size_and_sum(path)["sha256"] != entry.sha256:
                    return f"its sha256 is not the one in {MANIFEST}"
                self._verified[entry.file] = current
        except OSError as error:
            return error.strerror
        return None

    # --- writing ---------------------------------------------------------------------------------------------

    def save(self, state: dict[str, Any], value: float | None, is_best: bool) -> Path:
        """Writes one checkpoint and points `last`, and if so `best`, to it.

        value: the monitored metric, None where there was no validation. Raises BadInput when the disk refuses, NoRoom
        when it is full; what was there before stays.
        """
        path = self._unused_path(Position(**state["position"]))
        temporary = path.with_suffix(".tmp")
        needed = state_bytes(state)
        try:
            self._refuse_without_room(needed)
            self._flush_metrics()
            size_and_checksum = write_checkpoint(state, temporary)
            entry = Entry(
                path.name,
                **state["position"],
                step=state["step"],
                value=value,
                best=is_best,
                **size_and_checksum,
                source=state["config"].get("--resume-from"),
            )
            write_manifest(self.path / MANIFEST, [*self._entries, entry])
            temporary.rename(path)
            flush_path(self.path)
        except (OSError, RuntimeError) as error:
            self._forget_attempt(temporary)
            raise self._refusal(error, path.name, needed) from None
        self._entries.append(entry)
        self._verified[entry.file] = stamp(path)
        self._tidy()
        return path

    def _refuse_without_room(self, needed: int) -> None:
        """Before anything is written: what is left of a disk that is nearly full is for the logs."""
        if shutil.disk_usage(self.path).free < needed:
            raise OSError(ENOSPC, os.strerror(ENOSPC))

    def _flush_metrics(self) -> None:
        """So that no loss of power leaves a checkpoint without the metrics that led to it."""
        metrics = self.path / METRICS
        if metrics.exists():
            flush_path(metrics)

    def _forget_attempt(self, temporary: Path) -> None:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
            if not self._entries:
                # It may name the checkpoint that did not come to be, which would be missed at the next start.
                (self.path / MANIFEST).unlink(missing_ok=True)

    def _refusal(self, error: OSError | RuntimeError, file: str, needed: int) -> BadInput:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        free = shutil.disk_usage(self.path).free
        problem = (
            f"--save-dir {self.path}: cannot write {file}: {reason}: it needs about {_size(needed)} and "
            f"{_size(free)} are free; earlier checkpoints are intact"
        )
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            return NoRoom(problem)
        return BadInput(f"{problem}; see to the file system, or choose another folder, and run the same command again")

    def _tidy(self) -> None:
        """After a save. Raises BadInput."""
        try:
            self._repair_links()
            self._evict()
        except OSError as error:
            # Without room for a copy the links stay as they are until the next save or start.
            if error.errno not in DISK_FULL:
                raise BadInput(f"--save-dir {self.path}: cannot be tidied after a save: {error.strerror}") from None

    def write_results(self, content: dict[str, Any]) -> None:
        """Ends a run: names its last checkpoint final, and writes results.json. Raises BadInput when the disk refuses.

        Its metrics are on the disk before, since nobody will write them again.
        """
        try:
            self._mark_final()
            self._flush_metrics()
        except OSError as error:
            raise self._unusable(error, "see to the file system and run the same command again") from None
        self.write_json(RESULTS, content)

    def _mark_final(self) -> None:
        self._link("final", self._entries[-1].file)

    def restrict_best(self, epoch: int | None) -> None:
        """Forgets any best later than the one of `epoch` (None: every one), for a run that went back."""
        for entry in self._entries:
            entry.best = entry.best and epoch is not None and entry.epoch <= epoch

    def write_json(self, name: str, content: Any) -> None:
        """A small file, replaced as a whole. Raises BadInput when the disk refuses."""
        try:
            replace_text(self.path / name, json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise BadInput(f"--save-dir {self.path}: cannot write {name}: {error.strerror}") from None

    def discard(self, name: str) -> None:
        """Deletes a file of `write_json`. Raises BadInput when it cannot."""
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise BadInput(f"--save-dir {self.path}: cannot delete {name}: {error.strerror}") from None

    def read_json(self, name: str) -> dict[str, Any]:
        """A file of `write_json`; empty when there is none or it is damaged."""
        try:
            content = json.loads((self.path / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

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

        Only intact files count as kept, so that damage to newer ones never costs the last good one. The manifest
        forgets what was deleted at the next save: an entry without a file is ignored.
        """
        if self._keep == 0:
            return
        num_intact, has_best = 0, False
        for entry in self._entries[::-1]:
            if num_intact < self._keep or (entry.best and not has_best):
                is_intact = self._flaw(entry) is None
                num_intact += is_intact
                has_best = has_best or (entry.best and is_intact)
            else:
                (self.path / entry.file).unlink(missing_ok=True)
                self._entries.remove(entry)

    def _link(self, name: str, file: str) -> None:
        """Points NAME.pth to a checkpoint."""
        target = self.path / f"{name}.pth"
        if not (target.exists() and target.samefile(self.path / file)):
            self._point(target, self.path / file)

    def _point(self, target: Path, source: Path) -> None:
        """Gives a file a second name: a hard link, or a copy where the file system has none. Raises OSError."""
        temporary = target.with_suffix(".link.tmp")
        temporary.unlink(missing_ok=True)
        try:
            try:
                os.link(source, temporary)
            except OSError:
                shutil.copyfile(source, temporary)
            temporary.rename(target)
        finally:
            temporary.unlink(missing_ok=True)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"
