"""Helpers that start groups of processes and observe them from outside."""

import os
import signal
import socket
import time
from pathlib import Path

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun(world_size):
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}",
            "main_multi_gpu.py", "--multi-gpu", "ddp"]  # fmt: skip


def num_training_ranks(folder):
    """Returns the number of processes that have trained on a sample; forwards on placeholder batches do not count."""
    return sum('"index": [' in text.replace('"index": []', "") for text in (f.read_text() for f in folder.iterdir()))


def session_members(session):
    """Returns the live processes of a session, which is the sixth field of /proc/PID/stat on Linux."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # the process has just ended
            continue
        if int(its_session) == session and state != "Z":
            members.append(int(stat.parent.name))
    return members


def left_of_session(session, within_s=5):
    """Returns the processes still alive after a wait: Python's resource tracker ends shortly after its parent."""
    deadline = time.monotonic() + within_s
    while (left := session_members(session)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def end_session(session):
    for pid in session_members(session):
        os.kill(pid, signal.SIGKILL)
