import itertools

import numpy as np
import pytest

from data.speech.corpus import Corpus
from data.speech.splits import hold_out, speaker_folds
from trainer.common.errors import UserError

PARTS = ("train", "val", "test")


def corpus_of(names, speakers=None, splits=None):
    num = len(names)
    return Corpus(
        audio=np.zeros(num, np.int16),
        offsets=np.arange(num + 1),
        sample_rate=8000,
        transcripts=("a",) * num,
        names=tuple(names),
        speakers=tuple(speakers or [""] * num),
        splits=tuple(splits or [""] * num),
        skipped={},
    )


def names_of(corpus, chosen):
    return {part: {corpus.names[i] for i in chosen[part]} for part in PARTS}


def by_utterance(corpus, val_share=0.1, test_share=0.2):
    return hold_out(corpus, split="utterance", val_share=val_share, test_share=test_share)


def by_speaker(corpus, val_share=0.0, test_share=0.0, **speakers):
    return hold_out(corpus, split="speaker", val_share=val_share, test_share=test_share, **speakers)


@pytest.mark.parametrize(("num", "num_val", "num_test"), [(60, 6, 12), (10, 1, 2), (4, 1, 1)])
def test_every_utterance_is_in_one_part(num, num_val, num_test):
    corpus = corpus_of([f"{i}.wav" for i in range(num)])
    chosen = by_utterance(corpus)
    assert [len(chosen[part]) for part in PARTS] == [num - num_val - num_test, num_val, num_test]
    assert sorted(itertools.chain(*chosen.values())) == list(range(num))
    assert all((np.diff(indices) > 0).all() and indices.dtype == np.int64 for indices in chosen.values())


def test_choice_depends_only_on_names():
    names = [f"{i}.wav" for i in range(50)]
    corpus, turned = corpus_of(names), corpus_of(names[::-1])
    assert names_of(corpus, by_utterance(corpus)) == names_of(turned, by_utterance(turned))
    inside = corpus_of([f"recordings/{name}" for name in names])
    chosen = by_utterance(corpus)
    assert all(np.array_equal(indices, chosen[part]) for part, indices in by_utterance(inside).items())


def test_splits_of_a_published_layout_are_kept():
    corpus = corpus_of([f"{i}.wav" for i in range(30)], splits=["test"] * 5 + ["train"] * 5 + [""] * 20)
    chosen = by_utterance(corpus)
    assert chosen["test"].tolist() == list(range(5))
    assert len(chosen["val"]) == 2 and chosen["val"].min() >= 5  # a tenth of the other 25, rounded to even
    whole = corpus_of([f"{i}.wav" for i in range(3)], splits=PARTS)
    assert [by_utterance(whole)[part].tolist() for part in PARTS] == [[0], [1], [2]]


def test_a_share_of_zero_holds_nothing_out():
    assert [len(part) for part in by_utterance(corpus_of(["a", "b"]), 0, 0).values()] == [2, 0, 0]


SPEAKERS = [f"s{i % 10}" for i in range(40)]


def test_a_speaker_is_in_one_part():
    corpus = corpus_of([f"{i}.wav" for i in range(40)], SPEAKERS, ["test"] * 20 + [""] * 20)
    chosen = by_speaker(corpus, 0.1, 0.2)
    speakers = {part: {SPEAKERS[i] for i in chosen[part]} for part in PARTS}
    assert [len(speakers[part]) for part in PARTS] == [7, 1, 2]
    assert sum(map(len, chosen.values())) == 40
    assert not any(a & b for a, b in itertools.combinations(speakers.values(), 2))


def test_named_speakers_are_held_out():
    corpus = corpus_of([f"{i}.wav" for i in range(40)], SPEAKERS)
    chosen = by_speaker(corpus, 0.1, 0.1, test_speakers=["s3"])
    assert chosen["test"].tolist() == [3, 13, 23, 33]
    val = {SPEAKERS[i] for i in chosen["val"]}
    assert len(val) == 1 and val != {"s3"}
    chosen = by_speaker(corpus, test_speakers=["s3"], val_speakers=["s4", "s0"])
    assert {SPEAKERS[i] for i in chosen["val"]} == {"s0", "s4"} and len(chosen["train"]) == 28


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"test_speakers": ["eve"]}, "--test-speakers eve: no such speaker; the speakers are s0, s1"),
        ({"test_speakers": ["s1"], "val_speakers": ["s1"]}, "--val-speakers s1: is also in --test-speakers"),
        ({"test_speakers": ["s1"], "val_speakers": ["s0"]}, "none are left for training"),
    ],
)
def test_impossible_choice_of_speakers_is_refused(options, says):
    with pytest.raises(UserError, match=says):
        by_speaker(corpus_of(["a", "b"], ["s0", "s1"]), **options)


def test_unknown_speakers_cannot_be_held_out():
    with pytest.raises(UserError, match="--split speaker: the speaker of b is unknown; use --split utterance"):
        by_speaker(corpus_of(["a", "b"], ["s0", ""]), 0.5)
    with pytest.raises(UserError, match="--folds 2: the speaker of b is unknown; leave the flag out"):
        speaker_folds(corpus_of(["a", "b"], ["s0", ""]), 2)


def test_no_training_data_is_refused():
    with pytest.raises(UserError, match="none are left for training"):
        by_utterance(corpus_of(["a", "b"]))
