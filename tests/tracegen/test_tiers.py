"""The tier that a policy names is the tier that computes: what is multiplied by is what the bytes on disk restore."""

from __future__ import annotations

import hashlib
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load as read_tensors
from torch import Tensor

from moereplay.simulator.config import configure
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live import experts
from moereplay.tracegen.live.experts import Tiers, tiers_of
from moereplay.tracegen.live.run import prepare
from moereplay.tracegen.precision import affine, contract
from moereplay.tracegen.precision.contract import Packed, path_of
from moereplay.tracegen.quality.evaluation import Evaluation
from tests.kit.live_runs import DTYPES, TO_RUN, live, loaded, modules
from tests.tracegen.test_evaluation import Likelihood

#: The second is stored as (in, out), and has biases.
FAMILIES = ("olmoe", "gpt_oss")


class Used(NamedTuple):
    """A matrix that an expert's tokens were multiplied by."""

    module: Any
    parameter: str
    expert: int
    bits: float | None
    weight: Tensor


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Used]:
    """Every matrix of every expert that runs, hooked where it is multiplied by."""
    seen, asked, project, run_expert = [], [], experts._project, experts.run_expert

    def spied_expert(module: Any, expert: int, state: Tensor, bits: float | None = None, weights: Any = None) -> Tensor:
        asked.append(bits)
        return run_expert(module, expert, state, bits, weights)

    def spied(module: Any, name: str, expert: int, state: Tensor, weight: Tensor) -> Tensor:
        seen.append(Used(module, name, expert, asked[-1], weight.clone()))
        return project(module, name, expert, state, weight)

    monkeypatch.setattr(experts, "run_expert", spied_expert)
    monkeypatch.setattr(experts, "_project", spied)
    return seen


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> str:
    """Our own quantiser, but with everything that it packs on disk: there without any library."""
    monkeypatch.setattr(contract, "load", lambda name: replace(affine.QUANTISER, keeps=True, moves=True))
    return "affine"


def on_disk(tiers: Tiers, one: Used, quantiser: str) -> Tensor:
    """Restore this matrix from its file's bytes, without the program's own reader."""
    assert one.bits is not None
    found = contract.quantiser_at(quantiser, one.bits)
    own = getattr(one.module, one.parameter).data[one.expert]
    weight = own.T if one.module.is_transposed else own
    path = path_of(tiers._key(found, one[:4], weight))  # pyright: ignore[reportArgumentType]
    assert path is not None
    data = path.read_bytes()
    assert hashlib.sha256(data[32:]).digest() == data[:32]
    tensors = read_tensors(data[32:])
    restored = found.restore(Packed(tensors, (weight.shape[0], weight.shape[1]), one.bits), own.dtype)
    return restored.T if one.module.is_transposed else restored


def check(used: list[Used], quantiser: str, family: str, dtype: torch.dtype, miss: str) -> set[float | None]:
    """Run under a policy, compare every matrix with its bytes; returns the widths that ran."""
    config, model = configure(capacity="30%", miss=miss), loaded(family, dtype)
    ready = prepare(model, TO_RUN, config, modules=modules(family, dtype), quantiser=quantiser)
    ready.run(quality=False)
    tiers = tiers_of(ready.modules, quantiser, "")
    for one in used:
        own = getattr(one.module, one.parameter).data[one.expert]
        expected = own if one.bits is None else on_disk(tiers, one, quantiser)
        assert torch.equal(one.weight, expected)
        assert one.bits is None or not torch.equal(one.weight, own)
    return {one.bits for one in used}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_computes_is_what_the_bytes_of_the_named_tier_restore(
    family: str, dtype: torch.dtype, used: list[Used], kept: str
) -> None:
    assert check(used, kept, family, dtype, "lowest_bit:bits=8/4") == {4}


def test_each_tier_of_a_policy_that_mixes_them_computes_with_its_own_bytes(used: list[Used], kept: str) -> None:
    # of float32 experts: the tier of 32 bits is the weights themselves
    assert check(used, kept, "olmoe", torch.float32, "cascade:bits=32/4/2") >= {None, 2}


# ---------------------------------------------------------------- what is held, and what is said


def test_what_was_used_last_is_held_and_what_was_not_goes_first() -> None:
    module: Any = modules("olmoe").sites[0].experts
    one = module.down_proj[0].nbytes
    tiers = Tiers(room=2 * one)
    first, second = (tiers.weight(module, "down_proj", expert, 4) for expert in (0, 1))
    assert tiers.weight(module, "down_proj", 0, 4) is first
    tiers.weight(module, "down_proj", 2, 4)
    assert tiers.weight(module, "down_proj", 0, 4) is first
    again = tiers.weight(module, "down_proj", 1, 4)
    assert again is not second
    assert torch.equal(again, second)


def test_a_weight_that_changed_in_memory_is_packed_anew(kept: str) -> None:
    module: Any = deepcopy(modules("olmoe").sites[0].experts)
    first = Tiers(kept).weight(module, "down_proj", 0, 4).clone()
    module.down_proj.data *= 2
    assert torch.equal(Tiers(kept).weight(module, "down_proj", 0, 4), 2 * first)


def test_what_has_no_room_restored_is_not_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one restored matrix and for every packed one: of three turns over two experts only the first packs."""
    module: Any = modules("olmoe").sites[0].experts
    packed: list[int] = []
    own = contract.load("affine")
    counted = replace(own, pack=lambda weight, bits: packed.append(1) or own.pack(weight, bits))
    monkeypatch.setattr(contract, "load", lambda name: counted)
    tiers = Tiers(room=1)
    turns = [[tiers.weight(module, "down_proj", expert, 4) for expert in (0, 1)] for _ in range(3)]
    assert len(packed) == 2
    assert all(torch.equal(*pair) for pair in zip(turns[0], turns[2], strict=True))


def test_a_weight_larger_than_the_room_is_used_all_the_same() -> None:
    module: Any = modules("olmoe").sites[0].experts
    assert Tiers(room=1).weight(module, "down_proj", 0, 4).shape == module.down_proj[0].shape


def test_a_run_says_how_its_experts_were_stored_and_at_how_many_bits_per_weight() -> None:
    ran = live("olmoe", miss="lowest_bit:bits=8/4")
    (stored,) = ran.stored
    assert (stored.bits, stored.quantiser) == (4, "affine")
    assert stored.bits_per_weight > 4
    assert ran.header.provenance.notes[0].endswith(", experts at 8 bits by affine, 4 bits by affine")


def test_a_run_that_rounds_nothing_says_nothing_of_it() -> None:
    ran = live("olmoe", miss="lowest_bit:bits=32")
    assert ran.stored == ()
    assert "affine" not in ran.header.provenance.notes[0]


def test_a_quantiser_is_refused_before_the_model_runs() -> None:
    config = configure(capacity="30%", miss="fetch:bits=3")
    with pytest.raises(RecordError, match=r"unknown quantiser 'afine': did you mean affine\?"):
        prepare(loaded("olmoe"), TO_RUN, config, modules=modules("olmoe"), quantiser="afine")


def test_tasks_under_a_quantiser_of_another_version_are_asked_again_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = {"low": configure(capacity="40%", reset="request", miss="fetch:bits=3"), "lru": configure(capacity="40%")}

    def asked() -> Evaluation:
        return Evaluation(loaded("olmoe"), modules("olmoe"), sets, 0, 1, tmp_path)

    task, nothing = Likelihood(), lambda *given: None
    rows = [row for frame in asked().rows([task], nothing, nothing) for row in frame.to_dicts()]
    said = {row["set"]: row["about"]["policies"].partition("experts at ")[2] for row in rows}
    assert said == {"unmodified": "", "low": "3 bits by affine", "lru": ""}
    before = {job.name: job.key for job in asked().jobs(task)}
    monkeypatch.setattr(contract, "version_of", lambda library: "2")
    after = {job.name: job.key for job in asked().jobs(task)}
    assert {name for name in before if before[name] != after[name]} == {"low"}
