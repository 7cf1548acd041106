"""Tests profiler.py check: its findings, which process reports them, and the exit status."""

import json
import resource
import signal
from pathlib import Path

import pytest
import torch

from tests.parallel.test_launch import free_port
from tests.profiling.conftest import CPU, TORCHRUN
from trainer.failure.errors import Failure
from trainer.flags import DeviceFlags, MultiDeviceFlags
from trainer.parallel.environment import RankEnvironment
from trainer.parallel.group import Group
from trainer.parallel.process_group import ProcessGroup
from trainer.parallel.strategy import SingleDevice, Strategy
from trainer.profiling import check, machine, processes


def test_check_reports_every_part_of_this_machine(profile_here, alone, tmp_path):
    arguments = ["--device", "cpu", "--save-dir", tmp_path / "runs", "--json", tmp_path / "check.json"]
    profile_here("check", *arguments, environment=alone)
    findings = {f["subject"]: f for f in json.loads((tmp_path / "check.json").read_text())["findings"]}
    assert {
        "versions",
        "GPU",
        "disk",
        "shared memory",
        "open files",
        "loader, 2 workers",
        "exchange",
    } <= findings.keys()
    assert {finding["level"] for finding in findings.values()} <= {"OK", "warning"}
    assert "one process" in findings["exchange"]["text"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], TORCHRUN])
def test_check_of_two_processes_reports_once(launcher, command):
    out = command(*launcher, "profiler.py", "check", "--device", "cpu", CUDA_VISIBLE_DEVICES="").stdout
    assert out.count("sums are right") == out.count(" disk: ") == 1


def test_wrong_sums_are_detected():
    class Wrong(Group):
        def start_all_reduce(self, values):
            values[-1] += 1
            return lambda: None

    assert check.sums_are_right(SingleDevice(CPU).group)
    assert not check.sums_are_right(Wrong([CPU]))
    finding = check.of_exchange(Strategy(Wrong([CPU])))
    assert finding.level == "BROKEN" and finding.advice


def test_an_unwritable_disk_is_broken():
    finding = machine.tested("disk", "choose another", machine.disk, Path("/proc/self/none"))
    assert str(finding).startswith("BROKEN   disk: /proc/self: ") and str(finding).endswith("; choose another")


def test_a_low_limit_of_open_files_causes_a_warning():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        finding = machine.tested("open files", "", machine.open_files)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert finding.level == "warning" and "256" in finding.text
    assert str(finding).startswith("warning  open files: at most 256; run ulimit -n")


def test_check_of_a_broken_part_has_status_1(profile_here, alone):
    out = profile_here("check", "--device", "cpu", "--save-dir", "/proc/self/none", status=1, environment=alone).out
    assert "BROKEN   disk" in out


def test_check_of_processes_that_do_not_meet_has_status_1(profile_here, monkeypatch):
    here = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in here.items():
        monkeypatch.setenv(name, str(value))
    done = profile_here("check", "--device", "cpu", "--dist-timeout-s", "1", status=1)
    assert "BROKEN   exchange" in done.out
    assert "rank 1 of 2 could not join the other ranks" in done.err


def test_processes_that_exit_while_joining_are_reported_in_one_line(alone, monkeypatch):
    def lost(self, value):
        raise RuntimeError("[third_party/gloo/pair.cc:553] Connection closed by peer\nmore")

    monkeypatch.setattr(ProcessGroup, "all_gather_object", lost)
    with pytest.raises(Failure, match=r"rank 0 of 1 could not join .* --dist-timeout-s 5: .*by peer$"):
        ProcessGroup(alone, MultiDeviceFlags("ddp", dist_timeout_s=5.0), DeviceFlags("cpu"))
    assert not torch.distributed.is_initialized()


def test_an_unusable_device_is_not_reported_as_late_ranks(alone, monkeypatch):
    def busy(self, devices):
        if devices:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")

    monkeypatch.setattr(ProcessGroup, "use", busy)
    with pytest.raises(Failure, match=r"^rank 0 of 1 failed in start-up: RuntimeError: CUDA error: all"):
        ProcessGroup(alone, MultiDeviceFlags("ddp"), DeviceFlags("cpu"))
    assert not torch.distributed.is_initialized()


def test_a_second_process_of_a_host_reports_its_failure(profile_here, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    beside = RankEnvironment(1, 2, 1, 2)
    done = profile_here("check", "--device", "cpu", "--dist-timeout-s", "1", environment=beside)
    assert done.out == ""
    assert done.err.startswith("error: rank 1 of 2 could not join the other ranks")


def test_machine_checks_do_not_delay_the_exchange(profile_here, alone, monkeypatch):
    monkeypatch.setattr(check, "of_this_machine", lambda *_: iter([check.Finding("OK", "disk", "slow")]))
    lines = profile_here("check", "--device", "cpu", environment=alone).out.splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["exchange:", "disk:"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_check_reports_nothing_as_broken(number, profile_here, monkeypatch):
    sizes = []
    monkeypatch.setattr(processes, "launch", lambda job, world_size: sizes.append(world_size) or 128 + number)
    assert "BROKEN" not in profile_here("check", "--device", "cpu", status=128 + number).out
    assert sizes == [2]


def test_a_process_that_crashes_in_the_exchange_is_broken(profile_here, monkeypatch):
    monkeypatch.setattr(check, "of_this_machine", lambda *_: iter([]))
    monkeypatch.setattr(processes, "launch", lambda job, world_size: 128 + signal.SIGSEGV)
    assert profile_here("check", "--device", "cpu", status=1).out.count("BROKEN   exchange") == 1
