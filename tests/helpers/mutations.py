"""Random damage to the bytes of a small file, for tests of file readers."""

import random
import re
from collections.abc import Callable, Iterator

_CELL = re.compile(rb"[^\s,;:|\"]+")
_ODD = (
    b"\x00", b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\xf0\x9f\x90\xb4", b'"', b"'", b",", b";", b"\t", b"\r", b"\n",
    b"\r\n", b"-", b"nan", b"inf", b"1e999", b"-1", b"0", b"9" * 40, b"1,2", b"../x", b"\x1b[2J",
    "\u2028\u0663".encode(),
)  # fmt: skip
_LONGEST_CELL = 20_000


def mutations(content: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Yields `count` damaged copies of a file, each with one to three changes that the seed determines.

    Changes flip, remove, repeat, insert or replace bytes, swap cells or lines, or lengthen a cell.
    """
    for i in range(count):
        draw = random.Random(f"{seed} {i}")
        damaged = content
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            damaged = draw.choice(_CHANGES)(draw, damaged)
        yield damaged


def _flip(draw: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    if changed:
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(draw: random.Random, content: bytes) -> bytes:
    first, last = _range(draw, len(content))
    return content[:first] + content[last:]


def _truncate(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randint(0, len(content))]


def _repeat(draw: random.Random, content: bytes) -> bytes:
    first, last = _range(draw, len(content))
    return content[:last] + content[first:last] * draw.choice((1, 1, 2, 5)) + content[last:]


def _insert_odd(draw: random.Random, content: bytes) -> bytes:
    place = draw.randint(0, len(content))
    return content[:place] + draw.choice(_ODD) + content[place:]


def _replace_cell(draw: random.Random, content: bytes) -> bytes:
    first, last = _cell(draw, content)
    return content[:first] + draw.choice(_ODD) + content[last:]


def _lengthen_cell(draw: random.Random, content: bytes) -> bytes:
    first, last = _cell(draw, content)
    long = draw.choice((b"1", b"7.", b"x", b"1,234,", b" ", b"\xc3\xa4")) * draw.randint(50, _LONGEST_CELL // 6)
    return content[:first] + long + draw.choice((b"", b"x")) + content[last:]


def _swap_cells(draw: random.Random, content: bytes) -> bytes:
    (first, second), (third, fourth) = sorted((_cell(draw, content), _cell(draw, content)))
    if second > third:
        return content
    return content[:first] + content[third:fourth] + content[second:third] + content[first:second] + content[fourth:]


def _swap_lines(draw: random.Random, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    if lines:
        i, k = draw.randrange(len(lines)), draw.randrange(len(lines))
        lines[i], lines[k] = lines[k], lines[i]
    return b"".join(lines)


def _range(draw: random.Random, length: int) -> tuple[int, int]:
    """Returns a random range of bytes, which is usually short."""
    first = draw.randint(0, length)
    return first, min(length, first + draw.choice((1, 2, 8, draw.randint(0, max(1, length)))))


def _cell(draw: random.Random, content: bytes) -> tuple[int, int]:
    """Returns start and end of a random cell, or an empty range if there is no cell."""
    found = _CELL.search(content, draw.randint(0, len(content))) or _CELL.search(content)
    return found.span() if found else (0, 0)


_CHANGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _flip,
    _cut,
    _truncate,
    _repeat,
    _insert_odd,
    _replace_cell,
    _lengthen_cell,
    _swap_cells,
    _swap_lines,
)
