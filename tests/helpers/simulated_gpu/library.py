"""Compiles `device.cpp`, if it is not compiled yet, and loads the library."""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")


def why_not() -> str:
    """Returns what this machine lacks for simulated GPUs, or "" if it lacks nothing."""
    import torch

    if torch.version.cuda or torch.version.hip:
        return "simulated GPUs need a CPU build of torch"
    return "" if shutil.which("g++") else "simulated GPUs need g++"


def compiled() -> Path:
    """Returns the library for this version of torch, in the folder for temporary files."""
    torch_folder = _torch_folder()
    made_of = hashlib.sha256(SOURCE.read_bytes() + f"{version('torch')} {torch_folder}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"simulated_gpu-{os.getuid()}"
    library = folder / f"{made_of}.so"
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        unfinished = folder / f"{made_of}.{os.getpid()}"
        include, lib = torch_folder / "include", torch_folder / "lib"
        options = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{include}", f"-I{include}/torch/csrc/api/include"]
        libraries = [f"-L{lib}", f"-Wl,-rpath,{lib}", "-lc10", "-ltorch_cpu"]
        subprocess.run(["g++", *options, str(SOURCE), "-o", str(unfinished), *libraries], check=True)
        os.replace(unfinished, library)  # atomic, because another process may compile at the same time
    return library


def load(library: Path) -> ctypes.CDLL:
    """Loads the library. Call before importing torch: torch detects backends once, and the first symbols loaded win."""
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent
