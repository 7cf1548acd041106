"""Finds sound files, transcripts and speakers of corpora in published layouts."""

import json
import math
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from data.csv_lines import csv_lines, delimiter_of
from data.files import shown
from data.speech.audio_files import SUFFIXES
from data.speech.sources import MANIFESTS, Source
from data.table_files import json_lines
from trainer.common.errors import UserError

_SPLITS = {"train": "train", "dev": "val", "val": "val", "test": "test"}
_SPLIT = re.compile(r"(train|dev|val|test)(id|idation|ing)?(?![a-z])")
_COMMON_VOICE = {"train.tsv": "train", "dev.tsv": "val", "test.tsv": "test"}
# a speaker's name contains a letter, unlike a sequence of spoken digits
_FSDD = re.compile(r"[0-9]_[^_]*[a-z][^_]*_[0-9]+")
_TEXTS = (*MANIFESTS, ".tsv", ".csv", ".txt", ".lab", ".trn", ".phn", ".wrd", ".textgrid", ".stm", ".ctm", ".data")
_METADATA = re.compile(r"metadata\.(csv|tsv|jsonl)|(train|dev|val|test)[a-z_-]*\.(csv|tsv)")
_SOUND_COLUMNS = ("file_name", "filename", "file", "path", "audio", "wav_filename")
_TEXT_COLUMNS = ("transcription", "transcript", "text", "sentence", "normalized_text")
_SPEAKER_COLUMNS = ("speaker", "speaker_id", "client_id")
_COMMAND = re.compile(r"([0-9a-f]{8})_nohash_\d+")
_COMMAND_LISTS = {"validation_list.txt": "val", "testing_list.txt": "test"}
_VCTK = re.compile(r"((p\d{3}|s5)_\d{3})(_mic\d)?")
_TEXTS_OF_KALDI = ("text", "wav.scp", "utt2spk", "segments", "transcripts")
_MARKS_OF_TIMIT = (".phn", ".wrd")
_ABOUT = ("readme", "license", "licence", "copying", "changes", "changelog")
"""Beginnings of the names of files that contain no transcripts."""
_UNREAD = {
    r"(.*/)?(wav\.scp|utt2spk)": "Kaldi's files",
    r".*\.normalized\.txt": "LibriTTS",
    r"(.*/)?transcripts\.txt": "Multilingual LibriSpeech",
    r"(.*/)?txt\.done\.data": "CMU ARCTIC",
    rf".*({'|'.join(map(re.escape, _MARKS_OF_TIMIT))})": "TIMIT",
    r".*\.lab": "label files next to the sound files",
    r".*\.(jsonl|json)": "a manifest",
    r".*\.(csv|tsv)": "a table next to the sound files",
}
"""Maps patterns of lower-case file names to the formats that they indicate."""
_NUM_FSDD_TEST = 5


@dataclass(frozen=True)
class Utterance:
    """Utterance in the files of a corpus; its sound file may be missing or unreadable.

    name: path of the sound file in the corpus. transcript: text, or "" if missing. speaker: name, or "" if unknown.
    split: "train", "val", "test", or "" if the layout has no splits. duration: in seconds, or None. problem: why the
    transcript cannot be read, or "".
    """

    name: str
    transcript: str
    speaker: str = ""
    split: str = ""
    duration: float | None = None
    problem: str = ""


def utterances_of(source: Source) -> tuple[str, list[Utterance]]:
    """Returns a description of where transcripts are, and the utterances. The first layout below that fits is used.

    Manifest: .json or .jsonl files `train*`, `dev*` or `val*`, `test*`, or a single file, with one JSON object per
        line: `audio_path` (or NeMo's `audio_filepath`), relative to the manifest's folder; `text`; and optionally
        `duration` in seconds and `speaker`.
    Common Voice: `train.tsv`, `dev.tsv`, `test.tsv` and a folder `clips`.
    Metadata: `metadata.csv` or `metadata.jsonl`, a single file or one per split, with `file_name` and `transcription`,
        as in Hugging Face's audio folders; `train.csv` and so on with these columns; or LJSpeech's `metadata.csv`.
    VCTK: `txt/p225/p225_001.txt` and a folder with sound files.
    Speech Commands: the name of a file's folder is the word.
    LibriSpeech: `{split}/{speaker}/{chapter}/{speaker}-{chapter}.trans.txt` in the folders of the sound files.
    Text files: `x.txt` in the folder of `x.wav`; with several folders, the folder's name is the speaker.
    Names: `{digit}_{speaker}_{index}.wav` (Free Spoken Digit Dataset, in which indices below 5 are the test set), or
        words joined by `_` (yesno). File names count as words if no file seems to contain text, each name consists of
        words or single digits, and words occur at least twice on average.

    In the layouts LibriSpeech, text files, names made of words, and metadata other than LJSpeech's, folders `train*`,
    `dev*`, `val*` and `test*` are splits.

    Raises UserError, with file and line, for an unreadable table, and if no layout matches.
    """
    forms = {
        "lines of manifests": _manifests,
        "Common Voice tables": _common_voice,
        "metadata next to the sound files": _metadata,
        "VCTK's txt folder": _vctk,
        "folder names, as in Speech Commands": _speech_commands,
        "LibriSpeech's *.trans.txt": _librispeech,
        "a .txt file next to each sound file": _text_files,
        "file names": _file_names,
    }
    for what, layout in forms.items():
        utterances = layout(source)
        if utterances is not None:
            return what, utterances
    raise UserError(f"{source.where()}: {_why_unknown(source)}")


def _why_unknown(source: Source) -> str:
    advice = "write a manifest train.jsonl, with one JSON object per line that has audio_path and text"
    for pattern, what in _UNREAD.items():
        if some := [name for name in source.names if re.fullmatch(pattern, name.lower())]:
            if what == "a manifest":
                advice = f"give this file with --data-dir {source.path}/{some[0]}, or rename it to train.jsonl"
            elif what == "Kaldi's files":
                advice = "docs/formats.md#kaldi shows how to convert it to a manifest"
            return f"looks like {what} ({some[0]}), which cannot be read directly; {advice}"
    return (
        "has no recordings with transcripts: no manifest, no Common Voice or LibriSpeech files, no .txt file next to "
        f"a sound file, and no sound file named by its words, such as yes_no.wav; {advice}; files found: "
        f"{shown(source.names)}"
    )


def manifest_sound(source: Source) -> list[str]:
    """Returns the sound files that manifests list; [] without manifests. Raises UserError for an invalid manifest."""
    return [utterance.name for utterance in _manifests(source) or ()]


# --- tables ------------------------------------------------------------------------------------------------------


def _manifests(source: Source) -> list[Utterance] | None:
    names = [
        name
        for name in source.names
        if name.lower().endswith(MANIFESTS) and (_split_of(PurePosixPath(name).name) or len(source.names) == 1)
    ]
    if not names:
        return None
    _only_folder(source, names)
    # a single manifest has no splits
    return [
        _manifest_line(source, name, number, line, _split_of(PurePosixPath(name).name) if len(names) > 1 else "")
        for name in names
        for number, line in _lines(source, name)
    ]


def _manifest_line(source: Source, name: str, number: int, line: str, split: str) -> Utterance:
    where = f"{source.where(name)}, line {number}"
    try:
        entry = json.loads(line)
        sound = entry["audio_path"] if "audio_path" in entry else entry["audio_filepath"]
        text, duration = entry["text"], entry.get("duration")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        shown = line if len(line) <= 80 else line[:77] + "..."
        reason = f"{shown!r} is not a JSON object with audio_path and text"
        raise UserError(f"{where}: {reason}; give one JSON object per line") from None
    speaker = "" if entry.get("speaker") is None else str(entry["speaker"])
    if not (isinstance(sound, str) and isinstance(text, str) and (duration is None or _is_finite(duration))):
        raise UserError(
            f"{where}: audio_path and text must be strings, and duration must be a number of seconds; fix the line"
        )
    _refuse_no_text(where, sound, text + speaker)
    if entry.get("offset"):
        raise UserError(
            f"{where}: describes a part of a recording (offset {entry['offset']}); save this part as a separate file"
        )
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), sound))
    if not source.reads_outside and (path.startswith(("/", "../"))):
        raise UserError(f"{where}: {sound!r} points outside the archive; add the sound files to the archive")
    return Utterance(path, text, speaker, split, duration)


def _refuse_no_text(where: str, sound: str, text: str) -> None:
    if "\0" in sound or not _can_be_written(sound, "surrogateescape") or not _can_be_written(text):
        raise UserError(f"{where}: contains a character that UTF-8 cannot encode, or a NUL; fix the line")


def _is_finite(number: object) -> bool:
    try:
        return isinstance(number, int | float) and math.isfinite(number)
    except OverflowError:  # an integer with hundreds of digits
        return False


def _can_be_written(text: str, errors: str = "strict") -> bool:
    """Returns whether UTF-8 can encode a string; it cannot encode the lone surrogates of some JSON escapes."""
    try:
        text.encode(errors=errors)
    except UnicodeEncodeError:
        return False
    return True


def _common_voice(source: Source) -> list[Utterance] | None:
    tables = [name for name in source.names if PurePosixPath(name).name in _COMMON_VOICE]
    if not tables:
        return None
    _only_folder(source, tables)
    return [utterance for name in tables for utterance in _common_voice_table(source, name)]


def _common_voice_table(source: Source, name: str) -> Iterator[Utterance]:
    lines = _lines(source, name)
    _, header = next(lines, (0, ""))
    columns = header.split("\t")
    for needed in ("client_id", "path", "sentence"):
        if needed not in columns:
            raise UserError(f"{source.where(name)}: has no column {needed}; the columns are {', '.join(columns)}")
    folder, split = PurePosixPath(name).parent, _COMMON_VOICE[PurePosixPath(name).name]
    for number, line in lines:
        fields = dict(zip(columns, line.split("\t"), strict=False))
        if len(fields) < len(columns):
            raise UserError(
                f"{source.where(name)}, line {number}: has {len(fields)} columns, not {len(columns)}; fix the line"
            )
        clip = posixpath.normpath(folder / "clips" / fields["path"])
        yield Utterance(clip, fields["sentence"], fields["client_id"], split)


def _metadata(source: Source) -> list[Utterance] | None:
    tables = [name for name in source.names if _METADATA.fullmatch(PurePosixPath(name).name.lower())]
    found = [utterance for name in tables for utterance in _metadata_table(source, name)]
    return found or None


def _metadata_table(source: Source, name: str) -> Iterator[Utterance]:
    folder, split = PurePosixPath(name).parent, _split_of(PurePosixPath(name).name) or _split_of_folders(name)
    lines = [line for _, line in _lines(source, name)]
    if lines and lines[0].count("|") in (1, 2) and "file_name" not in lines[0]:  # LJSpeech's format
        for line in lines:
            identity, *texts = line.split("|")
            yield Utterance(posixpath.normpath(folder / "wavs" / f"{identity}.wav"), texts[-1] or texts[0])
        return
    where = source.where(name)
    # with line ends and blank lines, because a quoted cell may contain line breaks
    whole = [f"{line}\n" if line.strip() else "\n" for line in source.read_text(name).split("\n")]
    rows = json_lines(iter(whole)) if name.endswith("l") else csv_lines(whole, delimiter_of("".join(lines[:1])), where)
    _, header = next(rows, (0, []))
    sound, text, speaker = (
        next((header.index(column) for column in usual if column in header), None)
        for usual in (_SOUND_COLUMNS, _TEXT_COLUMNS, _SPEAKER_COLUMNS)
    )
    if sound is None or text is None:
        return
    for number, fields in rows:
        if len(fields) != len(header):
            raise UserError(f"{where}, line {number}: has {len(fields)} columns, not {len(header)}; fix the line")
        _refuse_no_text(f"{where}, line {number}", fields[sound], fields[text])
        path = posixpath.normpath(folder / fields[sound])
        yield Utterance(
            path, fields[text], "" if speaker is None else fields[speaker], split or _split_of_folders(path)
        )


def _vctk(source: Source) -> list[Utterance] | None:
    matches = {name: _VCTK.fullmatch(PurePosixPath(name).stem) for name in source.names}
    texts = {found[1]: name for name, found in matches.items() if found and name.lower().endswith(".txt")}
    sound = {name: matches[name] for name in _sound_of(source)}
    if not texts or not all(sound.values()):
        return None
    return [
        _read_alone(source, name, texts.get(found[1]), found[2])
        for name, found in sound.items()
        if found and found[3] != "_mic2"  # skips the second microphone's recording of the same speech
    ]


def _speech_commands(source: Source) -> list[Utterance] | None:
    sound = [PurePosixPath(name) for name in _sound_of(source) if "_background_noise_" not in name]
    matches = [_COMMAND.fullmatch(path.stem) for path in sound]
    if not sound or not all(matches):
        return None
    lists = [name for name in source.names if PurePosixPath(name).name in _COMMAND_LISTS]
    split_of = {
        posixpath.normpath(PurePosixPath(name).parent / line.strip()): _COMMAND_LISTS[PurePosixPath(name).name]
        for name in lists for _, line in _lines(source, name)
    }  # fmt: skip
    rest = "train" if lists else ""
    return [
        Utterance(str(path), path.parent.name, found[1] if found else "", split_of.get(str(path), rest))
        for path, found in zip(sound, matches, strict=True)
    ]


def _read_alone(source: Source, name: str, transcript: str | None, speaker: str, split: str = "") -> Utterance:
    """Builds an utterance from a separate transcript file; an error in reading it affects only this utterance."""
    try:
        return Utterance(name, "" if transcript is None else source.read_text(transcript), speaker, split)
    except UserError as error:
        return Utterance(name, "", speaker, split, problem=str(error))


def _lines(source: Source, name: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.read_text(name).split("\n"), start=1):
        if line.strip():
            yield number, line.rstrip("\r")


def _only_folder(source: Source, names: Iterable[str]) -> None:
    folders = sorted({str(PurePosixPath(name).parent) for name in names})
    if len(folders) > 1:
        raise UserError(
            f"{source.where()}: {len(folders)} folders could be the data set; give one of {', '.join(folders)}"
        )


# --- text beside the sound, or in its name ------------------------------------------------------------------------


def _librispeech(source: Source) -> list[Utterance] | None:
    tables = [name for name in source.names if name.endswith(".trans.txt")]
    if not tables:
        return None
    transcripts = {}
    for table in tables:
        for _, line in _lines(source, table):
            utterance, _, text = line.partition(" ")
            transcripts[str(PurePosixPath(table).parent / utterance)] = text
    sound = {_without_suffix(name): name for name in _sound_of(source)}
    return [
        # transcripts without sound are listed, and reported as missing files
        Utterance(
            sound.get(bare, f"{bare}.flac"),
            transcripts.get(bare, ""),
            PurePosixPath(bare).name.partition("-")[0],
            _split_of_folders(bare),
        )
        for bare in sorted({*transcripts, *sound})
    ]


def _text_files(source: Source) -> list[Utterance] | None:
    texts = {_without_suffix(name): name for name in source.names if name.lower().endswith(".txt")}
    sound = _sound_of(source)
    is_timit = any(name.lower().endswith(_MARKS_OF_TIMIT) for name in source.names)  # its .txt files begin with numbers
    if is_timit or not any(_without_suffix(name) in texts for name in sound):
        return None
    folders = {name: [part for part in PurePosixPath(name).parts[:-1] if not _split_of(part)] for name in sound}
    several = len({tuple(parts) for parts in folders.values()}) > 1
    return [
        _read_alone(
            source,
            name,
            texts.get(_without_suffix(name)),
            folders[name][-1] if several and folders[name] else "",
            _split_of_folders(name),
        )
        for name in sound
    ]


def _file_names(source: Source) -> list[Utterance] | None:
    sound = _sound_of(source)
    stems = [PurePosixPath(name).stem for name in sound]
    are_fsdd = bool(stems) and all(map(_FSDD.fullmatch, stems))
    if any(map(_may_hold_transcripts, source.names)) or not (are_fsdd or _are_words(stems)):
        return None
    if not are_fsdd:
        return [
            Utterance(name, stem.replace("_", " "), "", _split_of_folders(name))
            for name, stem in zip(sound, stems, strict=True)
        ]
    utterances = []
    for name, stem in zip(sound, stems, strict=True):
        digit, speaker, index = stem.split("_")
        utterances.append(Utterance(name, digit, speaker, "test" if int(index) < _NUM_FSDD_TEST else ""))
    return utterances


def _may_hold_transcripts(name: str) -> bool:
    bare = PurePosixPath(name).name.lower()
    return (bare.endswith(_TEXTS) or bare in _TEXTS_OF_KALDI) and not bare.startswith(_ABOUT)


def _are_words(stems: Sequence[str]) -> bool:
    """Returns whether names are words or single digits joined by `_` that occur at least twice on average."""
    names = [stem.split("_") for stem in stems]
    are_alike = all(all(map(_is_digit, words)) or all(map(_is_word, words)) for words in names)
    words = [word.lower() for some in names for word in some]
    return any(len(some) > 1 for some in names) and are_alike and len(set(words)) <= len(words) / 2


def _is_digit(word: str) -> bool:
    return len(word) == 1 and word.isdigit()


def _is_word(word: str) -> bool:
    return word != "" and all(character.isalpha() or character in "'-" for character in word)


def _sound_of(source: Source) -> list[str]:
    return [name for name in source.names if name.lower().endswith(SUFFIXES)]


def _without_suffix(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(""))


def _split_of_folders(name: str) -> str:
    return next((split for part in PurePosixPath(name).parts[:-1] if (split := _split_of(part))), "")


def _split_of(name: str) -> str:
    """Returns the split with which a file's or folder's name begins: "train" for train-clean-100, "" for valerie."""
    match = _SPLIT.match(name.lower())
    return _SPLITS[match[1]] if match else ""
