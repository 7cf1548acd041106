import io
import json
import os
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data.speech.audio_files import resample, to_int16
from data.speech.corpus import Corpus
from data.speech.reader import load_corpus, read_recordings
from data.speech.splits import hold_out
from data.table_files import Reading
from tests.data.speech.conftest import riff, wav
from trainer.common.errors import UserError

# --- containers of the same files ---------------------------------------------------------------------------------


def as_folder(path, files):
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def as_zip(path, files):
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path.with_suffix(".zip")


def as_tar(path, files, suffix=".tar", mode="w"):
    path = path.with_suffix(suffix)
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            content = content if isinstance(content, bytes) else content.encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def as_tar_gz(path, files):
    return as_tar(path, files, ".tar.gz", "w:gz")


def as_tgz_of_the_current_folder(path, files):
    return as_tar(path, {f"./{name}": content for name, content in files.items()}, ".tgz", "w:gz")


def as_archive_in_a_folder(path, files):
    folder = as_folder(path, {"README.md": "about"})
    as_tar_gz(folder / "recordings", files)
    return folder


FORMS = [as_folder, as_zip, as_tar, as_tar_gz, as_tgz_of_the_current_folder, as_archive_in_a_folder]


@pytest.fixture
def load(tmp_path):
    """Returns a function that loads files from a folder or another container."""

    def _load(files, form=as_folder, **options):
        return load_corpus(form(tmp_path / "corpus", files), tmp_path / "cache", **options)

    return _load


def facts(corpus: Corpus) -> dict[str, tuple[str, str, str]]:
    return {name: (corpus.transcripts[i], corpus.speakers[i], corpus.splits[i]) for i, name in enumerate(corpus.names)}


# --- layouts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_every_format_holds_the_same_data(load, noise, form):
    samples = {f"x/{digit}_eve_{index}.wav": noise(50 + index) for digit in range(3) for index in (0, 4, 5, 49)}
    corpus = load({name: wav(x) for name, x in samples.items()} | {"x/._hidden.wav": "", "x/README": "-"}, form)
    assert facts(corpus) == {
        name: (name[2], "eve", "test" if "_0." in name or "_4." in name else "") for name in samples
    }
    for i, name in enumerate(corpus.names):
        assert np.array_equal(corpus.utterance(i), samples[name])
    assert corpus.sample_rate == 8000 and not corpus.skipped and len(corpus) == 12


def test_words_in_file_names_are_split(load, noise):
    corpus = load({f"{name}.wav": wav(noise()) for name in ("1_0_1", "0_0_0", "yes_please")})
    assert facts(corpus) == {
        "0_0_0.wav": ("0 0 0", "", ""),
        "1_0_1.wav": ("1 0 1", "", ""),
        "yes_please.wav": ("yes please", "", ""),
    }


def test_librispeech_is_read(load, noise):
    trans = "84-1-0000 HE WAS\n84-1-0001 A MAN\n\n84-1-0002 WITHOUT SOUND\n"
    corpus = load({
        "LibriSpeech/dev-clean/84/1/84-1.trans.txt": trans,
        "LibriSpeech/dev-clean/84/1/84-1-0000.wav": wav(noise()),
        "LibriSpeech/dev-clean/84/1/84-1-0001.wav": wav(noise()),
        "LibriSpeech/dev-clean/84/1/84-1-0003.wav": wav(noise()),
        "LibriSpeech/train-other-500/7/2/7-2.trans.txt": "7-2-0000 IT'S\r\n",
        "LibriSpeech/train-other-500/7/2/7-2-0000.wav": wav(noise()),
        "LibriSpeech/test-other/8/2/8-2.trans.txt": "8-2-0000 SO",
        "LibriSpeech/test-other/8/2/8-2-0000.wav": wav(noise()),
    })  # fmt: skip
    assert {Path(name).stem: fact for name, fact in facts(corpus).items()} == {
        "84-1-0000": ("HE WAS", "84", "val"),
        "84-1-0001": ("A MAN", "84", "val"),
        "7-2-0000": ("IT'S", "7", "train"),
        "8-2-0000": ("SO", "8", "test"),
    }
    assert corpus.skipped == {
        "cannot be read: No such file or directory, such as LibriSpeech/dev-clean/84/1/84-1-0002.flac": 1,
        "has no transcript, such as LibriSpeech/dev-clean/84/1/84-1-0003.wav": 1,
    }


def common_voice(noise, *lines):
    header = "client_id\tpath\tsentence_id\tsentence\tage"
    return {
        "cv/en/train.tsv": "\n".join([header, *lines, "e5\ta.wav\t1\tHe said \"so\".\t\n"]),
        "cv/en/test.tsv": f"{header}\ne6\tb.wav\t2\tNo!\tten\n",
        "cv/en/validated.tsv": "whatever",
        **{f"cv/en/clips/{name}.wav": wav(noise()) for name in "abc"},
    }  # fmt: skip


def test_common_voice_is_read(load, noise):
    corpus = load(common_voice(noise))
    assert facts(corpus) == {
        "cv/en/clips/a.wav": ('He said "so".', "e5", "train"),
        "cv/en/clips/b.wav": ("No!", "e6", "test"),
    }
    assert not corpus.skipped  # c.wav is in no split


def manifest(*entries):
    return "\n".join(json.dumps(entry) for entry in entries) + "\n"


def entry(path, text="a b", **more):
    return {"audio_path": path, "text": text, **more}


@pytest.mark.parametrize("form", FORMS)
def test_manifests_are_read(load, noise, form):
    corpus = load(
        {
            "train_manifest.json": manifest(entry("wav/1.wav", duration=0.01), entry("wav/2.wav", speaker=7)),
            "dev.jsonl": manifest(entry("wav/3.wav", " c\td ")),
            "test.jsonl": manifest(entry("wav/../wav/4.wav")),
            "notes.json": "{}",
            **{f"wav/{i}.wav": wav(noise()) for i in range(6)},
        },
        form,
    )
    assert facts(corpus) == {
        "wav/1.wav": ("a b", "", "train"),
        "wav/2.wav": ("a b", "7", "train"),
        "wav/3.wav": ("c d", "", "val"),
        "wav/4.wav": ("a b", "", "test"),
    }


def test_a_single_manifest_may_name_sound_anywhere(tmp_path, noise):
    elsewhere = as_folder(tmp_path / "elsewhere", {"1.wav": wav(noise()), "2.wav": wav(noise())})
    lists = as_folder(
        tmp_path / "lists",
        {"train.jsonl": manifest(entry(f"{elsewhere}/1.wav"), entry("../elsewhere/2.wav")), "other.jsonl": "no JSON"},
    )
    corpus = load_corpus(lists / "train.jsonl", tmp_path / "cache")
    assert len(corpus) == 2 and set(corpus.splits) == {""}
    # Changed sound outside the folder makes the corpus be read again.
    (elsewhere / "1.wav").write_bytes(wav(noise(99)))
    assert len(load_corpus(lists / "train.jsonl", tmp_path / "cache").utterance(0)) == 99


def test_text_files_are_read(load, noise):
    corpus = load({
        "train/eve/1.wav": wav(noise()), "train/eve/1.txt": "One,\n two.\n",
        "train/bob/1.wav": wav(noise()), "train/bob/1.txt": "One",
        "validation/bob/2.wav": wav(noise()), "validation/bob/2.txt": "Two",
        "valerie/3.wav": wav(noise()), "valerie/3.txt": "Three",
        "valerie/4.wav": wav(noise()), "notes.txt": "nothing",
    })  # fmt: skip
    assert facts(corpus) == {
        "train/eve/1.wav": ("One, two.", "eve", "train"),
        "train/bob/1.wav": ("One", "bob", "train"),
        "validation/bob/2.wav": ("Two", "bob", "val"),
        "valerie/3.wav": ("Three", "valerie", ""),
    }
    assert corpus.skipped == {"has no transcript, such as valerie/4.wav": 1}


def test_text_files_of_one_folder_have_no_speaker(load, noise):
    corpus = load({"wavs/a.wav": wav(noise()), "wavs/a.txt": "a", "wavs/B.WAV": wav(noise()), "wavs/B.TXT": "b"})
    assert facts(corpus) == {"wavs/a.wav": ("a", "", ""), "wavs/B.WAV": ("b", "", "")}


def test_file_names_need_not_be_utf_8(tmp_path, noise):
    (tmp_path / "corpus").mkdir()
    for name in (b"a_\xff", b"b_\xff"):
        Path(os.fsdecode(bytes(tmp_path / "corpus") + b"/" + name + b".wav")).write_bytes(wav(noise()))
        Path(os.fsdecode(bytes(tmp_path / "corpus") + b"/" + name + b".txt")).write_text("a")
    corpus = load_corpus(tmp_path / "corpus", tmp_path / "cache")
    assert corpus.names == (os.fsdecode(b"a_\xff.wav"), os.fsdecode(b"b_\xff.wav"))
    assert len(hold_out(corpus, split="utterance", val_share=0, test_share=0.5)["test"]) == 1


def test_linked_folders_are_read_without_following_cycles(tmp_path, noise):
    elsewhere = as_folder(tmp_path / "elsewhere", {"1_0.wav": wav(noise())})
    corpus = as_folder(tmp_path / "corpus", {"0_1.wav": wav(noise())})
    (corpus / "linked").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(corpus)
    (corpus / "itself").symlink_to(corpus)
    names = load_corpus(corpus, tmp_path / "cache").names
    assert names == ("0_1.wav", "linked/1_0.wav")


# --- rates -------------------------------------------------------------------------------------------------------


def test_most_frequent_rate_wins_and_others_are_resampled(load, noise):
    samples = [noise(400) for _ in range(3)]
    corpus = load({f"{i}_0.wav": wav(samples[i], (8_000, 16_000, 8_000)[i]) for i in range(3)})
    assert corpus.sample_rate == 8_000
    assert np.array_equal(corpus.utterance(0), samples[0]) and np.array_equal(corpus.utterance(2), samples[2])
    assert np.array_equal(corpus.utterance(1), to_int16(resample(samples[1] / np.float32(2**15), 16_000, 8_000)))


def test_the_highest_of_equally_frequent_rates_wins(load, noise):
    assert load({"0_0.wav": wav(noise(), 8_000), "1_0.wav": wav(noise(), 16_000)}).sample_rate == 16_000


def test_the_requested_rate_is_used(load, noise):
    samples = noise(400)
    corpus = load({"0_0.wav": wav(samples)}, sample_rate=16_000)
    assert corpus.sample_rate == 16_000
    assert np.array_equal(corpus.utterance(0), to_int16(resample(samples / np.float32(2**15), 8_000, 16_000)))


# --- unusable files ----------------------------------------------------------------------------------------------


def damaged(noise):
    return {
        "test.jsonl": manifest(*(entry(f"{i}.wav", duration=0.01) for i in range(6)), entry("6.wav", " ... ")),
        "train.jsonl": manifest(entry("7.wav"), entry("8.wav", duration=9)),
        "0.wav": wav(noise()),
        "1.wav": wav(noise())[:-1],
        "2.wav": wav(noise())[:-1],
        "3.wav": "no sound",
        "4.wav": wav(noise(0)),
        "6.wav": wav(noise()),
        "7.wav": wav(noise()),
        "8.wav": wav(noise()),
    }


@pytest.mark.parametrize("form", [as_folder, as_zip, as_tar_gz])
def test_unusable_utterances_are_counted(load, noise, form):
    corpus = load(damaged(noise), form)
    assert corpus.names == ("0.wav", "7.wav") and len(corpus.offsets) == 3
    missing = "cannot be read: No such file or directory" if form is as_folder else "is not in the archive"
    assert corpus.skipped == {
        "is truncated in the middle of its samples, such as 1.wav": 2,
        "is damaged: it does not start like a wav file, such as 3.wav": 1,
        "has no samples, such as 4.wav": 1,
        f"{missing}, such as 5.wav": 1,
        "has no transcript, such as 6.wav": 1,
        "does not have the duration given in the manifest, such as 8.wav": 1,
    }


def test_unusable_utterance_is_refused(load, noise):
    with pytest.raises(UserError, match=r"corpus, 1.wav: is truncated in the middle of its samples; .* --on-bad drop"):
        load(damaged(noise), reading=Reading(on_bad="refuse"))


def test_a_corpus_without_usable_utterances_is_refused(load):
    with pytest.raises(UserError, match=r"none of its 2 utterances can be used: is damaged.*, such as 0_0.wav .2."):
        load({"0_0.wav": "-", "1_0.wav": "-"})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("no JSON", "'no JSON' is not a JSON object with audio_path and text"),
        ('{"audio_path": "1.wav"}', "with audio_path and text"),
        ("[1]", "with audio_path and text"),
        ('{"audio_path": "1.wav", "text": 1}', "must be strings"),
        ('{"audio_path": "1.wav", "text": "a", "duration": "1 s"}', "a number of seconds"),
        ('{"audio_path": "1.wav", "text": "a", "duration": 1%s}' % ("0" * 400), "a number of seconds"),
        ('{"audio_path": "1.wav", "text": "a", "duration": NaN}', "a number of seconds"),
        ('{"audio_path": "1.wav\\u0000", "text": "a"}', "that UTF-8 cannot encode"),
        ('{"audio_path": "\\ud800.wav", "text": "a"}', "that UTF-8 cannot encode"),
        ('{"audio_path": "1.wav", "text": "\\udcff"}', "that UTF-8 cannot encode"),
        ('{"audio_path": "1.wav", "text": "a", "offset": 2.5}', "a part of a recording .offset 2.5."),
    ],
)
def test_bad_line_of_a_manifest_is_named(load, noise, line, says):
    with pytest.raises(UserError, match=f"corpus, train.jsonl, line 3: .*{says}"):
        load({"train.jsonl": manifest(entry("1.wav")) + "\n" + line, "1.wav": wav(noise())})


def test_bad_line_of_common_voice_is_named(load, noise):
    with pytest.raises(UserError, match=r"corpus, cv/en/train.tsv, line 2: has 2 columns, not 5; fix"):
        load(common_voice(noise, "e7\tc.wav"))
    with pytest.raises(UserError, match=r"train.tsv: has no column client_id; the columns are path, sentence"):
        load({"train.tsv": "path\tsentence\n"}, as_zip)


def test_a_recording_listed_twice_is_refused(load, noise):
    files = {"train.jsonl": manifest(entry("1.wav")), "test.jsonl": manifest(entry("./1.wav")), "1.wav": wav(noise())}
    with pytest.raises(UserError, match=r"corpus, 1.wav: occurs 2 times"):
        load(files)


def test_several_corpora_are_refused(load, noise):
    with pytest.raises(UserError, match="2 folders could be the data set; give one of de, en"):
        load({"de/train.jsonl": manifest(entry("1.wav")), "en/train.jsonl": manifest(entry("1.wav"))})


@pytest.mark.parametrize(
    "names",
    [
        ["p225_001", "p225_002", "p226_001"],
        ["anna_1", "anna_2", "ben_1", "ben_2"],
        ["1_12", "1_3", "12_1"],
        ["arctic_a0001", "arctic_a0002"],
        ["meeting_monday", "talk_jones"],
        ["a__b", "b__a"],
        ["one", "two"],
    ],
)
def test_file_names_without_words_are_not_transcripts(load, names):
    with pytest.raises(UserError, match=r"looks like|no recordings with transcripts"):
        load({f"{name}.wav": b"" for name in names})


@pytest.mark.parametrize(
    "beside", ["a.txt", "txt/a.TXT", "text", "data/wav.scp", "lab/a.lab", "a.Lab", "all.json", "names.tsv", "list.CSV"]
)
def test_file_names_beside_other_texts_are_not_transcripts(load, noise, beside):
    files = {"0_1.wav": wav(noise()), "1_0.wav": wav(noise())}
    with pytest.raises(UserError, match=r"looks like|no recordings with transcripts"):
        load(files | {beside: "1"})
    corpus = load(files | {"README.txt": "1", "docs/LICENSE.txt": "1"}, as_zip)
    assert corpus.found["transcripts"] == "file names, such as '0 1'"
    assert corpus.found["sample rate"] == "8000 Hz (2 files)"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["wav.scp", "text", "a_b.wav"], "Kaldi's files"),
        (["84/1/84_1_0_0.wav", "84/1/84_1_0_0.normalized.txt"], "LibriTTS"),
        (["audio/1/2/1_2_3.wav", "transcripts.txt"], "Multilingual LibriSpeech"),
        (["wav/arctic_a0001.wav", "etc/txt.done.data"], "CMU ARCTIC"),
        (["DR1/SA1.WAV", "DR1/SA1.PHN", "DR1/SA1.TXT"], "TIMIT"),
        (["dr1/sa1.wav", "dr1/sa1.wrd", "dr1/sa1.txt"], "TIMIT"),
        (["wavs/a.wav", "names.tsv"], r"a table next to the sound files \(names.tsv\)"),
        (
            ["a.wav", "data.jsonl"],
            r"a manifest \(data.jsonl\).* give this file with --data-dir .*/data.jsonl, or rename it",
        ),
    ],
)
def test_unsupported_formats_are_named(load, files, says):
    with pytest.raises(UserError, match=f"looks like {says}"):
        load(dict.fromkeys(files, b""))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"a.wav": b"", "b.wav": b""}, "files found: a.wav, b.wav"),
        ({"a_b_1.wav": b"", "names": "a_b_1\tHello"}, "files found: a_b_1.wav, names"),
        ({"README": ""}, "files found: README"),
    ],
)
def test_folder_without_transcripts_is_refused(load, files, says):
    with pytest.raises(UserError, match=f"no recordings with transcripts: .*{says}"):
        load(files)


@pytest.mark.parametrize("form", [as_zip, as_tar, as_tar_gz])
@pytest.mark.parametrize("name", ["../1_0.wav", "/1_0.wav", "a/../../1_0.wav"])
def test_a_name_that_leads_out_of_an_archive_is_refused(load, noise, form, name):
    with pytest.raises(UserError, match=f"contains the name '{name}', which points outside the archive"):
        load({name: wav(noise())}, form)


@pytest.mark.parametrize("sound", ["../1.wav", "/etc/passwd"])
def test_a_manifest_cannot_lead_out_of_an_archive(load, sound):
    with pytest.raises(UserError, match=f"train.jsonl, line 1: '{sound}' points outside the archive"):
        load({"train.jsonl": manifest(entry(sound)), "x": ""}, as_zip)


def test_damaged_utterances_of_an_archive_are_counted(tmp_path, noise):
    samples = [noise(2_000) for _ in range(3)]
    path = as_zip(tmp_path / "corpus", {f"{i}_0.wav": wav(x) for i, x in enumerate(samples)})
    content = path.read_bytes()
    for x in samples[1:]:  # contradicts the checksums
        content = content.replace(x.tobytes(), noise(2_000).tobytes())
    path.write_bytes(content)
    corpus = load_corpus(path, tmp_path / "cache")
    assert corpus.names == ("0_0.wav",)
    assert corpus.skipped == {"cannot be read: the archive is damaged, such as 1_0.wav": 2}


def test_links_in_archives_are_not_followed(tmp_path, noise):
    (tmp_path / "secret.wav").write_bytes(wav(noise()))
    path = as_tar(tmp_path / "corpus", {"0_0.wav": wav(noise())})
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("1_0.wav")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret.wav")
        archive.addfile(link)
    corpus = load_corpus(path, tmp_path / "cache")
    assert corpus.names == ("0_0.wav",) and not corpus.skipped


@pytest.mark.parametrize("form", [as_zip, as_tar, as_tar_gz])
def test_damaged_archive_is_refused(tmp_path, noise, form):
    path = form(tmp_path / "corpus", {"0_0.wav": wav(noise(5_000)), "1_0.wav": wav(noise(5_000))})
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    with pytest.raises(UserError, match=r"is damaged, or is not an archive|none of its"):
        load_corpus(path, tmp_path / "cache", reading=Reading(on_bad="drop"))


def test_implausible_paths_are_refused(tmp_path, noise):
    with pytest.raises(UserError, match="no such file or folder"):
        load_corpus(tmp_path / "none", tmp_path / "cache")
    as_folder(tmp_path / "x", {"a.wav": wav(noise()), "two/a.zip": "", "two/b.tar": ""})
    for name, text in {"t.csv": "file_name,text\n", "t.arff": "@relation t\n"}.items():
        (tmp_path / "x" / name).write_text(text)
    told = {"a.wav": "is not a folder, archive", "t.csv": "give the folder with the sound files", "t.arff": "is ARFF, "}
    for name, message in told.items():
        with pytest.raises(UserError, match=f"{name}: .*{message}"):
            load_corpus(tmp_path / "x" / name, tmp_path / "cache")
    with pytest.raises(UserError, match=r"contains 2 archives .a.zip, b.tar.; give the path"):
        load_corpus(tmp_path / "x/two", tmp_path / "cache")


# --- the cache ---------------------------------------------------------------------------------------------------


def test_corpus_is_decoded_once_until_it_changes(load, noise):
    decoded = []

    def progress(things, total):
        decoded.append(total)
        return things

    files = {"0_0.wav": wav(noise()), "1_0.wav": wav(noise())}
    first = load(files, progress=progress)
    again = load({}, progress=progress)
    assert decoded == [2]
    assert facts(again) == facts(first) and np.array_equal(again.audio, first.audio)
    assert not again.audio.flags.owndata and not again.audio.flags.writeable
    load({"2_0.wav": wav(noise())}, progress=progress)
    load({}, progress=progress, sample_rate=16_000)
    assert decoded == [2, 3, 3]


def test_only_the_corpus_remains_in_the_cache(load, noise, tmp_path):
    load({"0_0.wav": wav(noise(), 8_000), "1_0.wav": wav(noise(), 16_000)}, as_tar_gz)
    (entry,) = (path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock")
    assert {path.name for path in entry.iterdir()} == {"audio.npy", "offsets.npy", "facts.npy", "names.txt"}


def test_cache_that_cannot_be_written_to_is_named(tmp_path, noise):
    as_folder(tmp_path, {"corpus/0_0.wav": wav(noise()), "cache": "a file"})
    with pytest.raises(UserError, match=f"--cache-dir {tmp_path}/cache"):
        load_corpus(tmp_path / "corpus", tmp_path / "cache")


# --- new recordings ----------------------------------------------------------------------------------------------


def test_new_recordings_in_a_folder_are_read(tmp_path, noise):
    samples = [noise(100), noise(60)]
    as_folder(tmp_path, {"b.wav": wav(samples[0]), "a/c.WAV": wav(samples[1], 16_000), "x.txt": "-"})
    corpus = read_recordings(tmp_path, 8_000)
    assert corpus.names == ("a/c.WAV", "b.wav") and corpus.sample_rate == 8_000
    assert np.array_equal(corpus.utterance(1), samples[0]) and len(corpus.utterance(0)) == 30
    assert corpus.transcripts == corpus.speakers == ("", "")


def test_bad_new_recordings_are_named(tmp_path, noise):
    with pytest.raises(UserError, match=f"--predict {tmp_path}: contains no sound files"):
        read_recordings(tmp_path, 8_000)
    with pytest.raises(UserError, match=f"--predict {tmp_path}/none.wav: cannot be read: No such file"):
        read_recordings(tmp_path / "none.wav", 8_000)
    for content, says in ((b"-", "is damaged"), (wav(noise(0)), "has no samples")):
        (tmp_path / "a.wav").write_bytes(content)
        with pytest.raises(UserError, match=f"--predict {tmp_path}: none of its 1 recordings can be used: {says}"):
            read_recordings(tmp_path, 8_000)
        with pytest.raises(UserError, match=f"--predict {tmp_path}/a.wav: {says}"):
            read_recordings(tmp_path / "a.wav", 8_000)


def test_unreadable_recordings_of_a_folder_are_skipped_or_refused(tmp_path, noise):
    as_folder(tmp_path, {"a.wav": wav(noise())[:-1], "in/b.wav": wav(noise()), "c.wav": ""})
    corpus = read_recordings(tmp_path, 8_000)
    assert corpus.names == ("in/b.wav",)
    assert corpus.skipped == {
        "is truncated in the middle of its samples, such as a.wav": 1, "is an empty file, such as c.wav": 1
    }  # fmt: skip
    with pytest.raises(UserError, match=f"--predict {tmp_path}/a.wav: is truncated in the middle .* --on-bad drop"):
        read_recordings(tmp_path, 8_000, "refuse")


def test_sound_beyond_full_scale_is_scaled_down_and_reported(load, tmp_path, noise):
    samples = np.array([0.1, -2.0, 1.5, 0.4], "<f4")
    loud = riff(3, 32, 1, samples.tobytes())
    corpus = load({"1_0.wav": loud, "0_1.wav": wav(noise())})
    assert corpus.utterance(1).tolist() == to_int16(samples / 2).tolist()
    assert corpus.found["beyond full scale"] == "1 file, scaled down, such as 1_0.wav"
    again = read_recordings(tmp_path / "corpus", 8_000)
    assert again.utterance(1).tolist() == corpus.utterance(1).tolist() and again.found["beyond full scale"]


# --- published data ----------------------------------------------------------------------------------------------


def real_data(name):
    folder = os.environ.get("LOCKSTEP_DATA")
    if folder is None or not (path := Path(folder) / name).exists():
        pytest.skip(f"set LOCKSTEP_DATA to a folder with {name}")
    return path


def test_free_spoken_digits_match_their_published_counts(tmp_path):
    corpus = load_corpus(real_data("fsdd/recordings.tar.gz"), tmp_path)
    assert len(corpus) == 3000 and corpus.sample_rate == 8000 and not corpus.skipped
    assert Counter(corpus.transcripts) == dict.fromkeys("0123456789", 300)
    speakers = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")
    assert Counter(corpus.speakers) == dict.fromkeys(speakers, 500)
    assert Counter(corpus.splits) == {"": 2700, "test": 300}
    durations = np.diff(corpus.offsets) / corpus.sample_rate
    assert [round(x, 3) for x in (durations.sum(), durations.min(), durations.max())] == [1312.303, 0.144, 2.283]
    i = corpus.names.index("recordings/7_theo_12.wav")
    assert (corpus.transcripts[i], corpus.speakers[i], corpus.splits[i]) == ("7", "theo", "")


def test_the_yes_no_corpus_matches_its_published_counts(tmp_path):
    corpus = load_corpus(real_data("yesno"), tmp_path)
    assert len(corpus) == 60 and not corpus.skipped
    assert round(len(corpus.audio) / corpus.sample_rate, 1) == 367.7
    assert Counter(" ".join(corpus.transcripts).split()) == {"1": 251, "0": 229}
    parts = hold_out(corpus, split="utterance", val_share=0.1, test_share=0.2)
    assert [len(part) for part in parts.values()] == [42, 6, 12]
