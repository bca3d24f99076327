"""A live model whose experts are really read: the decisions of the emulated run, the bits of the unmodified model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from simulator.config import configure
from simulator.errors import ConfigError
from simulator.reference.engine import FinishedRun
from tests.kit.live_runs import DTYPES, loaded, modules, tokens
from tracegen.live.offloaded import Transfers, check_offloadable, contents_of, layout_of, weights_in
from tracegen.live.run import LiveRequest, Prepared, prepare
from tracegen.live.source import Emulation
from tracegen.offload.arena import Arena
from tracegen.offload.bench import slots_needed
from tracegen.offload.comparison import agreement
from tracegen.offload.slow_tier import Memory, Throttled
from tracegen.steps import Stepper

IDS = tokens(10)
PARTS = [IDS[:6], *([token] for token in IDS[6:])]
CLASSES = ("hits", "late", "misses", "compulsory", "collisions", "evictions", "bytes_demand")


def prepared(family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Prepared:
    config = configure(**{"capacity": "30%", **settings})
    return prepare(loaded(family, dtype), [LiveRequest(IDS, 6)], config, modules=modules(family, dtype))


def transfers_of(ready: Prepared, rate: float | None = None) -> Transfers:
    layout = layout_of(ready.modules)
    slow = Memory(layout, "cpu", contents_of(ready.modules, layout))
    arena = Arena(slots_needed(ready.plan), max(layout.sizes), "cpu")
    return Transfers(ready.modules, Throttled(slow, rate) if rate else slow, arena)


def run(ready: Prepared, transfers: Transfers | None = None) -> tuple[list[Tensor], FinishedRun]:
    """Logits of every pass, and the engine's run."""
    emulation = Emulation(ready.modules, ready.plan, True, ready.header.lookahead_depth, transfers)
    stepper = Stepper(ready.loaded.model)
    logits = [emulation.forward(partial(stepper.step, part), len(part), 0, len(part) > 1) for part in PARTS]
    ran = emulation.close()
    if transfers:
        transfers.close()
    return logits, ran


@contextmanager
def eager(ready: Prepared) -> Iterator[Stepper]:
    """The model alone, with its `eager` experts: others round otherwise, and a later gate may then choose otherwise."""
    model = ready.loaded.model
    own = model.get_experts_implementation()
    model.set_experts_implementation("eager")
    try:
        yield Stepper(model)
    finally:
        model.set_experts_implementation(own)


def alone(ready: Prepared) -> list[Tensor]:
    """Logits of every pass."""
    with eager(ready) as stepper:
        return [stepper.step(part) for part in PARTS]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss", "deepseek_v3", "granitemoe"])
def test_without_prefetch_decisions_are_the_emulated_runs_and_no_bit_changes(family: str, dtype: torch.dtype) -> None:
    for settings in ({}, {"contract": "sequential", "eviction": "least_stale"}):
        ready = prepared(family, dtype, **settings)
        logits, real = run(ready, transfers_of(ready))
        with eager(ready):
            _, emulated = run(ready)
        said = agreement(real.events, emulated.events)
        assert said["same"] == said["accesses"] and said["first_divergence"] is None
        ours, theirs = (each.counters.totals(each.end_ns) for each in (real, emulated))
        assert {name: ours[name] for name in CLASSES} == {name: theirs[name] for name in CLASSES}
        assert ours["misses"] > 0 and ours["hits"] > 0
        assert all(torch.equal(*pair) for pair in zip(logits, alone(ready), strict=True))


def test_prefetch_changes_no_bit_either_and_a_slow_link_takes_its_time() -> None:
    ready = prepared("olmoe", prefetch="top_k")
    size = layout_of(ready.modules).sizes[0]
    logits, real = run(ready, transfers_of(ready, size / 2e-3))  # 2 ms for each expert
    assert all(torch.equal(*pair) for pair in zip(logits, alone(ready), strict=True))
    totals = real.counters.totals(real.end_ns)
    assert totals["prefetch_started"] > 0
    assert real.end_ns >= 2e6 * (totals["misses"] + totals["prefetch_used"])


def test_other_bytes_than_the_models_end_the_run() -> None:
    ready = prepared("olmoe")
    layout = layout_of(ready.modules)
    content = next(contents_of(ready.modules, layout))
    module = ready.modules.sites[0].experts
    slot = torch.from_numpy(content)
    assert weights_in(slot, module, 0).keys() == {"gate_up_proj", "down_proj"}
    slot[layout.sizes[0] - 1] ^= 1
    with pytest.raises(AssertionError, match="expert 0 holds other bytes"):
        weights_in(slot, module, 0)


@pytest.mark.parametrize("settings", [{"routing": "cache_prior"}, {"miss": "drop"}, {"miss": "lowest_bit"}], ids=str)
def test_policies_that_change_what_runs_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a model runs its own choice; use routing standard and miss fetch"):
        check_offloadable(prepared("olmoe", **settings).plan)
    check_offloadable(prepared("olmoe").plan)
