import random
import unicodedata

import numpy as np
import pytest

from data.speech.text import BLANK, Alphabet, normalise, shortest_frames
from trainer.common.errors import UserError


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("Hello, World!", "hello world"),
        ("twenty-one 21", "twenty one 21"),
        ("DON'T", "don't"),
        ("don’t", "don't"),  # noqa: RUF001
        ("'quoted' rock 'n' roll''s", "quoted rock n roll s"),
        ("  a\t b\n", "a b"),
        ("Ⅻ ﬁne", "xii fine"),
        ("STRASSE Straße", "strasse straße"),
        ("हिन्दी", "हिन्दी"),
        ("3.14", "3 14"),
        ("_ - '", ""),
    ],
)
def test_text_is_normalised(text, normal):
    assert normalise(text) == normal


def test_normalising_again_changes_nothing():
    rng = random.Random(0)
    # Code points that are letters, marks, signs and unassigned, with many apostrophes and spaces between them.
    characters = [chr(rng.randrange(0x3100)) for _ in range(5_000)] + ["'", " ", "’"] * 1_000  # noqa: RUF001
    for _ in range(2_000):
        normal = normalise("".join(rng.choices(characters, k=12)))
        assert normalise(normal) == normal
        assert all(c in " '" or unicodedata.category(c)[0] in "LMN" for c in normal)
        assert normal == " ".join(normal.split())


@pytest.mark.parametrize("units", ["characters", "words"])
def test_decoding_inverts_encoding(units):
    transcripts = ["The cat, the hat.", "It's a CAT!", "a"]
    alphabet = Alphabet.from_transcripts(transcripts, units)
    for text in transcripts:
        ids = alphabet.encode(text)
        assert ids.dtype == np.int64 and ids.ndim == 1
        assert ids.min() > BLANK and ids.max() < len(alphabet)
        assert alphabet.decode(ids) == normalise(text)
        assert alphabet.decode(np.pad(ids, (0, 3))) == normalise(text)


def test_symbols_do_not_depend_on_the_order_of_transcripts():
    assert Alphabet.from_transcripts(["b a", "c"], "characters").symbols == (" ", "a", "b", "c")
    assert Alphabet.from_transcripts(["c", "b a"], "characters").symbols == (" ", "a", "b", "c")
    assert Alphabet.from_transcripts(["Two one", "two"], "words").symbols == ("one", "two")


def test_an_alphabet_is_read_from_a_file(tmp_path):
    file = tmp_path / "alphabet.txt"
    file.write_text("<space>\nA\nB\n'\n")
    alphabet = Alphabet.from_file(file, "characters")
    assert alphabet.symbols == (" ", "a", "b", "'") and len(alphabet) == 5
    assert alphabet.encode("A b'a").tolist() == [2, 1, 3, 4, 2]
    assert alphabet.decode([2, 1, 3]) == "a b"
    file.write_text(" \nab\n")
    assert Alphabet.from_file(file, "words").encode("ab ab").tolist() == [2, 2]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a\n\nb\n", "line 2: is empty"),
        (b"a\nbc\n", "line 2: 'bc' is more than one character"),
        (b"a\nb\nA\n", "line 3: 'a' is already on line 1"),
        (b"", "is empty"),
        (b"\xff", "is not text in UTF-8"),
    ],
)
def test_a_bad_alphabet_file_is_named(tmp_path, content, says):
    file = tmp_path / "alphabet.txt"
    file.write_bytes(content)
    with pytest.raises(UserError, match=says) as refused:
        Alphabet.from_file(file, "characters")
    assert f"--alphabet {file}" in str(refused.value)


def test_a_missing_alphabet_file_is_named(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        Alphabet.from_file(tmp_path / "none.txt", "characters")


@pytest.mark.parametrize(("units", "missing"), [("characters", "'d'"), ("words", "'bad'")])
def test_a_symbol_outside_the_alphabet_is_named(units, missing):
    alphabet = Alphabet.from_transcripts(["a b ab"], units)
    with pytest.raises(UserError, match=f"{missing} in the transcript 'a bad b'"):
        alphabet.encode("a bad b")


@pytest.mark.parametrize(("symbols", "frames"), [([], 0), ([3], 1), ([1, 2], 2), ([1, 1], 3), ([1, 1, 1, 2, 2], 8)])
def test_shortest_frames_count_blanks_between_equal_symbols(symbols, frames):
    assert shortest_frames(np.array(symbols, np.int64)) == frames
