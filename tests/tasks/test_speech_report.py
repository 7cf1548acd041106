"""Error rates of a whole set, and what is said of its worst utterances."""

import json

import pytest

from tasks.speech_report import error_counts, error_rates, worst_utterances

SAID = ["one two three", "four", "", "five six", "seven"]
HEARD = ["one too three", "four", "nine", "six", "seven eight nine"]


def test_rates_divide_all_edits_by_all_that_was_said():
    rates = error_rates(SAID, HEARD)
    num_words, num_characters = 3 + 1 + 0 + 2 + 1, 13 + 4 + 0 + 8 + 5
    assert rates == {
        "wer": pytest.approx((1 + 0 + 1 + 1 + 2) / num_words),
        "cer": pytest.approx((1 + 0 + 4 + 5 + 11) / num_characters),  # spaces count
        "string_error_rate": 4 / 5,
    }


def test_rates_do_not_depend_on_the_order_or_on_spaces():
    tidy = error_rates(SAID, HEARD)
    assert error_rates(SAID[::-1], HEARD[::-1]) == pytest.approx(tidy)
    assert error_rates(SAID, [f"  {text.replace(' ', '   ')} " for text in HEARD]) == tidy


def test_nothing_said_at_all():
    assert error_rates([], []) == {"wer": 0, "cer": 0, "string_error_rate": 0}
    assert error_rates(["", ""], ["", "a b"]) == {"wer": 2, "cer": 3, "string_error_rate": 0.5}


def test_counts_of_each_kind():
    counts = error_counts(SAID, HEARD)
    assert counts["words"] == {"substitutions": 1, "deletions": 1, "insertions": 3}
    assert counts["characters"] == {"substitutions": 1, "deletions": 5, "insertions": 15}


def test_the_worst_come_first_and_those_without_an_error_not_at_all():
    worst = worst_utterances(SAID, HEARD)
    assert [entry["index"] for entry in worst] == [4, 3, 2, 0]
    assert [(entry["word_edits"], entry["character_edits"]) for entry in worst] == [(2, 11), (1, 5), (1, 4), (1, 1)]
    assert worst_utterances(SAID, HEARD, count=2) == worst[:2]
    assert json.loads(json.dumps(worst)) == worst


def test_words_are_aligned_below_each_other():
    by_index = {entry["index"]: entry["aligned"] for entry in worst_utterances(SAID, HEARD)}
    assert by_index == {
        0: ["one two three", "one too three"],
        2: ["****", "nine"],
        3: ["five six", "**** six"],
        4: ["seven ***** ****", "seven eight nine"],
    }
