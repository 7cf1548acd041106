import platform
import subprocess
import sys

import pytest

_COUNTS_FAULTS = """
import ctypes, resource, torch
from trainer.parallel.devices import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        tensors = [torch.ones(2**20) for _ in range(8)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

M_MMAP_THRESHOLD = -3
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # glibc's own threshold moves, so that nothing is sure
faults()
returned = faults()
keep_freed_memory()
faults()
print(returned, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_freed_memory_is_reused_without_page_faults() -> None:
    found = subprocess.run([sys.executable, "-c", _COUNTS_FAULTS], capture_output=True, text=True, check=True)
    returned, kept = map(int, found.stdout.split())
    assert kept < returned / 10
