"""Processes that start one run together are refused if they differ, if one is missing, or if there are too many."""

import json
import socket
import threading
import time
from contextlib import nullcontext

import pytest
import torch.distributed as dist

from tasks import TASKS
from tests.conftest import REFUSAL, ROOT, TINY, contents
from tests.helpers import forks
from tests.helpers.processes import NO_GPU, free_port
from trainer.cli import read_command_line
from trainer.commands.build import facts_of_start
from trainer.common.errors import UserError
from trainer.common.process import within
from trainer.config import options
from trainer.flags import TRAINER_GROUPS
from trainer.parallel.environment import RankEnvironment
from trainer.parallel.rendezvous import (
    MOST_NAMED,
    POLL_S,
    _await_host,
    _claim_rank,
    _name_of_attempt,
    refuse_differences,
)
from trainer.registry import find_task

LOCAL = {
    "--task", "--data-dir", "--cache-dir", "--num-workers", "--num-threads", "--gpu-ids", "--logger",
    "--local-rank", "--cuda-graphs", "--data-on", "--test-data",
}  # fmt: skip


def test_only_local_flags_may_differ_between_ranks():
    """Another rule compares `--task`, except for its folder."""
    groups = [*TRAINER_GROUPS, *(find_task(name).Config for name in TASKS)]
    assert {option.name for group in groups for option in options(group).values() if option.local} == LOCAL


# --- messages ----------------------------------------------------------------------------------------------------


def test_a_difference_is_named_with_both_values():
    stated = [{"--seed": 0, "--ks": (5, 10), "--lr": 0.1}, {"--seed": 0, "--ks": (5, 20), "--lr": None}]
    with pytest.raises(UserError) as refused:
        refuse_differences(stated, "do something")
    assert str(refused.value) == (
        "rank 1 of 2 differs from rank 0: --ks is 5 20 instead of 5 10; --lr is (none) instead of 0.1; do something"
    )


def test_a_few_of_many_differences_are_named():
    stated = [{f"--flag-{k}": rank > 1 for k in range(20)} for rank in range(300)]
    with pytest.raises(UserError) as refused:
        refuse_differences(stated, "do something")
    message = str(refused.value)
    assert message.startswith("rank 2 of 300 differs from rank 0 (298 ranks differ): --flag-0 is True instead of ")
    assert message.count("--flag") == MOST_NAMED and "; and 12 more; do something" in message


def test_facts_that_a_rank_lacks_are_not_compared_but_rank_0_must_have_each():
    refuse_differences([{"digest": "a"}, {}, {"digest": "a"}], "")
    with pytest.raises(UserError, match=r"rank 2 of 3 differs from rank 0: run is b instead of \(none\); no"):
        refuse_differences([{"digest": "a"}, {}, {"digest": "a", "run": "b"}], "no")


@pytest.mark.parametrize(
    ("on_rank_0", "on_rank_1", "is_refused"),
    [("1", "1", False), ("1", "2", True), (None, "1", True), ("1", None, False), (None, None, False)],
)
def test_ranks_that_see_another_run_than_rank_0_are_refused(on_rank_0, on_rank_1, is_refused, tmp_path, monkeypatch):
    """If --save-dir is a folder of each node, the ranks' nodes may have different runs in it."""
    stated, config = [], json.loads((ROOT / "tests/data_of_runs/cc51570/config.json").read_text())
    for rank, run_id in enumerate((on_rank_0, on_rank_1)):
        (tmp_path / f"{rank}" / "run").mkdir(parents=True)
        if run_id is not None:
            own = config | {"run_id": run_id * 12}
            (tmp_path / f"{rank}" / "run" / "config.json").write_text(json.dumps(own))
        monkeypatch.chdir(tmp_path / f"{rank}")
        flags, _ = read_command_line(["--device", "cpu", "--save-dir", "run"], several_devices=False)
        stated.append(facts_of_start(flags))
    expected = pytest.raises(UserError, match=f"the run in --save-dir .* is {on_rank_1}+ instead of")
    with expected if is_refused else nullcontext():
        refuse_differences(stated, "no")


# --- one process for each rank -----------------------------------------------------------------------------------


@pytest.fixture
def come(tmp_path):
    """Lets processes join one store, one after another; returns the error of each, or None."""

    def run(*environments, within_s):
        ends = [None] * len(environments)

        def claim(k, environment):
            try:
                store = dist.FileStore(str(tmp_path / "store"), -1)
                _claim_rank(store, environment, time.monotonic() + within_s)
            except (UserError, RuntimeError) as error:
                ends[k] = error

        threads = [threading.Thread(target=claim, args=pair) for pair in enumerate(environments)]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        for thread in threads:
            thread.join()
        return ends

    return run


def test_a_host_name_is_awaited_until_it_is_known(monkeypatch):
    found = iter([socket.gaierror(socket.EAI_NONAME, "unknown"), socket.gaierror(socket.EAI_AGAIN, "no answer"), None])

    def look_up(*_):
        if (error := next(found)) is not None:
            raise error

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    _await_host(RankEnvironment(0, 2, init_method="tcp://pod-0:29500"), time.monotonic() + 60)
    assert not [*found]


def test_all_ranks_join(come):
    assert come(*(RankEnvironment(rank, 3) for rank in (1, 0, 2)), within_s=60) == [None] * 3


def test_a_second_process_of_a_rank_is_refused_at_once_and_the_others_meet(come):
    first, second, third = come(RankEnvironment(0, 2), RankEnvironment(1, 2), RankEnvironment(1, 2), within_s=60)
    assert first is second is None
    assert isinstance(third, UserError) and str(third).startswith("rank 1 of 2: another process has already joined ")


def test_a_rank_that_does_not_join_is_named(come):
    ends = come(RankEnvironment(0, 3), RankEnvironment(1, 3), RankEnvironment(1, 3), within_s=1.2)
    assert [type(end) for end in ends] == [RuntimeError, RuntimeError, UserError]
    assert str(ends[0]) == "rank 2 did not join, and several processes joined as rank 1"


def test_another_number_of_ranks_is_refused(come):
    _, *others = come(RankEnvironment(0, 2), RankEnvironment(1, 3), RankEnvironment(2, 3), within_s=1)
    for rank, refusal in enumerate(others, 1):
        assert str(refusal).startswith(f"rank {rank} has WORLD_SIZE=3, but rank 0 has WORLD_SIZE=2; ")


def test_restarted_ranks_agree_on_a_name_without_the_dead():
    """The store keeps the numbers of dead processes."""
    store, names = dist.HashStore(), {}

    def start(process, rank, within_s=60):
        def agree():
            try:
                names[process] = _name_of_attempt(store, rank, 2, time.monotonic() + within_s)
            except RuntimeError as error:
                names[process] = str(error)

        thread = threading.Thread(target=agree)
        thread.start()
        time.sleep(3 * POLL_S)
        return thread

    def finish(*threads):
        for thread in threads:
            thread.join()

    finish(start("rank 0", 0), start("rank 1", 1))
    replaced = start("replaced", 1, within_s=1)
    finish(start("rank 1 again", 1), start("rank 0 again", 0), replaced)
    assert names["rank 0"] == names["rank 1"] != names["rank 0 again"] == names["rank 1 again"]
    assert names["replaced"] == "another process joined as rank 1"
    finish(start("alone", 0, within_s=0.2))
    assert names["alone"] == "rank 1 did not join"


def test_an_endless_wait_times_out():
    forever = threading.Event()
    assert within(0.05, forever.wait) is None
    forever.set()
    assert within(60, lambda: 7) == 7
    with pytest.raises(UserError, match="no"):
        within(60, lambda: refuse_differences([{"a": 1}, {"a": 2}], "no"))


# --- real processes ----------------------------------------------------------------------------------------------


@pytest.fixture
def meet(environment, tmp_path):
    """Starts processes, each given as (rank, flags); returns exit statuses, lists of error messages, and seconds."""

    def run(*processes, world_size=2, form="ddp", task=TINY):
        place = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        common = ["--multi-gpu", form, *task, "--device", "cpu", "--dist-timeout-s", 20]
        started, files = [], [tmp_path / f"err-{k}" for k in range(len(processes))]
        began = time.monotonic()
        for (rank, flags), err in zip(processes, files, strict=True):
            err.unlink(missing_ok=True)
            who = RankEnvironment(rank, world_size)
            started.append(forks.start([*common, *flags], environment | NO_GPU | place, tmp_path / "out", err, who))
        try:
            for process in started:
                process.join(150)
        finally:
            for process in started:
                process.kill()
        messages = [[line for line in err.read_text().splitlines() if line.startswith("error: ")] for err in files]
        return [process.exitcode for process in started], messages, time.monotonic() - began

    return run


def assert_refused(ended, *parts):
    """Asserts that every process printed the same error once."""
    statuses, messages, _ = ended
    assert statuses == [2] * len(statuses), messages
    (message,) = {line for lines in messages for line in lines}
    assert all(len(lines) == 1 for lines in messages)
    assert message.startswith("error: rank 1 of ") and all(part in message for part in parts), message


def test_ranks_with_other_flags_are_refused_before_anything_is_written(meet, tmp_path):
    folder = tmp_path / "run"
    ended = meet((0, ["--save-dir", folder]), (1, ["--save-dir", folder, "--seed", 5, "--num-train", 25]))
    assert_refused(ended, "--seed is 5 instead of 0", "--num-train is 25 instead of 24")
    assert not folder.exists()


def test_a_rank_that_lacks_a_file_is_named_with_its_host(meet, tmp_path):
    (tmp_path / "table.csv").write_text("x,y\n" + "1,a\n2,b\n" * 20)
    own = [(rank, ["--data-dir", tmp_path / name]) for rank, name in enumerate(["table.csv", "missing.csv"])]
    task = ["--task", "tabular", "--label", "y", "--num-threads", 1, "--save-dir", tmp_path / "run"]
    statuses, messages, _ = meet(*own, task=task)
    assert statuses == [2, 2] and not messages[1], messages
    (message,) = messages[0]
    missing = tmp_path / "missing.csv"
    assert message.startswith(f"error: rank 1 on {socket.gethostname()}: --data-dir {missing}: no such file")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_the_rank_of_another_job_is_refused(form, meet, tmp_path):
    ended = meet((0, ["--save-dir", tmp_path / "a"]), (1, ["--save-dir", tmp_path / "b"]), form=form)
    assert_refused(ended, f"--save-dir is {tmp_path / 'b'} instead of {tmp_path / 'a'}", "its own MASTER_PORT")
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


@pytest.mark.slow
def test_ranks_may_keep_their_data_in_different_places(meet, tmp_path):
    histories = "user item time\n" + "".join(f"{u} {i} {u + i}\n" for u in range(8) for i in range(1, 9))
    task = ["--task", "seqrec", "--epochs", 1, "--k-core", 0, "--maxlen", 8, "--hidden-units", 8, "--num-threads", 1,
            "--save-dir", tmp_path / "run"]  # fmt: skip
    own = []
    for rank in range(2):
        (tmp_path / f"data-{rank}.txt").write_text(histories)
        places = ["--data-dir", tmp_path / f"data-{rank}.txt", "--cache-dir", tmp_path / f"cache-{rank}"]
        own.append((rank, [*places, "--num-workers", rank]))
    statuses, messages, _ = meet(*own, task=task)
    assert statuses == [0, 0], messages
    before = contents(tmp_path / "run", REFUSAL)
    (tmp_path / "data-1.txt").write_text(histories.replace("3 4 7", "3 5 7"))
    statuses, messages, _ = meet(*own, task=[*task, "--fresh"])
    assert statuses == [2, 2] and not messages[1]  # once the ranks have met, only rank 0 prints
    (message,) = messages[0]
    assert message.startswith("error: rank 1 of 2 differs from rank 0: ") and "the digest of the data" in message
    assert contents(tmp_path / "run", REFUSAL) == before


@pytest.mark.slow
def test_a_duplicate_and_a_missing_rank_end_in_time(meet, tmp_path):
    statuses, messages, seconds = meet(*((rank, ["--save-dir", tmp_path]) for rank in (0, 1, 1)), world_size=3)
    assert sorted(statuses) == [1, 1, 2] and seconds < 60  # --dist-timeout-s is 20
    told = sorted(line for lines in messages for line in lines)
    assert len(told) == 3
    assert told[0].startswith("error: rank 0 of 3 could not join the other ranks at 127.0.0.1:")
    assert sum("another process has already joined" in line for line in told) == 1
    assert "rank 2 did not join, and several processes joined as rank 1" in told[0]
