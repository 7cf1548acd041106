"""Tests speech recognition on the command line: on any number of devices, after a kill anywhere, and in use."""

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data.speech.text import Alphabet
from tests.conftest import assert_same_bits, cut_back, launcher, load, read_metrics, results_of
from tests.helpers.replicas import ReplicasOnCpu, trained
from tests.helpers.small_speech import (
    DIGITS,
    RATE,
    SMALL,
    SPEAKERS,
    names_of,
    tone,
    write_digits,
    write_sentences,
    write_wav,
)
from trainer.loading.order import SampleKeys
from trainer.parallel.strategy import SingleDevice

RUN = ["--task", "speech", "--dtype", "float64", "--num-threads", 1, "--epochs", 2, "--lr", 0.01, *SMALL]
EXACT = ["--dropout", 0, "--global-batch-size", 11]
PLAIN = ["--lr", 0.03, "--batch-size", 4, "--dropout", 0, "--augmentation", 0]  # learns within a second
STRINGS = ["--strings", "1-3", "--num-strings", 40, "--growing-epochs", 2]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("speech") / "digits")


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    return write_sentences(tmp_path_factory.mktemp("speech") / "sentences")


def weights(directory):
    return load(directory / "final.pth")["model"]


ERROR_RATES = ("test/wer", "test/cer", "test/string_error_rate")


def test_recordings_that_change_order_after_the_checkpoint_are_reported(run_here, tmp_path):
    """Swapping two recordings moves one from the training data to the test data."""
    data, said = write_digits(tmp_path / "digits"), "The split into training and held-out data differs from the"
    write_wav(data / "0_anna_7.wav", tone(0, "anna", 7)[:-400])
    argv = [*RUN, "--data-dir", data, "--epochs", 1, "--save-dir", tmp_path / "run"]
    assert said not in run_here(*argv)[0]
    assert said not in run_here(*argv, "--epochs", 2)[0]
    (data / "0_anna_7.wav").rename(data / "aside")
    (data / "0_anna_3.wav").rename(data / "0_anna_7.wav")
    (data / "aside").rename(data / "0_anna_3.wav")
    assert said in run_here(*argv, "--epochs", 3)[0]


def assert_close(one, other):
    """Asserts nearly equal weights and losses, and equal error rates, which are ratios of whole numbers."""
    torch.testing.assert_close(weights(other), weights(one), rtol=1e-9, atol=1e-11)
    assert results_of(other)["metrics"] == pytest.approx(results_of(one)["metrics"], rel=1e-9)
    assert [results_of(other)["metrics"][name] for name in ERROR_RATES] == [
        results_of(one)["metrics"][name] for name in ERROR_RATES
    ]
    assert [results_of(other)[name] for name in ("errors", "worst")] == [
        results_of(one)[name] for name in ("errors", "worst")
    ]


# --- any number of devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--batch-by", "seconds", "--streaming"]], ids=["utterances", "seconds"])
def test_any_micro_batches_give_the_same_weights(more, digits, run_here, tmp_path):
    argv = [*RUN, *EXACT, "--data-dir", digits, *more]
    run_here(*argv, "--batch-size", 20, "--save-dir", tmp_path / "whole")
    run_here(*argv, "--batch-size", 2, "--eval-batch-size", 5, "--save-dir", tmp_path / "parts")
    assert_close(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [2, 3])
def test_any_number_of_processes_gives_the_same_weights(nproc, digits, run_here, command, tmp_path):
    """The last step and validation have two samples each, so one of three processes has none."""
    argv = [*RUN, *EXACT, "--data-dir", digits, "--val-share", 0.05, "--keep-checkpoints", 0, "--save-every-steps", 3]
    out, _ = run_here(*argv, "--batch-size", 20, "--save-dir", tmp_path / "one")
    assert "Data: 46 train, 2 val, 24 test samples" in out
    several = [*launcher(nproc), *argv, "--device", "cpu", "--batch-size", 2, "--eval-batch-size", 3]
    command(*several, "--save-dir", tmp_path / "several")
    assert results_of(tmp_path / "several")["world_size"] == nproc
    assert_close(tmp_path / "one", tmp_path / "several")


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [2, 3])
def test_another_number_of_processes_can_resume(nproc, digits, run_here, command, tmp_path):
    argv = [*RUN, *EXACT, "--data-dir", digits, *STRINGS, "--save-every-steps", 3, "--keep-checkpoints", 0]
    run_here(*argv, "--batch-size", 20, "--save-dir", tmp_path / "one")
    entries = json.loads((tmp_path / "one" / "manifest.json").read_text())["checkpoints"]
    middle = next(i for i, entry in enumerate(entries) if entry["epoch"] == 1 and entry["samples"] > 0)
    cut_back(tmp_path / "one", entries[: middle + 1], tmp_path / "several")
    command(*launcher(nproc), *argv, "--device", "cpu", "--batch-size", 2, "--save-dir", tmp_path / "several")
    assert_close(tmp_path / "one", tmp_path / "several")


@pytest.mark.parametrize("more", [STRINGS, ["--units", "words"]], ids=["strings", "words"])
def test_replicas_equal_one_device(more, digits, cache_dir, tmp_path):
    argv = [*RUN, *EXACT, "--data-dir", digits, *more, "--cache-dir", cache_dir / "lockstep", "--eval-every", 2]
    one, test_one = trained(SingleDevice(torch.device("cpu")), tmp_path / "one", *map(str, argv))
    many, test_many = trained(ReplicasOnCpu(2), tmp_path / "many", *map(str, argv), "--batch-size", "3")
    torch.testing.assert_close(many["model"], one["model"], rtol=1e-9, atol=1e-11)
    assert [test_many[name] for name in ERROR_RATES] == [test_one[name] for name in ERROR_RATES]


# --- resume ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more", [STRINGS, ["--batch-by", "seconds", "--streaming"]], ids=["growing strings", "running statistics"]
)
def test_resumes_bit_identically(more, digits, run_here, tmp_path):
    """The run has dropout and augmentation, and resumes in the middle of each epoch."""
    argv = [*RUN, "--data-dir", digits, *more, "--batch-size", 8, "--save-every-steps", 3, "--keep-checkpoints", 0]
    argv += ["--eval-every", 2]
    whole = tmp_path / "whole"
    run_here(*argv, "--save-dir", whole)
    entries = json.loads((whole / "manifest.json").read_text())["checkpoints"]
    for epoch in (0, 1):
        i = next(i for i, entry in enumerate(entries) if entry["epoch"] == epoch and entry["samples"] > 0)
        again = tmp_path / f"from-{i}"
        cut_back(whole, entries[: i + 1], again)
        run_here(*argv, "--save-dir", again)
        assert_same_bits(load(whole / "final.pth"), load(again / "final.pth"))
        assert read_metrics(again, "result") == read_metrics(whole, "result")


# --- memory ------------------------------------------------------------------------------------------------------


def test_the_longest_strings_of_an_epoch_are_tried(digits, make_task):
    task = make_task("--task", "speech", "--data-dir", digits, *STRINGS)
    dataset = task.splits()["train"]
    for epoch in (0, 5):
        lengths = dataset.lengths(epoch)
        assert sorted(lengths[task.largest_samples("train", epoch, 4)]) == sorted(lengths)[-4:]
    assert dataset.lengths(5).max() > 2 * dataset.lengths(0).max()


# --- reported errors ---------------------------------------------------------------------------------------------


def edits(reference, hypothesis):
    """Returns the edit distance by the table of Wagner and Fischer."""
    row = list(range(len(hypothesis) + 1))
    for i, one in enumerate(reference, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(hypothesis, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (one != other))
    return row[-1]


@pytest.fixture(scope="module")
def spoken(command, tmp_path_factory):
    """Returns a run whose training data have been deleted."""
    folder = tmp_path_factory.mktemp("spoken")
    argv = [*RUN, *PLAIN, "--epochs", 12, "--eval-every", 12, "--data-dir", write_sentences(folder / "data")]
    command("main.py", *argv, "--save-dir", folder / "run")
    shutil.rmtree(folder / "data")
    return folder / "run"


@pytest.fixture
def recognised(run_here, spoken):
    """Returns a function that returns the rows of the table of transcripts."""

    def run(path, *more):
        out, _ = run_here("--task", "speech", "--predict", path, "--save-dir", spoken, "--dtype", "float64", *more)
        return list(csv.DictReader(out.splitlines()))

    return run


def test_error_rates_match_the_written_transcripts(sentences, run_here, make_task, tmp_path):
    argv = [*RUN, *PLAIN, "--epochs", 9, "--eval-every", 9, "--data-dir", sentences, "--test-share", 0.4]
    run_here(*argv, "--save-dir", tmp_path / "run")
    out, _ = run_here("--predict", sentences, "--save-dir", tmp_path / "run", "--dtype", "float64")
    written = {row["file"]: row["text"] for row in csv.DictReader(out.splitlines())}
    test = make_task("--task", "speech", "--data-dir", sentences, "--test-share", 0.4).splits()["test"]
    index = np.arange(len(test))
    said, heard = test.transcripts(index), [" ".join(written[name].split()) for name in names_of(test, index)]
    words = [edits(one.split(), other.split()) for one, other in zip(said, heard, strict=True)]
    characters = [edits(one, other) for one, other in zip(said, heard, strict=True)]
    found = results_of(tmp_path / "run")
    assert [found["metrics"][name] for name in ERROR_RATES] == [
        sum(words) / sum(len(text.split()) for text in said),
        sum(characters) / sum(map(len, said)),
        np.count_nonzero(characters) / len(said),
    ]
    assert len({len(text.split()) for text in heard}) > 1 and len(set(heard)) > 2
    counted = {unit: sum(found["errors"][unit].values()) for unit in found["errors"]}
    assert counted == {"words": sum(words), "characters": sum(characters)}
    assert len(found["worst"]) == min(10, np.count_nonzero(characters))
    names = names_of(test, index)
    for utterance in found["worst"]:
        (name,) = utterance["recordings"]
        i = names.index(name)
        assert (utterance["said"], utterance["heard"]) == (said[i], heard[i])
    assert found["left_out"] == {}


def test_pictures_show_what_was_heard(sentences, run_here, tmp_path):
    run_here(*RUN, "--data-dir", sentences, "--save-dir", tmp_path)
    shown = EventAccumulator(str(tmp_path / "logs"), size_guidance={"images": 0}).Reload()
    validated = [event.step for event in shown.Scalars("val/wer")]
    assert len(validated) == 2
    assert [event.step for event in shown.Images("val/utterances")] == validated
    assert [event.step for event in shown.Images("test/utterances")] == validated[-1:]


# --- transcribing ------------------------------------------------------------------------------------------------


def assert_sensible(row, seconds):
    assert float(row["seconds"]) == pytest.approx(seconds, abs=0.006)
    words = [word.rsplit(" ", 2) for word in row["words"].split("; ") if row["words"]]
    assert [text for text, _, _ in words] == row["text"].split()
    times = [float(time) for _, span, _ in words for time in span.split("-")]
    assert times == sorted(times) and all(0 <= time <= seconds + 0.005 for time in times)
    confidences = [float(confidence) for *_, confidence in words]
    assert all(0 <= confidence <= 1 for confidence in confidences)
    if words:
        assert float(row["confidence"]) == pytest.approx(min(confidences), abs=0.005)
    else:
        assert row["confidence"] == ""


@pytest.mark.parametrize("beam", [1, 4])
def test_new_recordings_are_transcribed_with_the_times_of_words(beam, recognised, tmp_path):
    """The training data are gone, and the recordings have any rate and length."""
    folder = tmp_path / "new"
    (folder / "deep").mkdir(parents=True)
    seconds = {}
    for i, length in enumerate([1, 150, 800, 4000, 9000]):
        samples = np.resize(np.concatenate([tone(digit, "ben", 9) for digit in range(DIGITS)]), length)
        write_wav(folder / "deep" / f"{i}.wav", samples)
        seconds[f"deep/{i}.wav"] = length / RATE
    write_wav(folder / "other rate.wav", tone(1, "cleo", 9), rate=2 * RATE)
    seconds["other rate.wav"] = len(tone(1, "cleo", 9)) / RATE / 2
    rows = recognised(folder, "--beam", beam)
    assert [row["file"] for row in rows] == sorted(seconds)
    for row in rows:
        assert_sensible(row, seconds[row["file"]])
    assert any(row["words"].count(";") >= 2 for row in rows)
    assert recognised(folder, "--beam", beam, "--eval-batch-size", 1) == rows
    (alone,) = recognised(folder / "deep" / "4.wav", "--beam", beam)
    assert alone == rows[4] | {"file": "4.wav"}


def test_a_language_model_changes_transcripts(recognised, tmp_path):
    """The model has hardly ever seen a letter other than o."""
    model = tmp_path / "o.arpa"
    lines = ["\\data\\", "ngram 1=8", "", "\\1-grams:", "-99 <s>", "-1 </s>", "-0.1 o"]
    lines += [*(f"-9 {letter}" for letter in ("e", "n", "t", "w", "<space>")), "", "\\end\\"]
    model.write_text("\n".join(lines) + "\n")
    recording = write_wav(tmp_path / "a.wav", np.concatenate([tone(0, index=9), tone(1, index=9)]))
    (plain,) = recognised(recording, "--beam", 16)
    (fused,) = recognised(recording, "--beam", 16, "--language-model", model, "--lm-weight", 5)
    assert set(plain["text"]) - {"o"}
    assert set(fused["text"]) == {"o"}


def test_unreadable_recordings_of_a_folder_are_skipped_or_refused(run_here, spoken, refused, tmp_path):
    write_wav(tmp_path / "a.wav", tone(0))
    (tmp_path / "b.wav").write_bytes(b"RIFF of nothing")
    argv = ["--task", "speech", "--predict", tmp_path, "--save-dir", spoken]
    out, err = run_here(*argv)
    assert [row["file"] for row in csv.DictReader(out.splitlines())] == ["a.wav"]
    of_run, left_out = err.splitlines()
    assert of_run.startswith("From the run in ") and left_out.startswith("Left out: 1 re") and "such as b.wav" in err
    refused([f"--predict {tmp_path}/b.wav: "], *argv, "--on-bad", "refuse")


def test_a_run_first_prints_a_table_of_the_data(digits, make_task):
    rows = {" ".join(line.split()) for line in make_task("--task", "speech", "--data-dir", digits).remarks()}
    for row in (
        "recordings found", "transcripts file names, such as '0'", "sample rate 8000 Hz (72 files)",
        "speakers 3", "alphabet 4 characters: 0 1 2 3",
    ):  # fmt: skip
        assert row in rows
    assert make_task("--task", "speech").remarks() == []


def test_file_names_need_not_be_utf_8(make_task, recognised, tmp_path):
    for i in range(4):
        name = Path(os.fsdecode(bytes(tmp_path) + b"/%d\xff" % i))
        write_wav(name.with_suffix(".wav"), tone(i))
        name.with_suffix(".txt").write_text("one")
    assert make_task("--task", "speech", "--data-dir", tmp_path).data_digest()
    assert [row["file"] for row in recognised(tmp_path)] == [rf"{i}\xff.wav" for i in range(4)]


def test_text_has_single_spaces(monkeypatch, tmp_path, recognised):
    monkeypatch.setattr(Alphabet, "decode", lambda self, ids: "  a   b ")
    (row,) = recognised(write_wav(tmp_path / "a.wav", tone(0)))
    assert row["text"] == "a b"


def test_a_folder_without_sound_is_refused(spoken, refused, tmp_path):
    (tmp_path / "a.txt").write_text("one")
    refused([f"--predict {tmp_path}: contains no sound"], "--predict", tmp_path, "--save-dir", spoken)


def test_another_width_than_that_of_the_run_is_refused(spoken, refused, tmp_path):
    path = write_wav(tmp_path / "a.wav", tone(0))
    refused(["--width 9: "], "--task", "speech", "--predict", path, "--width", 9, "--save-dir", spoken)


def test_audio_in_chunks_gives_the_same_transcript_as_the_whole(digits, make_task):
    task = make_task("--task", "speech", *SMALL, "--streaming", "--data-dir", digits, "--subsampling", 4)
    torch.manual_seed(0)
    objective = task.build_objective().double().eval()
    task.initialise(objective)
    batch = task.splits()["test"].__getitems__(SampleKeys(np.arange(3), epoch=0))
    num_samples = int(batch["num_samples"].min())
    audio = torch.from_numpy(batch["audio"]).double()[:, :num_samples]
    with torch.no_grad():
        whole = objective.model(audio, torch.full((3,), num_samples)).log_probs
        for size in (1, 7, 80, 333, num_samples):
            state, parts = None, []
            for chunk in audio.split(size, dim=1):
                part, state = objective.model.stream(chunk, state)
                parts.append(part)
            torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-10)


# --- training data -----------------------------------------------------------------------------------------------


def speakers_of(names):
    return {name.split("_")[1] for name in names}


def test_folds_hold_each_speaker_out_once(digits, make_task):
    task = make_task("--task", "speech", "--data-dir", digits)
    held_out = []
    for flags in task.fold_flags(len(SPEAKERS)):
        parts = {
            name: speakers_of(names_of(dataset, np.arange(len(dataset))))
            for name, dataset in make_task("--task", "speech", "--data-dir", digits, *flags).splits().items()
        }
        assert parts["test"] == parts["val"] and not parts["train"] & parts["val"]
        assert parts["train"] | parts["val"] == set(SPEAKERS)
        held_out += parts["val"]
    assert sorted(held_out) == sorted(SPEAKERS)


@pytest.mark.slow
def test_folds_are_trained(digits, command, tmp_path):
    command("main.py", *RUN, "--epochs", 1, "--data-dir", digits, "--folds", 3, "--save-dir", tmp_path)
    assert len(list(tmp_path.rglob("results.json"))) == 3


def test_each_recording_is_in_only_one_split(digits, make_task):
    task = make_task("--task", "speech", "--data-dir", digits, *STRINGS)
    used = {"train": set(), "val": set(), "test": set()}
    for name, dataset in task.splits().items():
        for epoch in range(4 if name == "train" else 1):
            for string in names_of(dataset, np.arange(len(dataset)), epoch):
                used[name] |= set(string.split("+"))
                assert len(speakers_of(string.split("+"))) == 1
    assert all(used.values())
    assert not used["train"] & used["val"] and not (used["train"] | used["val"]) & used["test"]


def test_strings_grow_and_differ_between_epochs(digits, make_task):
    task = make_task("--task", "speech", "--data-dir", digits, *STRINGS)
    index = np.arange(40)
    said = [task.splits()["train"].transcripts(index, epoch) for epoch in range(5)]
    words = [[len(text.split()) for text in texts] for texts in said]
    assert [max(counts) for counts in words] == [1, 2, 3, 3, 3]
    assert len({tuple(texts) for texts in said}) == 5


def test_scored_strings_do_not_depend_on_the_seed(digits, make_task):
    one, other = (
        make_task("--task", "speech", "--data-dir", digits, *STRINGS, "--seed", seed).splits() for seed in (0, 1)
    )
    index = np.arange(40)
    for name in ("val", "test"):
        assert names_of(one[name], index) == names_of(other[name], index)
    assert names_of(one["train"], index) != names_of(other["train"], index)


TOO_LONG = "a man a plan a canal panama"


@pytest.fixture
def with_a_long_one(tmp_path):
    """Returns a corpus with one transcript that has more characters than its recording has frames."""
    folder = write_sentences(tmp_path / "sentences")
    for i in range(24):
        name = f"{i:02d}"
        split = "test" if i < 3 else "val" if i < 6 else "train"
        (folder / split).mkdir(exist_ok=True)
        for suffix in (".wav", ".txt"):
            shutil.move(folder / f"{name}{suffix}", folder / split / f"{name}{suffix}")
    (folder / "train" / "20.txt").write_text(TOO_LONG)
    return folder


def test_transcripts_too_long_for_their_sound_are_skipped(with_a_long_one, run_here, tmp_path):
    (with_a_long_one / "train" / "21.txt").write_text("grün", encoding="cp1252")
    out, _ = run_here(*RUN, "--data-dir", with_a_long_one, "--save-dir", tmp_path / "run")
    assert "Data: 17 train, 3 val, 3 test samples" in out
    assert f"\n--data-dir {with_a_long_one}, train/21.txt: is read in the encoding cp1252, with words such" in out
    assert "\nLeft out: 1 recording(s), each of which is too short for its transcript, such as train/20.wav, " in out
    ((reason, count),) = results_of(tmp_path / "run")["left_out"].items()
    assert count == 1 and reason.startswith("is too short for its transcript, such as train/20.wav, which has 1")


def test_transcripts_too_long_for_their_sound_are_refused(with_a_long_one, refused, cache_dir, tmp_path):
    refused(
        ["1 training utterances are too short for their transcripts (train/20.wav, which has 1"],
        *RUN, "--data-dir", with_a_long_one, "--on-bad", "refuse", "--save-dir", tmp_path / "run",
        "--cache-dir", cache_dir / "lockstep",
    )  # fmt: skip


def test_a_corpus_with_only_too_long_transcripts_is_refused(refused, cache_dir, tmp_path):
    folder = write_sentences(tmp_path / "sentences")
    for file in folder.glob("*.txt"):
        file.write_text(TOO_LONG)
    refused(
        ["--subsampling"],
        *RUN, "--data-dir", folder, "--save-dir", tmp_path / "run", "--cache-dir", cache_dir / "lockstep",
    )  # fmt: skip


# --- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ("--strings 3", "--strings 3: must be a range of whole numbers from 1, such as 3-7"),
        ("--strings 0-3", "--strings 0-3: must be a range"),
        ("--strings 4-3", "--strings 4-3: must be a range"),
        ("--model lmu --num-heads 3", "--num-heads 3: must evenly divide --hidden-size 512"),
        ("--subsampling 3", "--subsampling 3: must be 1, 2 or 4"),
        ("--subsampling 8", "--subsampling 8: must be 1, 2 or 4"),
        ("--model lmu --width 9", "--width 9: --model lmu does not use it; leave it out"),
        ("--model lmu --streaming", "error: --streaming: --model lmu does not use it; leave it out"),
        ("--streaming --masking-db 20", "--masking-db 20: needs the power of the whole utterance, which a stream"),
        ("--hidden-size 8", "--hidden-size 8: --model plmu does not use it; leave it out"),
        (
            "--val-speakers anna",
            "--val-speakers anna: --split utterance does not use it; leave it out, or choose speaker",
        ),
        ("--num-strings 9", "--num-strings 9: does nothing without --strings"),
        ("--growing-epochs 9", "--growing-epochs 9: does nothing without --strings"),
        ("--sample-rate 16000", "--sample-rate 16000: does nothing without --data-dir"),
        ("--beam 0", "--beam 0"),
        ("--dropout 1", "--dropout 1"),
        ("--val-share 1", "--val-share 1"),
        ("--model rnn", "--model rnn: must be one of plmu, lmu"),
    ],
)
def test_one_error_is_named(args, part, refused, tmp_path):
    refused([part], "--task", "speech", *args.split(), "--save-dir", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_errors_are_shown_together(refused, tmp_path):
    missing = tmp_path / "missing"
    flags = ("--data-dir", "--alphabet", "--language-model")
    refused(
        [f"{flag} {missing}: no such file or folder" for flag in flags],
        "--task", "speech", *(part for flag in flags for part in (flag, missing)), "--save-dir", tmp_path / "run",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--split", "speaker", "--val-speakers", "dora"], ["--val-speakers dora: no such speaker", "anna, ben, cleo"]),
        (["--split", "speaker", "--val-speakers", *SPEAKERS], ["--split speaker: ", "none are left for training"]),
        (["--test-share", 0.5], ["--test-share 0.5: must be left out, because the data define their own split"]),
        (["--folds", 4], ["--folds 4: must be from 2 to 3, the number of speakers"]),
        (["--num-mels", 200], ["--num-mels 200", "too many"]),
        (["--alphabet", "FILE"], ["--alphabet: '3' in the transcript '3' is not one of the 3 symbols"]),
        (["--beam", 2, "--language-model", "FILE"], ["--language-model ", "or not an ARPA file; give another"]),
        (["--data-dir", "EMPTY"], ["--data-dir ", "no recordings with transcripts"]),
    ],
    ids=lambda value: None if isinstance(value[0], str) and " " in value[0] else value[0],
)
def test_unusable_data_are_refused(args, parts, cli, digits, cache_dir, tmp_path):
    (tmp_path / "file").write_text("0\n1\n2\n")
    (tmp_path / "empty").mkdir()
    places = {"FILE": tmp_path / "file", "EMPTY": tmp_path / "empty"}
    argv = [*RUN, "--data-dir", digits, *(places.get(arg, arg) for arg in args)]
    status, _, lines = cli(*argv, "--cache-dir", cache_dir / "lockstep", "--save-dir", tmp_path / "run")
    assert (status, len(lines)) == (2, 1), lines
    assert lines[0].startswith("error: ") and all(part in lines[0] for part in parts), lines
    assert not (tmp_path / "run").exists()


def test_holding_out_unknown_speakers_is_refused(refused, sentences, cache_dir, tmp_path):
    refused(
        ["--split speaker: the speaker of 00.wav is unknown; use --split utterance"],
        *RUN, "--data-dir", sentences, "--split", "speaker", "--cache-dir", cache_dir, "--save-dir", tmp_path / "run",
    )  # fmt: skip


# --- learning ----------------------------------------------------------------------------------------------------


def test_a_short_run_learns(run_here, tmp_path):
    """Less than an epoch of the generated speech teaches much more than the frequency of letters."""
    model = ["--width", 32, "--num-blocks", 1, "--channels", 8, "--dropout", 0, "--augmentation", 0]
    argv = ["--task", "speech", *model, "--num-threads", 1, "--max-steps", 110, "--batch-size", 8, "--lr", 0.02]
    run_here(*argv, "--save-dir", tmp_path)
    first, (last,) = read_metrics(tmp_path, "step")[0], read_metrics(tmp_path, "evaluation")
    assert first["step"] == 50
    assert last["val/loss"] < 0.6 * first["train/loss"]
    assert last["val/cer"] < 0.55
