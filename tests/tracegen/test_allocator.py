"""Memory of a model on the CPU: what is freed between what is kept goes back to the system."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from moereplay.tracegen.quality.session import return_freed_memory


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep none of it")
def test_holes_between_what_is_kept_go_back() -> None:
    """200 MB in blocks too small for mappings of their own, with something small that is kept behind each."""
    return_freed_memory()  # what other tests have left
    blocks = [(torch.ones(25_000), torch.ones(16)) for _ in range(2_000)]
    kept = [small for _, small in blocks]
    del blocks
    before = resident()
    return_freed_memory()
    assert before - resident() > 150e6 and len(kept) == 2_000
