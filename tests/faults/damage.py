"""Seeded damage to the files of a run directory, of the kinds that disks, kills and people cause."""

import json
import random
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[random.Random, Path], None]


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_file())


def in_place(path: Path, data: bytes) -> None:
    """Overwrites a file but keeps its inode, so that hard links change too, as on a failing disk."""
    with path.open("r+b") as file:
        file.truncate(0)
        file.write(data)


def truncate(draw: random.Random, path: Path) -> None:
    data = path.read_bytes()
    in_place(path, data[: draw.randrange(len(data))] if data else b"")


def flip_bits(draw: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 1, 1, 2, 50])):
        if data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    in_place(path, bytes(data))


def empty(draw: random.Random, path: Path) -> None:
    in_place(path, b"")


def delete(draw: random.Random, path: Path) -> None:
    path.unlink()


def garbage(draw: random.Random, path: Path) -> None:
    """Overwrites a block with random bytes, as when a file system loses a write."""
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data) + 1)
    block = draw.randbytes(draw.choice([1, 64, 4096]))
    data[start : start + len(block)] = block
    in_place(path, bytes(data))


def replaced(draw: random.Random, path: Path) -> None:
    """Replaces a file by one with a new inode, so that hard links keep the old content."""
    data = draw.randbytes(draw.randrange(2000))
    path.unlink()
    path.write_bytes(data)


def swap(draw: random.Random, path: Path) -> None:
    other = draw.choice(files_of(path.parent))
    aside = path.with_name("aside")
    path.rename(aside)
    if other != path:
        other.rename(path)
    aside.rename(other)


def half_written(draw: random.Random, path: Path) -> None:
    """Leaves a truncated temporary file beside the file, as a kill does."""
    data = path.read_bytes()
    path.with_suffix(".tmp").write_bytes(data[: draw.randrange(len(data) + 1)])


def wrong_json(draw: random.Random, path: Path) -> None:
    """Replaces JSON by other valid JSON; applies `garbage` to other files."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return garbage(draw, path)
    spoil_json(draw, content)
    whole: list[object] = [None, [], {}, "text", 3, [content]]
    in_place(path, json.dumps(draw.choice(whole) if draw.random() < 0.2 else content).encode())


def spoil_json(draw: random.Random, content: object) -> None:
    """Changes, deletes or repeats one value at any depth."""
    places: list[tuple[dict | list, str | int]] = []

    def collect(node: object) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            places.append((node, key))  # type: ignore[arg-type]
            collect(value)

    collect(content)
    if not places:
        return
    node, key = draw.choice(places)
    action = draw.choice(["type", "type", "delete", "twice"])
    if action == "delete":
        del node[key]
    elif action == "twice" and isinstance(node, list):
        node.append(node[key])
    else:
        node[key] = draw.choice([None, True, -1, 1.5, 10**30, "../../x", "", [1], {"a": 1}, float("nan")])


DAMAGES: list[Damage] = [truncate, flip_bits, empty, delete, garbage, replaced, swap, half_written, wrong_json]
IMPORTANT = ("checkpoint_", "manifest", "last", "best")


def spoil(draw: random.Random, directory: Path) -> list[str]:
    """Damages files one to twelve times; returns a description of each damage."""
    done = []
    for _ in range(draw.choice([1, 2, 3, 5, 8, 12])):
        files = files_of(directory)
        if draw.random() < 0.8:
            files = [path for path in files if path.name.startswith(IMPORTANT)] or files
        if not files:
            break
        path, damage = draw.choice(files), draw.choice(DAMAGES)
        if damage is wrong_json and path.suffix == ".pth":
            path = draw.choice(sorted(directory.glob("*.json")) or [path])
        done.append(f"{damage.__name__} {path.name}")
        damage(draw, path)
    return done
