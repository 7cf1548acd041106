"""Converts files and published data sets to files that the tasks can read, and writes them to the current folder.

    python examples/convert.py arff table.arff
    python examples/convert.py pamap2 PAMAP2_Dataset/Protocol

The first argument is a name in `CONVERTERS`; the second is the file, or the folder with a data set's published files.
"""

import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

QUOTED = r"""'((?:\\.|[^'\\])*)'|"((?:\\.|[^"\\])*)\""""
ARFF_NAME = re.compile(rf"@attribute\s+(?:{QUOTED}|(\S+))", re.IGNORECASE)
ARFF_FIELD = re.compile(rf"(?:^|,)\s*(?:{QUOTED}|([^,]*?))\s*(?=,|$)")


def write_table(path: Path, names: list[str], rows: Iterable[Iterable[str]]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([names, *rows])


def fields(path: Path) -> Iterator[list[str]]:
    """Yields the fields of each line that is not blank."""
    with path.open(encoding="utf-8-sig") as file:
        yield from filter(None, map(str.split, file))


def files(folder: Path, *patterns: str) -> list[Path]:
    """Returns the files in a folder whose names match a pattern. Exits with a message if there are none."""
    found = sorted(path for pattern in patterns for path in folder.glob(pattern))
    return found or sys.exit(f"{folder}: contains no {' or '.join(patterns)}; pass the folder with these files")


def channels(places: Iterable[str], kinds: Iterable[str]) -> list[str]:
    return [f"{place}_{kind}_{axis}" for place in places for kind in kinds for axis in "xyz"]


def json_(path: Path) -> None:
    """Writes NAME.jsonl from NAME.json, which contains one array or object over any number of lines."""
    rows = json.loads(path.read_text(encoding="utf-8-sig"))
    with open(f"{path.stem}.jsonl", "w", encoding="utf-8") as lines:
        for row in rows if isinstance(rows, list) else [rows]:
            print(json.dumps(row, ensure_ascii=False), file=lines)


def arff(path: Path) -> None:
    """Writes NAME.csv from NAME.arff. Exits with a message if rows are sparse."""
    text = path.read_text(encoding="utf-8-sig")
    lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("%")]
    head, rows = [], iter(lines)
    for line in rows:
        if line.lower() == "@data":
            break
        head.append(line)
    else:
        sys.exit(f"{path}: has no line @data, so it is not an ARFF file")
    if sparse := [line for line in lines[len(head) + 1 :] if line.startswith("{")]:
        sys.exit(f"{path}: {sparse[0][:40]!r} is a sparse row; convert the file with Weka's SparseToNonSparse first")
    names = [unquoted(match) for match in map(ARFF_NAME.match, head) if match]
    table = ([unquoted(match) for match in ARFF_FIELD.finditer(row)] for row in rows)
    write_table(Path(f"{path.stem}.csv"), names, table)


def unquoted(match: re.Match[str]) -> str:
    """Returns the matched text without quotes and backslashes of ARFF."""
    single, double, plain = match.groups()
    return plain if plain is not None else re.sub(r"\\(.)", r"\1", single if double is None else double)


def libsvm(path: Path) -> None:
    """Writes NAME.csv from NAME.libsvm. Values that a row does not list are 0; comments and qid are ignored."""
    lines = (line.partition("#")[0].split() for line in path.read_text(encoding="utf-8-sig").splitlines())
    rows = [
        (label, dict(pair.split(":") for pair in pairs if not pair.startswith("qid:")))
        for label, *pairs in filter(None, lines)
    ]
    columns = sorted({int(column) for _, values in rows for column in values})
    table = ([label, *(values.get(str(column), "0") for column in columns)] for label, values in rows)
    write_table(Path(f"{path.stem}.csv"), ["label", *(f"x{column}" for column in columns)], table)


def users(path: Path) -> None:
    """Writes interactions.csv from lines `user item item ...`, whose items are in time order."""
    rows = ((user, item) for user, *items in fields(path) for item in items)
    write_table(Path("interactions.csv"), ["user", "item"], rows)


def pamap2(folder: Path) -> None:
    """Writes pamap2/101.csv, ... from subject101.dat, ..., at 100 rows per second; activity 0 becomes empty."""
    names = ["subject", "activity", "time", *channels(("hand", "chest", "ankle"), ("acc", "acc6", "gyro", "mag"))]
    for path in files(folder, "subject*.dat"):
        subject = re.findall(r"\d+", path.name)[-1]
        rows = (
            [subject, "" if activity == "0" else activity, time]
            + [value for start in (1, 18, 35) for value in sensors[start : start + 12]]
            for time, activity, _, *sensors in fields(path)
        )
        write_table(Path("pamap2", f"{subject}.csv"), names, rows)


def mhealth(folder: Path) -> None:
    """Writes mhealth/1.csv, ... from mHealth_subject1.log, ..., at 50 rows per second; label 0 becomes empty."""
    names = ["subject", "activity", *(f"chest_acc_{axis}" for axis in "xyz"), "ecg_1", "ecg_2"]
    names += channels(("ankle", "arm"), ("acc", "gyro", "mag"))
    for path in files(folder, "mHealth_subject*.log"):
        subject = re.findall(r"\d+", path.name)[-1]
        rows = ([subject, "" if label == "0" else label, *signals] for *signals, label in fields(path))
        write_table(Path("mhealth", f"{subject}.csv"), names, rows)


def opportunity(folder: Path) -> None:
    """Writes opportunity/S1-ADL1.csv, ... from S1-ADL1.dat, ..., at 30 rows per second.

    Keeps the five inertial units of the jacket (columns 38 to 102 of column_names.txt) and the modes of locomotion
    (column 244).
    """
    modes = {"1": "stand", "2": "walk", "4": "sit", "5": "lie"}
    places = ("back", "right_upper", "right_lower", "left_upper", "left_lower")
    names = ["subject", "activity", *channels(places, ("acc", "gyro", "mag"))]
    for path in files(folder, "S?-*.dat"):
        rows = (
            [path.name[:2], modes.get(row[243], "")]
            + [value for place in range(5) for value in row[37 + 13 * place : 46 + 13 * place]]
            for row in fields(path)
        )
        write_table(Path("opportunity", f"{path.stem}.csv"), names, rows)


def wisdm(folder: Path) -> None:
    """Writes wisdm.csv from WISDM_ar_v1.1_raw.txt, or from data_1600_accel_phone.txt, ..., at 20 rows per second.

    Ignores lines that lack a value or have time 0.
    """
    number = r"(-?\d+(?:\.\d+)?(?:E-?\d+)?)"
    row = re.compile(rf"(\d+),(\w+),(\d+),{number},{number},{number}\s*,?;")
    paths = files(folder, "WISDM_ar_v1.1_raw.txt", "data_*.txt")
    found = (match for path in paths for match in row.finditer(path.read_text()))
    names = ["subject", "activity", "time", "acc_x", "acc_y", "acc_z"]
    write_table(Path("wisdm.csv"), names, (match.groups() for match in found if match[3] != "0"))


def kgcn(folder: Path) -> None:
    """Writes music/interactions.csv and music/graph.csv. Each item gets the name of its entity."""
    names = ("item_index2entity_id.txt", "user_artists.dat", "kg.txt")
    entities, artists, graph = (files(folder, name)[0] for name in names)
    entity_of = dict(fields(entities))
    listened = ((user, artist) for user, artist, _ in fields(artists))
    rows = ((user, entity_of[artist]) for user, artist in listened if artist in entity_of)
    write_table(Path("music/interactions.csv"), ["user", "item"], rows)
    write_table(Path("music/graph.csv"), ["head", "relation", "tail"], fields(graph))


def kaldi(folder: Path) -> None:
    """Writes the manifests train.jsonl, dev.jsonl and test.jsonl of the folders train, dev and test that exist."""
    for sounds in files(folder, "train/wav.scp", "dev/wav.scp", "test/wav.scp"):
        part, tables = sounds.parent, {}
        if (part / "segments").exists():
            sys.exit(f"{part / 'segments'}: is not supported; cut the recordings into a file for each utterance first")
        for name in ("wav.scp", "text", "utt2spk"):
            lines = (part / name).read_text(encoding="utf-8-sig").splitlines() if (part / name).exists() else []
            tables[name] = dict(line.split(maxsplit=1) for line in lines if len(line.split()) > 1)
        with open(f"{part.name}.jsonl", "w", encoding="utf-8") as manifest:
            for name, sound in tables["wav.scp"].items():
                text, speaker = tables["text"].get(name, ""), tables["utt2spk"].get(name, "")
                entry = {"audio_path": sound.strip(), "text": text.strip(), "speaker": speaker.strip()}
                print(json.dumps(entry, ensure_ascii=False), file=manifest)


CONVERTERS: dict[str, Callable[[Path], None]] = {
    f.__name__.rstrip("_"): f for f in (json_, arff, libsvm, users, pamap2, mhealth, opportunity, wisdm, kgcn, kaldi)
}

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in CONVERTERS or not Path(sys.argv[2]).exists():
        sys.exit(f"usage: python examples/convert.py {{{','.join(CONVERTERS)}}} FILE_OR_FOLDER")
    CONVERTERS[sys.argv[1]](Path(sys.argv[2]))
