"""Each conversion in docs/formats.md and examples/convert.py keeps the values of a sample in the documented layout."""

import re
import wave
from pathlib import Path

import numpy as np
import pytest

from data.har.own_recordings import OwnFormat, load_own_recordings, refuse_other_data
from data.interactions.reader import load_interactions
from data.knowledge_graph.reader import load_catalogue
from data.speech.reader import load_corpus
from data.tabular.reader import read_table
from examples.convert import CONVERTERS
from trainer.common.errors import UserError

PAGE = (Path(__file__).parents[2] / "docs/formats.md").read_text()


def anchors(page: str) -> dict[str, str]:
    """Returns the sections of a page by the name that a link has."""
    parts = re.split(r"^## (.*)\n", page, flags=re.M)[1:]
    return {title.lower().replace(" ", "-"): text for title, text in zip(parts[::2], parts[1::2], strict=True)}


def convert(section: str, path: str) -> None:
    """Runs the converter that a section names, in the working directory. path: the file or folder to convert."""
    [name] = re.findall(r"`python examples/convert\.py (\w+) ", anchors(PAGE)[section])
    CONVERTERS[name](Path(path))


def run_code(section: str) -> None:
    """Runs the code of a section in the working directory."""
    [code] = re.findall(r"```python\n(.*?)```", anchors(PAGE)[section], flags=re.S)
    exec(compile(code, f"docs/formats.md#{section}", "exec"), {})


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_messages_name_existing_sections():
    root = Path(__file__).parents[2]
    sources = [path.read_text() for room in ("data", "tasks") for path in (root / room).rglob("*.py")]
    links = {link for source in sources for link in re.findall(r"docs/formats\.md#([a-z0-9-]+)", source)}
    quoted = {text for source in sources for text in re.findall(r'"([a-z-]+)"', source)}
    known = anchors(PAGE)
    assert links <= known.keys()
    assert {"excel", "json", "arff", "other-formats"} <= quoted & known.keys()


def columns_of(path: str) -> dict[str, list]:
    found = [column.typed() for column in read_table(Path(path)).columns]
    return {c.name: c.values.tolist() if c.texts is None else [c.texts[int(v)] for v in c.values] for c in found}


TABLES = {
    "json": ("table.json", '[\n {"x": 1.5, "y": "a"},\n {"x": 2, "y": "ä"}\n]', "table.jsonl"),
    "arff": (
        "table.arff",
        "% about\n@RELATION t\n@ATTRIBUTE x  NUMERIC\n@attribute 'y' {a,'ä'}\n\n@DATA\n1.5, a\n% no\n2,'ä'\n",
        "table.csv",
    ),
}


@pytest.mark.parametrize("section", TABLES)
def test_table_formats_are_read(section):
    name, content, result = TABLES[section]
    Path(name).write_text(content)
    with pytest.raises(UserError, match=f"docs/formats.md#{section} "):
        read_table(Path(name))
    convert(section, name)
    assert columns_of(result) == {"x": [1.5, 2], "y": ["a", "ä"]}


def test_quotes_in_arff_files_are_read():
    head = '@attribute "my x" string\n@attribute \'it\\\'s\' numeric\n@attribute y {p, "q"}\n@data\n'
    Path("table.arff").write_text(f'\ufeff{head}"a, b", 1,\'Men\\\'s\'\n,2,""\n', encoding="utf-8")
    CONVERTERS["arff"](Path("table.arff"))
    assert Path("table.csv").read_text() == "my x,it's,y\n\"a, b\",1,Men's\n,2,\n"


def test_a_failed_arff_conversion_writes_nothing():
    for content, message in {
        "@data\n{0 1, 2 q}\n": "'{0 1, 2 q}' is a sparse row",
        "a,b\n1,2\n": "no line @data",
    }.items():
        Path("table.arff").write_text(content)
        with pytest.raises(SystemExit, match=f"table.arff: .*{message}"):
            CONVERTERS["arff"](Path("table.arff"))
    assert not Path("table.csv").exists()


@pytest.mark.parametrize("name", ["pamap2", "mhealth", "opportunity", "wisdm", "kgcn", "kaldi"])
def test_a_folder_without_the_published_files_is_refused(name):
    Path("other").mkdir()
    with pytest.raises(SystemExit, match=r"other: contains no .*; pass the folder with these files"):
        CONVERTERS[name](Path("other"))
    assert sorted(map(str, Path().iterdir())) == ["other"]


def test_a_table_without_names_is_read():
    row = "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "
    Path("adult.data").write_text(f"{row}United-States, <=50K\n{row}Cuba, >50K\n\n")
    run_code("no-line-of-names")
    found = columns_of("adult.csv")
    assert (found["age"], found["income"], len(found)) == ([39, 39], ["<=50K", ">50K"], 15)


def test_an_excel_sheet_is_read():
    pytest.importorskip("openpyxl")
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame({"x": [1.5, 2], "day": ["2024-05-31", "ä"]}).to_excel("table.xlsx", index=False)
    with pytest.raises(UserError, match=r"docs/formats.md#excel "):
        read_table(Path("table.xlsx"))
    run_code("excel")
    assert columns_of("table.csv") == {"x": [1.5, 2], "day": ["2024-05-31", "ä"]}


def test_libsvm_rows_are_read():
    Path("table.libsvm").write_text("+1 1:0.5 3:2\n-1 3:1e-1 # 2:5\n")
    with pytest.raises(UserError, match=r"docs/formats.md#other-formats "):
        read_table(Path("table.libsvm"))
    convert("other-formats", "table.libsvm")
    assert columns_of("table.csv") == {"label": [1, -1], "x1": [0.5, 0], "x3": [2, 0.1]}


def test_one_user_per_line_is_read():
    Path("users.txt").write_text("0 7 8 9\n3 8\n")
    with pytest.raises(
        UserError, match=r"is a line with a user and all .*4 columns, .*docs/formats.md#one-user-a-line "
    ):
        load_interactions(Path("users.txt"), 1, Path("cache"))
    convert("one-user-a-line", "users.txt")
    found = load_interactions(Path("interactions.csv"), 1, Path("cache"))
    assert (found.offsets.tolist(), found.item_ids, found.items.tolist()) == ([0, 3, 4], ("7", "8", "9"), [1, 2, 3, 2])


def test_kgcn_data_before_preprocessing_are_read(tmp_path):
    folder = tmp_path / "raw"
    folder.mkdir()
    (folder / "user_artists.dat").write_text(
        "userID\tartistID\tweight\n3\t99\t4\n" + "".join(f"2\t{50 + k}\t9\n" for k in range(10))
    )
    (folder / "item_index2entity_id.txt").write_text("".join(f"{50 + k}\t{k}\n" for k in range(10)))
    (folder / "kg.txt").write_text("0\tmusic.artist.origin\t3846\n3846\tin\t1\n")
    split = {"val_share": 0.1, "seed": 0, "selects_on_test": True}
    with pytest.raises(UserError, match=r"KGCN's raw data, before .*docs/formats.md#kgcn "):
        load_catalogue(folder, tmp_path / "cache", **split)
    convert("kgcn", "raw")
    found = load_catalogue(tmp_path / "music", tmp_path / "cache", **split)
    assert found.names == (("2",), tuple("0123456789"), ("3846",))
    assert found.relation_names == ("music.artist.origin", "in")
    assert found.triples.tolist() == [[0, 0, 10], [10, 1, 1]] and len(found.train) + len(found.test) == 10


def test_kaldi_folders_are_read(tmp_path, monkeypatch):
    for part in ("train", "test"):
        folder = tmp_path / "data" / part
        folder.mkdir(parents=True)
        (folder / "wav.scp").write_text(f"u1 {part}.wav\n")
        (folder / "text").write_text("u1 GOOD MORNING\n")
        (folder / "utt2spk").write_text("u1 anna\n")
        with wave.open(f"{part}.wav", "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(bytes(range(200)))
    convert("kaldi", "data")
    assert not Path("dev.jsonl").exists()
    found = load_corpus(tmp_path, tmp_path / "cache")
    assert (found.transcripts, found.speakers) == (("GOOD MORNING",) * 2, ("anna",) * 2)
    assert dict(zip(found.names, found.splits, strict=True)) == {"train.wav": "train", "test.wav": "test"}


def test_kaldi_segments_are_refused():
    Path("data/train").mkdir(parents=True)
    for name in ("wav.scp", "segments"):
        Path("data/train", name).write_text("u1 r1 0 1\n")
    with pytest.raises(SystemExit, match=r"train/segments: is not supported"):
        CONVERTERS["kaldi"](Path("data"))


def number(row: int, column: int) -> str:
    return f"{(row * 37 + column * 11) % 101 / 8 - 5:g}"


def pamap2(folder: Path) -> None:
    for subject in (101, 102):
        rows = [
            [f"{row / 100:.2f}", str((0, 4, 17)[row // 40]), "NaN", *(number(row, column) for column in range(3, 54))]
            for row in range(120)
        ]
        (folder / f"subject{subject}.dat").write_text("".join(" ".join(row) + "\n" for row in rows))


def mhealth(folder: Path) -> None:
    for subject in (1, 2):
        rows = [[*(number(row, column) for column in range(23)), str((0, 1, 9)[row // 40])] for row in range(120)]
        (folder / f"mHealth_subject{subject}.log").write_text("".join("\t".join(row) + "\n" for row in rows))


def opportunity(folder: Path) -> None:
    for subject in (1, 2):
        rows = [
            [str(33 * row), *(number(row, column) for column in range(1, 243)), str((0, 1, 4)[row // 40]), *"000000"]
            for row in range(120)
        ]
        (folder / f"S{subject}-ADL1.dat").write_text("".join(" ".join(row) + "\n" for row in rows))


def wisdm(folder: Path) -> None:
    lines = [
        f"{subject},{activity},{10**9 + 50_000_000 * row},{number(row, 0)},{number(row, 1)},{number(row, 2)};"
        for subject in (33, 34) for activity in ("Jogging", "Sitting") for row in range(40)
    ]  # fmt: skip
    lines[3:3] = ["33,Jogging,49105962326000,-0.69,12.68,;", "", "33,Jogging,0,0,0,0;"]
    (folder / "WISDM_ar_v1.1_raw.txt").write_text("\n".join(lines) + "\n")


RECORDINGS = {
    pamap2: ("pamap2", 36, {"hand_acc_x": 4, "chest_gyro_z": 29, "ankle_mag_z": 49}, ("4", "17")),
    mhealth: ("mhealth", 23, {"chest_acc_x": 0, "ecg_2": 4, "arm_mag_z": 22}, ("1", "9")),
    opportunity: ("opportunity", 45, {"back_acc_x": 37, "left_lower_mag_z": 89 + 8}, ("sit", "stand")),
    wisdm: ("wisdm.csv", 3, {"acc_x": 0, "acc_z": 2}, ("Jogging", "Sitting")),
}
"""For each function that writes a sample: the result, its number of channels, some columns (from 0), and classes."""


def test_the_newer_wisdm_data_are_read():
    Path("accel").mkdir()
    for subject in (1600, 1601):
        Path("accel", f"data_{subject}_accel_phone.txt").write_text(f"{subject},A,252207666810782,-0.36,8.79,1.05;\n")
    CONVERTERS["wisdm"](Path("accel"))
    assert columns_of("wisdm.csv")["subject"] == [1600, 1601]


@pytest.mark.parametrize("write", RECORDINGS)
def test_recordings_are_read(write, tmp_path):
    result, num_channels, columns, classes = RECORDINGS[write]
    (tmp_path / "as_published").mkdir()
    write(tmp_path / "as_published")
    with pytest.raises(UserError, match=f"docs/formats.md#{write.__name__} "):
        refuse_other_data(tmp_path / "as_published")
    convert(write.__name__, "as_published")
    found = load_own_recordings(tmp_path / result, tmp_path / "cache", OwnFormat(None, None, None, 20, 20)).recordings
    assert len(found.channels) == num_channels and found.classes == classes and len(found.subject_names) == 2
    first = {name: found.signals[0, found.channels.index(name)] for name in columns}
    row = 0 if write is wisdm else 40
    expected = {name: [float(number(row + k, column)) for k in range(20)] for name, column in columns.items()}
    for name, values in first.items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-6)
