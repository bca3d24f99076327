"""Memory of a model on the CPU: what is freed between what is kept goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

#: 200 MB in blocks too small for mappings of their own, with something small that is kept behind each.
HOLES = """
import torch
from moereplay.tracegen.quality.session import return_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

blocks = [(torch.ones(25_000), torch.ones(16)) for _ in range(2_000)]
kept = [small for _, small in blocks]
del blocks
before = resident()
return_freed_memory()
print(before - resident())
"""


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep none of it")
def test_holes_between_what_is_kept_go_back() -> None:
    ended = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert int(ended.stdout) > 150e6
