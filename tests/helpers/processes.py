"""Groups of processes: what it takes to start them, and how they look from outside."""

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
    """Processes that have trained on a sample; before that each makes a forward that does not count."""
    return sum('"index": [' in text.replace('"index": []', "") for text in (f.read_text() for f in folder.iterdir()))


def session_members(session):
    """Living processes of a session; Linux keeps it as the sixth field of /proc/PID/stat."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has just ended
            continue
        if int(its_session) == session and state != "Z":
            members.append(int(stat.parent.name))
    return members


def left_of_session(session, within_s=5):
    """Its living processes, when all have had time to go: Python's resource tracker ends a moment after its parent."""
    deadline = time.monotonic() + within_s
    while (left := session_members(session)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def end_session(session):
    for pid in session_members(session):
        os.kill(pid, signal.SIGKILL)
