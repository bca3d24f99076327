"""Quantisers of other people's libraries: every clause of the contract, their own kernels, and live runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moereplay_quantisers.torchao_intx import as_theirs
from torch.nn.functional import linear

from moereplay.simulator.config import configure
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live.run import run
from moereplay.tracegen.precision import BEST, CONTRIB, GROUP, contract
from moereplay.tracegen.precision.contract import Packed, imported, load, quantiser_at
from moereplay.traces.plugins import plugins
from tests.commands.test_quantiser_cli import LOW, Run
from tests.kit.every import every
from tests.kit.live_runs import TO_RUN, loaded, modules
from tests.kit.live_runs import live as live_here
from tests.kit.quantiser_clauses import CLAUSES, DTYPES, FEW, drawn
from tests.kit.recordings import ROOT
from tests.tracegen.test_tiers import Used, check


def test_the_core_knows_the_names_of_the_entry_points() -> None:
    own = [name for name, point in plugins(GROUP).items() if point.dist and point.dist.name == "moereplay-quantisers"]
    assert sorted(own) == sorted(CONTRIB)
    assert set(BEST.values()) <= set(own)


@pytest.mark.parametrize("name", CONTRIB)
def test_a_quantiser_keeps_every_clause(name: str, subtests: pytest.Subtests) -> None:
    quantiser = load(name)
    assert quantiser.name == name
    for clause in CLAUSES:
        with subtests.test(clause=clause.__name__):
            clause(quantiser)


# ---------------------------------------------------------------- beside their own kernels


@every("bits", FEW)
def test_hqq_restores_what_its_own_quantiser_does(bits: int) -> None:
    library: Any = imported("hqq.core.quantize").Quantizer
    quantiser, weight = load("hqq"), drawn((64, 256))
    values, meta = library.quantize(weight, nbits=bits, group_size=64, axis=1, device="cpu")
    for each in ("scale", "zero"):
        meta[each] = meta[each].half().float()  # as its layers keep them
    theirs = library.dequantize(values, meta | {"compute_dtype": torch.float32})
    assert torch.equal(quantiser.restore(quantiser.pack(weight, bits), torch.float32), theirs)


@every("name, kind", [("bitsandbytes", "nf4"), ("bitsandbytes_fp4", "fp4")])
def test_bitsandbytes_multiplies_by_what_is_restored(name: str, kind: str) -> None:
    library: Any = imported("bitsandbytes")
    for dtype in DTYPES[:2]:
        quantiser, weight, state = load(name), drawn((64, 256), dtype), drawn((5, 256), dtype, seed=1)
        values, kept = library.functional.quantize_4bit(weight, blocksize=64, quant_type=kind)
        ours = linear(state, quantiser.restore(quantiser.pack(weight, 4), dtype))
        assert torch.equal(ours, library.matmul_4bit(state, values.t(), kept)), dtype


@every("bits", FEW)
def test_torchao_multiplies_by_what_is_restored(bits: int) -> None:
    quantiser, weight, state = load("torchao_intx"), drawn((64, 256)), drawn((5, 256), seed=1)
    kept = quantiser.pack(weight, bits)
    assert torch.equal(linear(state, quantiser.restore(kept, torch.float32)), linear(state, as_theirs(kept)))


def test_a_width_that_a_quantiser_lacks_is_refused() -> None:
    with pytest.raises(RecordError, match="quantiser bitsandbytes has 8, 4 bits, not 3; take affine, or other bits"):
        quantiser_at("bitsandbytes", 3)


# ---------------------------------------------------------------- live


def test_the_same_of_a_quantiser_that_keeps_what_it_packs(used: list[Used]) -> None:
    assert check(used, "hqq", "olmoe", torch.bfloat16, "lowest_bit:bits=8/3") == {3}


def test_another_process_would_run_from_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    first = live_here("olmoe", quality=True, miss="fetch:bits=3", quantiser="hqq")

    def packed_again(*given: object) -> Packed:
        raise AssertionError("it was packed again")

    found = contract.load("hqq")
    monkeypatch.setattr(contract, "load", lambda name: replace(found, pack=packed_again))
    second = live_here("olmoe", quality=True, miss="fetch:bits=3", quantiser="hqq")
    assert first.quality == second.quality
    assert first.stored == second.stored


def test_a_width_is_refused_before_the_model_runs() -> None:
    config = configure(capacity="30%", miss="fetch:bits=3")
    with pytest.raises(RecordError, match="quantiser bitsandbytes has 8, 4 bits, not 3"):
        run(loaded("olmoe"), TO_RUN, config, modules=modules("olmoe"), quantiser="bitsandbytes")


def test_the_best_by_width_is_named_with_its_version_and_another_run_finds_what_it_packed(
    live: Run, tmp_path: Path
) -> None:
    first, second = (json.loads(live(*LOW, "--quantiser", "best", "--json").stdout) for _ in range(2))
    assert first["stored"][0]["quantiser"].startswith("hqq 0.")
    assert first == second
    assert list((tmp_path / "cache" / "moereplay" / "packed-experts").rglob("*.packed"))


def test_a_width_that_it_lacks_is_one_line(live: Run) -> None:
    refused = live("--miss", "lowest_bit:bits=8/3", "--quantiser", "bitsandbytes")
    assert refused.returncode == 2
    assert "quantiser bitsandbytes has 8, 4 bits, not 3; take affine" in " ".join(refused.stderr.split())


@pytest.mark.long
def test_nothing_that_a_library_says_of_itself_is_seen() -> None:
    command = [sys.executable, "-m", "moereplay", "live", "miniature", "--limit", "1", "--max-new-tokens", "2"]
    command += [*LOW, "--quantiser", "torchao"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0
    assert [line.partition(" ")[0] for line in ran.stderr.splitlines()] == ["loading", "ran"]
