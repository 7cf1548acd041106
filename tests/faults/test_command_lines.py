"""Invalid command lines, environment variables and files are refused with a message, never with a traceback."""

import gzip
import io
import os
import random
import resource
import tarfile
import tempfile
import typing
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import profiler
from data.har.recording import read_new_windows
from data.knowledge_graph.catalogue import NO_TRIPLES, Catalogue, ItemLists
from data.knowledge_graph.new_users import read_users
from data.speech.reader import read_recordings
from data.tabular.reader import read_table
from tasks import TASKS
from tests.conftest import RANK_VARIABLES, WEIGHTED
from trainer.cli import main
from trainer.common.errors import UserError
from trainer.config import options
from trainer.flags import TRAINER_GROUPS, MultiDeviceFlags
from trainer.profiling.cli import COMMANDS
from trainer.registry import find_task

DIGITS = "9" * 400
BAD_VALUES = {
    int: (DIGITS, "-" + DIGITS, "9" * 5000, "²", "1.5", "nan", "0x10", "\udc80", ""),
    float: ("1e400", "-1e400", "nan", "inf", "²", "1,5,", "\udc80", ""),
    Path: ("x" * 5000, "a" * 300, "\x1b[2Jx", "a\nb", "\udc80", "~nobody-of-this-name/x", ""),
    str: ("\udc80", ""),
}
MEMORY = 4 << 30
"""Bytes of address space that a test may add, so that excessive requests fail without harm."""
CHANCE = 40
"""Number of random cases in each test of the default suite; the slow tests run all cases."""


@dataclass(frozen=True)
class Case:
    """Invalid command. program: main, main_multi_gpu or a profiler command. named: text that the message contains."""

    program: str
    argv: tuple[str, ...]
    named: str
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = " ".join([*(f"{k}={v}" for k, v in self.environment.items()), self.program, *self.argv])
        return ascii(shown if len(shown) < 200 else f"{shown[:90]} ... {shown[-90:]}")


def run(case: Case) -> int:
    if case.program in COMMANDS:
        return profiler.main([case.program, *case.argv])
    return main(list(case.argv), several_devices=case.program == "main_multi_gpu")


@pytest.fixture
def refuses(capsys, monkeypatch, signals_restored, tmp_path):
    """Returns a function that runs a case in this process, which must be refused with printable messages."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    path = [*os.sys.path]
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, before[1]))

    def check(case: Case) -> None:
        capsys.readouterr()
        try:
            with monkeypatch.context() as patch:
                for name, value in case.environment.items():
                    patch.setenv(name, value)
                status = run(case)
        except BaseException as error:
            raise AssertionError(str(case)) from error
        finally:
            os.sys.path[:] = path
        lines = capsys.readouterr().err.split("\n")
        lines.remove("")
        assert status == 2, (str(case), lines)
        assert all(line.startswith("error: ") and line.isprintable() and len(line) < 2000 for line in lines), (
            str(case), lines,
        )  # fmt: skip
        assert any(case.named in line for line in lines), (str(case), lines)

    yield check
    resource.setrlimit(resource.RLIMIT_AS, before)


# --- every flag --------------------------------------------------------------------------------------------------


def flag_cases() -> Iterator[Case]:
    """Yields invalid values of every flag of every program and task."""
    several = ("--multi-gpu", "ddp")
    for option in options(*TRAINER_GROUPS).values():
        is_multi = option.name in {other.name for other in options(MultiDeviceFlags).values()}
        program, before = ("main_multi_gpu", several) if is_multi and option.name != "--multi-gpu" else ("main", ())
        yield from bad_values(program if not is_multi else "main_multi_gpu", before, option)
    for name in TASKS:
        for option in options(find_task(name).Config).values():
            yield from bad_values("main", ("--task", name), option)
    for name, command in COMMANDS.items():
        for option in options(command.tool).values():
            yield from bad_values(name, (), option)


def bad_values(program: str, before: tuple[str, ...], option: typing.Any) -> Iterator[Case]:
    if option.is_switch:
        values = ("maybe", "\udc80", "²")
    elif option.choices:
        values = ("none of them", "\udc80", "²")
    else:
        values = BAD_VALUES[option.type]
    for value in values:
        if value == "" == option.default:
            continue
        yield Case(program, (*before, f"{option.name}={value}"), option.name)


def too_large_cases() -> Iterator[Case]:
    for name in ("--batch-size", "--eval-batch-size", "--global-batch-size", "--grad-accum-steps"):
        yield Case("main", (name, str(10**18)), f"{name} {10**18}: must be at least 1 and at most 2147483647")
    for value in ("100000", str(2**31)):
        yield Case("main", ("--num-threads", value), f"--num-threads {value}: must be at least 1 and at most 1024")
    yield Case("main_multi_gpu", ("--multi-gpu", "ddp", "--nproc", "100000"), "--nproc 100000: must be")
    for device in ("cuda:²", "cuda:" + DIGITS, "cuda:-1", "cuda:", "cuda:0x0", "CUDA", "cpu:0", "cuda:٣"):
        yield Case("main", ("--device", device), "--device ")
    tiny = ("--epochs", "1", "--num-threads", "1", "--device", "cpu")
    for width in (10**12, 2**40, 2**62):
        yield Case("main", ("--task", WEIGHTED, *tiny, "--width", str(width)), "the model would be larger than")
        yield Case("main", (*tiny, "--mode", "first", "--hidden-dims", str(width)), "the model would be larger than")


def environment_cases() -> Iterator[Case]:
    whole = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "1"}
    argv = ("--multi-gpu", "ddp", "--device", "cpu")
    for name in (*whole, "LOCAL_RANK"):
        if name == "MASTER_ADDR":
            continue
        for value in ("abc", "-1", "1.5", "²", "٣", DIGITS, str(10**12), " 1", "0x1"):
            yield Case("main_multi_gpu", argv, name, {**whole, name: value})
            yield Case("step", argv, name, {**whole, name: value})
    for rank in ("abc", "²", DIGITS):
        yield Case("main", (), "WORLD_SIZE=", {"RANK": rank, "WORLD_SIZE": rank})


def settings_cases() -> Iterator[Case]:
    """Yields invalid settings files."""
    texts = {
        "hex.toml": "batch-size = 0x" + "f" * 5000, "nul.toml": 'save-dir = "a\\u0000b"',
        "digits.toml": "seed = " + DIGITS,
        "deep.toml": "a = " + "[" * 5000 + "]" * 5000, "list.toml": "epochs = [[1]]", "inf.toml": "lr = inf",
        "table.toml": "[lr]\nx = 1", "twice.toml": "lr = 1\nlr = 2", "escape.toml": 'save-dir = "\\u001b[2J"',
        "digits.json": '{"config": {"--seed": ' + "9" * 4200 + "}}", "nan.json": '{"config": {"--lr": NaN}}',
        "deep.json": "[" * 100_000, "none.json": "{}", "list.json": '{"config": []}', "date.toml": "seed = 2020-01-01",
    }  # fmt: skip
    for name, text in texts.items():
        Path(name).write_text(text)
        yield Case("main", ("--config", name, "--print-config"), f"--config {name}: ")
    for name, content in {**TEXTS, **BYTES}.items():
        if name not in ("empty", "blank"):
            Path(f"{name}.toml").write_bytes(content)
            yield Case("main", ("--config", f"{name}.toml", "--print-config"), f"--config {name}.toml: ")


def path_cases() -> Iterator[Case]:
    """Yields paths without a usable file."""
    for name in ("--resume-from", "--init-from", "--init-from-partial", "--config"):
        for place in ("nowhere", "file/below", "folder", "loop", "dangling"):
            yield Case("main", (name, place, "--save-dir", "new"), name)
    for task in TASKS:
        for place in ("nowhere", "file/below", "loop", "dangling", "folder"):
            label = ("--label", "x") if task == "tabular" else ()
            yield Case("main", ("--task", task, "--data-dir", place, "--save-dir", "new", *label), "--data-dir")
    for place in ("file", "file/below", "loop", "dangling/x"):
        tiny = ("--task", WEIGHTED, "--epochs", "1", "--num-threads", "1", "--device", "cpu")
        yield Case("main", (*tiny, "--save-dir", place), "--save-dir")


# --- every reader ------------------------------------------------------------------------------------------------


def archive(kind: str, members: dict[str, bytes], link: str = "") -> bytes:
    """Returns a zip or tar.gz archive. link: member of a tar.gz that is a symbolic link to its content."""
    file = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as packed:
            for name, content in members.items():
                packed.writestr(name, content)
        return file.getvalue()
    with tarfile.open(fileobj=file, mode="w:gz") as packed:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if name == link:
                info.type, info.linkname = tarfile.SYMTYPE, content.decode()
            info.size = 0 if name == link else len(content)
            packed.addfile(info, io.BytesIO(content))
    return file.getvalue()


def array(values: typing.Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values, allow_pickle=True)
    return file.getvalue()


def arrays(**values: typing.Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **values)
    return file.getvalue()


NOISE = random.Random(0).randbytes(3000)
TEXTS = {
    "empty": b"", "blank": b"\n \n\t\n", "nul": b"1 1 1\n2 \x00 2\n", "only nul": bytes(4096), "noise": NOISE,
    "latin": "Gerät 1 2\n".encode("latin-1") * 5, "utf16": "1 1 1\n2 2 2\n".encode("utf-16"),
    "escapes": b"\x1b[2J\x1b]0;x\x07 1\n" * 4, "nan": b"nan nan nan\n" * 50, "words": b"this is no table at all\n",
    "one": b"1\n", "huge number": (b"9" * 5000 + b" 1 1\n") * 2, "long line": b"x" * 200_000, "quote": b'a,b\n"1,2\n',
    "header": b"a,b,label\n", "ragged": b"a,b\n1,2\n1,2,3\n", "inf": b"1 inf 1\n2 -inf 1\n",
}  # fmt: skip
BYTES = {
    "truncated zip": archive("zip", {"u.data": b"1 1 1\n" * 50})[:60],
    "empty zip": archive("zip", {}),
    "nested zip": archive("zip", {"x.zip": archive("zip", {})}),
    "folders": archive("zip", {"a/": b"", "b/": b""}),
    "truncated tar": archive("tar", {"u.data": b"1 1 1\n" * 50})[:40],
    "empty tar": archive("tar", {}),
    "tar of links": archive("tar", {"u.data": b"/etc/passwd", "train.txt": b"../../x"}, "u.data"),
    "up": archive("zip", {"../../u.data": b"\x00", "../train.txt": b"\x00"}),
    "escape in name": archive("zip", {"\x1b[2Ju.data": b"\x00\xff", "\x1b[31mtrain/x.txt": b""}),
    "gzip": gzip.compress(b"\xff\xfe" * 100),
    "truncated gzip": gzip.compress(b"1 1 1\n" * 1000)[:30],
    "array": array(np.full((2, 9, 128), np.nan)), "shape": array(np.zeros((2, 3))), "objects": array(np.array([{}])),
    "no rows": array(np.zeros((0, 9, 128))), "texts": array(np.array(["a", "b"])),
    "complex": array(np.ones((1, 9, 128), complex)),
    "empty npz": arrays(), "no y": arrays(X=np.zeros(3)), "one class": arrays(X=np.zeros((9, 2)), y=np.zeros(9)),
    "all nan": arrays(X=np.full((30, 2), np.nan), y=np.full(30, np.nan)),
    "lengths": arrays(X=np.zeros((9, 2)), y=np.zeros(8)),
    "riff": b"RIFF\x00\x00\x00\x00WAVE", "wav of nothing": b"RIFF" + bytes(4) + b"WAVEfmt " + b"\x10\0\0\0" + bytes(16),
}  # fmt: skip
SUFFIXES = {
    "har": (".zip", ""), "seqrec": (".txt", ".csv.gz", ".zip", ".tar.gz", ""), "kgat": (".zip", ".tar.gz", ""),
    "speech": (".zip", ".tar.gz", ".jsonl", ""), "tabular": (".csv", ".csv.gz", ".npz"),
}  # fmt: skip
NAMES_IN_FOLDER = {
    "har": ("train/y_train.txt",), "seqrec": ("ratings.dat",), "kgat": ("train.txt", "kg_final.txt"),
    "speech": ("a.wav", "a.txt", "manifest.jsonl"), "tabular": (),
}  # fmt: skip


def data_cases() -> Iterator[tuple[str, str, str, bytes]]:
    """Yields (task, flag, file name, content) of invalid files."""
    for task, suffixes in SUFFIXES.items():
        for what, content in {**TEXTS, **BYTES}.items():
            for suffix in suffixes:
                yield task, "--data-dir", f"{what}{suffix}", content
    for what, content in {**TEXTS, **BYTES}.items():
        yield "speech", "--alphabet", what, content
        yield "speech", "--language-model", what, content


def case_of_file(task: str, flag: str, name: str, content: bytes) -> Case:
    """Writes the file or, if the name of data has no suffix, a folder of such files; returns the case."""
    path = Path(task, flag, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix or flag != "--data-dir":
        path.write_bytes(content)
    else:
        for inner in NAMES_IN_FOLDER[task]:
            (path / inner).parent.mkdir(parents=True, exist_ok=True)
            (path / inner).write_bytes(content)
    more = {"tabular": ("--label", "label") if path.suffix != ".npz" else ()}.get(task, ())
    more += ("--beam", "2") if flag == "--language-model" else ()
    argv = ("--task", task, flag, str(path), "--save-dir", "new", "--cache-dir", "cache", *more, "--max-steps", "1")
    return Case("main", (*argv, "--num-threads", "1", "--device", "cpu", "--num-workers", "0"), flag)


def read_users_of_two(path: Path) -> object:
    some = ItemLists.of_pairs(np.array([0, 1]), np.array([0, 1]), 2)
    return read_users(path, Catalogue(2, 2, some, some, some, NO_TRIPLES, ()))


READERS = {
    ".csv": read_new_windows, ".npy": read_new_windows, "": read_users_of_two, ".txt": read_users_of_two,
    ".wav": lambda path: read_recordings(path, 8000), ".flac": lambda path: read_recordings(path, 8000),
    ".csv.gz": lambda path: read_table(path, "--predict"), ".npz": lambda path: read_table(path, "--predict"),
}  # fmt: skip
"""Readers of `--predict`, by file suffix."""
READABLE = {("blank", ""), ("blank", ".txt"), ("empty", ""), ("empty", ".txt"), ("one", ""), ("one", ".txt"),
            ("words", ".csv.gz"), ("one class", ".npz"), ("all nan", ".npz"), ("no rows", ".npz")}  # fmt: skip


ACCEPTED = {
    # An alphabet may be any text.
    ("speech", "--alphabet", "words"), ("speech", "--alphabet", "one"), ("speech", "--alphabet", "nan"),
}  # fmt: skip


# --- the tests ---------------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[], Iterator[Case]]] = {
    "flags": flag_cases, "sizes": too_large_cases, "environment": environment_cases, "paths": path_cases,
    "settings": settings_cases,
}  # fmt: skip


@pytest.fixture
def places(refuses, tmp_path):
    Path("file").write_text("file")
    Path("folder").mkdir()
    os.symlink("loop", "loop")
    os.symlink("gone", "dangling")
    yield
    assert not Path("new").exists() or not any(Path("new").glob("*.pth"))


def check_all(cases, refuses):
    """Runs all cases, and then fails with a list of those that were not refused."""
    wrong = []
    for case in cases:
        try:
            refuses(case)
        except AssertionError as error:
            cause = f" <- {error.__cause__!r}" if error.__cause__ is not None else ""
            wrong.append(f"{error}{cause}"[:900])
    assert not wrong, "\n".join([f"{len(wrong)} cases:", *wrong])


@pytest.mark.parametrize("table", TABLES)
def test_a_sample_of_wrong_command_lines_is_refused(table, refuses, places):
    cases = [*TABLES[table]()]
    check_all(random.Random(0).sample(cases, min(CHANCE, len(cases))), refuses)


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_all_wrong_command_lines_are_refused(table, refuses, places, capsys):
    cases = [*TABLES[table]()]
    check_all(cases, refuses)
    with capsys.disabled():
        print(f"\n{len(cases)} {table}")


def test_damaged_files_to_predict_are_named(tmp_path):
    (tmp_path / "folder").mkdir()
    wrong = []
    for what, content in {**TEXTS, **BYTES}.items():
        for suffix, read in READERS.items():
            path = tmp_path / f"{what}{suffix}"
            path.write_bytes(content)
            try:
                read(path)
                said = "" if (what, suffix) in READABLE else "accepted"
            except UserError as error:
                said = "" if path.name in str(error) else str(error)
            except Exception as error:
                said = repr(error)
            if said:
                wrong.append(f"{what}{suffix}: {said[:300]}")
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def locked(refuses):
    """Creates a folder and a file without permissions; returns a context manager that drops root's privileges."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        os.chdir(folder)
        (folder / "closed").mkdir()
        (folder / "closed" / "file").write_text("1 1 1\n")
        (folder / "secret").write_text("1 1 1\n")
        (folder / "secret").chmod(0)
        (folder / "closed").chmod(0)

        @contextmanager
        def nobody() -> Iterator[None]:
            user = os.geteuid()
            if user == 0:
                os.seteuid(65534)
            try:
                yield
            finally:
                os.seteuid(user)

        yield nobody


def test_inaccessible_files_are_named(locked, refuses):
    behind = ("--save-dir", "--resume-from", "--init-from", "--config", "--predict", "--cache-dir", "--data-dir")
    said = "closed/file: cannot be accessed: Permission denied"
    cases = [Case("main", (flag, "closed/file"), f"{flag} {said}") for flag in behind]
    more = ("--num-threads", "1", "--device", "cpu", "--cache-dir", "cache", "--save-dir", "new")
    for flag in ("--resume-from", "--init-from", "--config", "--logger", "--data-dir"):
        task = "seqrec" if flag == "--data-dir" else WEIGHTED
        place = "secret:Class" if flag == "--logger" else "secret"
        cases.append(Case("main", ("--task", task, flag, place, *more), flag))
    for task in TASKS:
        find_task(task)
    with locked():
        check_all(cases, refuses)


def test_a_sample_of_wrong_data_files_is_refused(refuses, places):
    cases = random.Random(0).sample([case for case in data_cases() if case[1] == "--data-dir"], CHANCE)
    check_all((case_of_file(*case) for case in cases), refuses)


@pytest.mark.slow
def test_all_wrong_data_files_are_refused(refuses, places, capsys):
    cases = [case for case in data_cases() if (*case[:2], case[2]) not in ACCEPTED]
    check_all((case_of_file(*case) for case in cases), refuses)
    with capsys.disabled():
        print(f"\n{len(cases)} files")
