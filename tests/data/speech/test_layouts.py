"""Tests the layouts of published corpora: their transcripts, speakers and splits."""

import json

import numpy as np
import pytest

from data.speech.audio_files import decode
from data.speech.reader import load_corpus
from data.table_files import Reading
from tests.data.speech.conftest import wav
from tests.helpers.archives import tarred, zipped
from trainer.common.errors import UserError

METADATA = 'file_name,transcription,speaker_id\na.wav,"Good,\n\nmorning",7\nsub/b.wav,"night ""now""",8\n'
HUGGING_FACE = {
    "csv": {"metadata.csv": METADATA, "a.wav": None, "sub/b.wav": None},
    "splits": {
        "train/metadata.csv": METADATA, "train/a.wav": None, "train/sub/b.wav": None,
        "test/metadata.jsonl": json.dumps({"file_name": "c.wav", "text": "yes"}) + "\n", "test/c.wav": None,
    },
    "one table": {"metadata.csv": "file_name,text\ntrain/a.wav,one\ntest/b.wav,two\n", "train/a.wav": None,
                  "test/b.wav": None},
    "DeepSpeech": {
        "train.csv": "wav_filename,wav_filesize,transcript\nclips/a.wav,9,one two\n", "clips/a.wav": None,
        "dev.csv": "wav_filename,wav_filesize,transcript\nclips/b.wav,9,three\n", "clips/b.wav": None,
    },
    "LJSpeech": {
        "metadata.csv": 'LJ001-0001|Printed in 1450,|Printed in fourteen fifty,\nLJ001-0002|the "art"|the "art"\n',
        "wavs/LJ001-0001.wav": None, "wavs/LJ001-0002.wav": None,
    },
    "VCTK": {
        "txt/p225/p225_001.txt": "Please call Stella.\n", "wav48/p225/p225_001.wav": None,
        "txt/s5/s5_002.txt": "Ask her.", "wav48/s5/s5_002.wav": None, "speaker-info.txt": "ID AGE",
    },
    "VCTK 0.92": {
        "txt/p225/p225_001.txt": "Please call Stella.", "wav48_silence_trimmed/p225/p225_001_mic1.wav": None,
        "wav48_silence_trimmed/p225/p225_001_mic2.wav": None, "txt/p226/p226_001.txt": "Ask her.",
        "wav48_silence_trimmed/p226/p226_001_mic1.wav": None, "wav48_silence_trimmed/p226/p226_001_mic2.wav": None,
    },
    "Speech Commands": {
        "yes/0a7c2a8d_nohash_0.wav": None, "no/0b09edd3_nohash_1.wav": None, "yes/0b09edd3_nohash_0.wav": None,
        "_background_noise_/pink_noise.wav": None, "validation_list.txt": "no/0b09edd3_nohash_1.wav\n",
        "testing_list.txt": "yes/0b09edd3_nohash_0.wav\n", "README.md": "x",
    },
    "commands alone": {"yes/0a7c2a8d_nohash_0.wav": None, "no/0b09edd3_nohash_1.wav": None},
    "NeMo": {
        "train_manifest.json": json.dumps({"audio_filepath": "a.wav", "text": "one", "duration": 0.01, "speaker": 0}),
        "a.wav": None,
    },
}  # fmt: skip
"""Maps each layout to its files and their contents, None for sound."""
FOUND = {
    "csv": {"a.wav": ("Good, morning", "7", ""), "sub/b.wav": ('night "now"', "8", "")},
    "splits": {
        "train/a.wav": ("Good, morning", "7", "train"), "train/sub/b.wav": ('night "now"', "8", "train"),
        "test/c.wav": ("yes", "", "test"),
    },
    "one table": {"train/a.wav": ("one", "", "train"), "test/b.wav": ("two", "", "test")},
    "DeepSpeech": {"clips/a.wav": ("one two", "", "train"), "clips/b.wav": ("three", "", "val")},
    "LJSpeech": {
        "wavs/LJ001-0001.wav": ("Printed in fourteen fifty,", "", ""), "wavs/LJ001-0002.wav": ('the "art"', "", ""),
    },
    "VCTK": {
        "wav48/p225/p225_001.wav": ("Please call Stella.", "p225", ""), "wav48/s5/s5_002.wav": ("Ask her.", "s5", ""),
    },
    "VCTK 0.92": {
        "wav48_silence_trimmed/p225/p225_001_mic1.wav": ("Please call Stella.", "p225", ""),
        "wav48_silence_trimmed/p226/p226_001_mic1.wav": ("Ask her.", "p226", ""),
    },
    "Speech Commands": {
        "yes/0a7c2a8d_nohash_0.wav": ("yes", "0a7c2a8d", "train"),
        "no/0b09edd3_nohash_1.wav": ("no", "0b09edd3", "val"),
        "yes/0b09edd3_nohash_0.wav": ("yes", "0b09edd3", "test"),
    },
    "commands alone": {
        "yes/0a7c2a8d_nohash_0.wav": ("yes", "0a7c2a8d", ""), "no/0b09edd3_nohash_1.wav": ("no", "0b09edd3", ""),
    },
    "NeMo": {"a.wav": ("one", "0", "")},
}  # fmt: skip
"""Maps each sound file to its transcript, speaker and split."""


@pytest.mark.parametrize("layout", FOUND)
@pytest.mark.parametrize("pack", [None, zipped, tarred])
def test_published_corpora_are_read(layout, pack, tmp_path, noise):
    files = {name: wav(noise()) if text is None else text for name, text in HUGGING_FACE[layout].items()}
    folder = tmp_path / "corpus"
    if pack is None:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    else:
        folder = tmp_path / ("corpus.zip" if pack is zipped else "corpus.tar.gz")
        folder.write_bytes(pack({f"top/{name}": content for name, content in files.items()}))
    found = load_corpus(folder, tmp_path)
    top = "" if pack is None else "top/"
    told = dict(zip(found.names, zip(found.transcripts, found.speakers, found.splits, strict=True), strict=True))
    assert told == {top + name: facts for name, facts in FOUND[layout].items()}
    assert found.skipped == {}


def test_a_transcript_in_another_encoding_is_skipped_or_read(tmp_path, noise):
    for name in "ab":
        (tmp_path / f"{name}.wav").write_bytes(wav(noise()))
    (tmp_path / "a.txt").write_bytes(b"Ja")
    (tmp_path / "b.txt").write_bytes("Łódź".encode("cp1250"))
    found = load_corpus(tmp_path, tmp_path)
    assert found.transcripts == ("Ja",) and found.skipped == {"has an unreadable transcript, such as b.wav": 1}
    with pytest.raises(UserError, match=r"b.wav: has an unreadable transcript; .*--on-bad drop"):
        load_corpus(tmp_path, tmp_path, reading=Reading())
    assert load_corpus(tmp_path, tmp_path, reading=Reading("cp1250", "drop")).transcripts == ("Ja", "Łódź")
    (tmp_path / "b.txt").write_bytes("Grüße".encode("cp1252"))
    found = load_corpus(tmp_path, tmp_path)
    assert found.transcripts == ("Ja", "Grüße") and "b.txt: is read in the encoding cp1252" in found.found["encoding"]


def test_kaldi_folders_are_pointed_to_the_page(tmp_path):
    for name in ("wav.scp", "text", "utt2spk"):
        (tmp_path / name).write_text("a a.wav\n")
    with pytest.raises(UserError, match=r"looks like Kaldi's files .*docs/formats.md#kaldi shows"):
        load_corpus(tmp_path, tmp_path)


@pytest.mark.parametrize("kind", ["flac", "mp3", "ogg"])
def test_other_sound_is_read_by_soundfile(kind, tmp_path):
    soundfile = pytest.importorskip("soundfile")
    wave = (0.5 * np.sin(np.arange(8000) * 0.2)).astype(np.float32)
    path = tmp_path / f"1_2.{kind}"
    soundfile.write(path, wave, 8000)
    samples, rate = decode(path.read_bytes(), path.name)
    assert rate == 8000 and abs(len(samples) - 8000) < 3000
    middle = samples[2000:4000]
    assert abs(np.abs(middle).max() - 0.5) < 0.05
    assert (kind != "flac") or np.abs(samples - wave).max() < 1e-4
