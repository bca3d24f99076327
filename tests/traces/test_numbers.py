"""Numbers from outside: finite, no booleans, no texts within lists; JSON that any reader takes."""

from __future__ import annotations

import json
from math import inf, nan

import pytest
from pydantic import ValidationError

from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.platform import Link, Measured, Platform, Roofline
from moereplay.traces.documents import DocumentError, from_json, json_text
from moereplay.traces.frozen import Frozen, first_fault
from moereplay.traces.schema import Geometry
from tests.kit.collecting import case
from tests.kit.command import moereplay_here

SIZES = {"layers": 1, "experts": 4, "k": 2, "expert_bytes": (8,)}


class Several(Frozen):
    """Fields of each kind."""

    count: int = 0
    rate: float | None = None
    flag: bool = False
    either: bool | int = 0
    pairs: tuple[tuple[int, float], ...] = ()
    by_name: dict[str, float] = {}
    texts: tuple[str, ...] = ()


def test_what_is_no_finite_number_is_refused_by_its_field():
    for said in [
        {"count": True},
        {"rate": False},
        {"pairs": [[True, 1.0]]},
        {"pairs": [[1, "2"]]},
        {"by_name": {"a": True}},
        {"rate": inf},
        {"rate": -inf},
        {"rate": nan},
        {"rate": "1e400"},
        {"pairs": [[1, inf]]},
        {"by_name": {"a": nan}},
    ]:
        with case(said):
            with pytest.raises(ValidationError) as refused:
                Several.model_validate(said)
            assert first_fault(refused.value).startswith(next(iter(said)))


def test_numbers_flags_and_the_texts_of_options_are_taken():
    for said in [
        {"flag": True},
        {"either": True},
        {"count": "7"},
        {"rate": "2.5e9"},
        {"by_name": {"a": "3"}},
        {"texts": ["1"]},
        {"rate": 1},
        {"pairs": [[1, 2]]},
    ]:
        assert Several.model_validate(said) != Several()


def test_machines_settings_and_models_hold_to_it():
    for model, said, field in [
        (Link, {"bytes_per_s": True}, "bytes_per_s"),
        (Link, {"bytes_per_s": 1e9, "latency_ns": True}, "latency_ns"),
        (Link, {"bytes_per_s": inf}, "bytes_per_s"),
        (Link, {"bytes_per_s": 1e300}, "bytes_per_s"),
        (Link, {"bytes_per_s": 1e9, "by_size": [[True, 1e9]]}, "by_size"),
        (Roofline, {"flops": inf, "memory_bytes_per_s": 1e9}, "flops"),
        (Roofline, {"flops": 1e9, "memory_bytes_per_s": 1e9, "formats": {"Q4_K": True}}, "formats"),
        (Measured, {"expert_by_size": [[1, 1e300]]}, "expert_by_size"),
        (Platform, {"name": "m", "links": [{"bytes_per_s": 1}], "compute": Measured(), "memory_bytes": 1e300}, "memo"),
        (ReplayConfig, {"warm": [["0", "1"]]}, "warm"),
        (ReplayConfig, {"warm": [[True, False]]}, "warm"),
        (ReplayConfig, {"seed": True}, "seed"),
        (Geometry, {**SIZES, "experts": True}, "experts"),
        (Geometry, {**SIZES, "expert_bytes": ["8"]}, "expert_bytes"),
    ]:
        with case(model, said, field):
            with pytest.raises(ValidationError) as refused:
                model.model_validate(said)
            assert field in first_fault(refused.value)


def test_json_has_null_for_what_it_lacks():
    document = {"a": [1, inf, (nan, 2.5)], "b": {"c": -inf}, "d": "Infinity"}
    assert json.loads(json_text(document)) == {"a": [1, None, [None, 2.5]], "b": {"c": None}, "d": "Infinity"}
    assert json_text({"b": 1, "a": 2}, sort_keys=True, separators=(",", ":")) == '{"a":2,"b":1}'


def test_json_with_numbers_that_json_lacks_is_refused():
    for text in ['{"a": Infinity}', "[NaN]", "[-Infinity]", "[1e400]", '{"a": [[-1e999]]}']:
        with case(text), pytest.raises(DocumentError, match="finite"):
            from_json(text)


def test_an_option_that_is_no_finite_number_is_named():
    for typed in [
        "calibrate logs log.csv --hold-out nan",
        "recommend miniature --target-tokens-per-s inf",
        "bounds miniature --mass nan",
        "validate miniature --tolerance-time inf",
        "split miniature --out x.zarr --share inf",
    ]:
        ended = moereplay_here(*typed.split())
        assert (ended.returncode, ended.stdout) == (2, "") and typed.split()[-2] in ended.stderr
