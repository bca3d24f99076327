"""Saved responses: which rows belong to tokens that ran, wherever and however a server spells them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.importers import registry as importers
from moereplay.traces.importers.contract import Options
from moereplay.traces.schema import Geometry
from tests.kit.collecting import case
from tests.kit.importing import SIZED, imported, refusal, written

LAYERS, EXPERTS, K = 6, 32, 4
MODEL = Options(geometry=Geometry(layers=LAYERS, experts=EXPERTS, k=K, expert_bytes=(7,) * LAYERS))
SHAPE = SIZED.model_copy(update={"shape": (LAYERS, K)})


def text(tokens: int, seed: int = 0) -> np.ndarray:
    """(T, L, k) ids of which three in four rows stay from one token to the next; every row is of its own."""
    random = np.random.default_rng(seed)
    rows = random.permuted(np.tile(np.arange(EXPERTS), (tokens, LAYERS, 1)), axis=-1)[..., :K]
    for token in range(1, tokens):
        stays = random.random(LAYERS) < 0.75
        rows[token][stays] = rows[token - 1][stays]
    return rows


def independent(tokens: int) -> np.ndarray:
    """(T, L, k) ids that have nothing in common with the token before."""
    return np.random.default_rng(1).permuted(np.tile(np.arange(EXPERTS), (tokens, LAYERS, 1)), axis=-1)[..., :K]


def flat(rows: np.ndarray, dtype: str = "<i4") -> str:
    return base64.b64encode(rows.astype(dtype).tobytes()).decode()


def npy(rows: np.ndarray) -> str:
    stream = io.BytesIO()
    np.save(stream, rows.astype(np.uint8))
    return base64.b64encode(stream.getvalue()).decode()


def native(rows: np.ndarray, prompt: int, generated: int, **more: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": generated}
    return {"text": "x", "meta_info": counts | {"routed_experts": flat(rows)} | more}


def usage(prompt: int, generated: int, cached: int | None = None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": generated} | details}


def saved(folder: Path, *found: Any) -> Path:
    return written(folder / "a.jsonl", "".join(f"{json.dumps(each)}\n" for each in found))


def requests(path: Path, options: Options = SIZED) -> list[tuple[int, np.ndarray]]:
    """Prompt tokens and rows of each request."""
    return [(each.prompt_length, each.chosen) for each in imported(path, options)[1]]


def same(found: list[tuple[int, np.ndarray]], *expected: tuple[int, np.ndarray]) -> None:
    assert [(prompt, rows.tolist()) for prompt, rows in found] == [(prompt, rows.tolist()) for prompt, rows in expected]


def notes(path: Path, options: Options = SIZED) -> str:
    return " | ".join(importers.read(path, options).notes)


# ---------------------------------------------------------------- where the rows are

ROWS = text(12)  #: of 10 prompt tokens and 3 generated ones, of which the last was not computed
DTYPED = {"data": flat(ROWS, "u1"), "shape": list(ROWS.shape)}
SPELLED: dict[str, Any] = {
    "lists": ROWS.tolist(),
    "npy": npy(ROWS),
    "data and shape": DTYPED,
    "with a dtype": DTYPED | {"dtype": "uint8", "encoding": "base64", "start": 0},
    "base85": DTYPED | {"data": base64.b85encode(ROWS.astype("u1").tobytes()).decode(), "encoding": "base85"},
    "NeMo-RL": f"nrlre1:int16:12x{LAYERS}x{K}:{flat(ROWS, '<i2')}",
    "flat": flat(ROWS),
}
ENVELOPES: dict[str, Any] = {
    "choice": lambda ids: {"choices": [{"routed_experts": ids}], **usage(10, 3)},
    "sgl_ext": lambda ids: {"choices": [{"sgl_ext": {"routed_experts": ids}}], **usage(10, 3)},
    "sgl_ext at the top": lambda ids: {"choices": [{}], "sgl_ext": {"routed_experts": ids}, **usage(10, 3)},
    "sglext": lambda ids: {"choices": [{"index": 0}], "sglext": {"routed_experts": ids}, **usage(10, 3)},
    "meta_info of a choice": lambda ids: {"choices": [native(ROWS, 10, 3, routed_experts=ids)]},
    "nvext": lambda ids: {"choices": [{}], "nvext": {"routed_experts": ids}, **usage(10, 3)},
    "engine_data": lambda ids: {
        "choices": [{}],
        "nvext": {
            "engine_data": {"prompt_token_ids": [1] * 10, "completion_token_ids": [2] * 3, "routed_experts": ids}
        },
    },
    "message": lambda ids: {
        "choices": [{"message": {"routed_experts": ids, "prompt_token_ids": [1] * 10, "generation_token_ids": [2] * 3}}]
    },
    "batch": lambda ids: {
        "custom_id": "a",
        "response": {"body": {"choices": [{"routed_experts": ids}], **usage(10, 3)}},
    },
    "session": lambda ids: {"records": [{"request": {}, "response": native(ROWS, 10, 3, routed_experts=ids)}]},
    "trainer": lambda ids: {
        "trajectory": [{"tokens": {"prompt_ids": [1] * 10, "completion_ids": [2] * 3, "routed_experts": ids}}]
    },
}


def test_rows_are_found_in_every_envelope_and_spelling(tmp_path: Path) -> None:
    pairs = [*((envelope, "flat") for envelope in ENVELOPES), *(("choice", spelled) for spelled in SPELLED)]
    for envelope, spelled in [*pairs, *zip(ENVELOPES, SPELLED, strict=False)]:
        with case(envelope, spelled):
            same(requests(saved(tmp_path, ENVELOPES[envelope](SPELLED[spelled])), SHAPE), (10, ROWS))


def test_generate_requests_of_several_prompts_are_a_list(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", json.dumps([native(text(5, 1), 3, 3), native(text(8, 2), 4, 5)]))
    same(requests(path), (3, text(5, 1)), (4, text(8, 2)))


# ---------------------------------------------------------------- tokens of the prefix cache


def turns(cached: tuple[int | None, ...]) -> list[dict[str, Any]]:
    """Three turns of a conversation, of which the server returns every row each time."""
    whole = text(39)
    parts = zip(((10, 3), (20, 4), (36, 4)), cached, strict=True)
    return [
        native(whole[: prompt + made - 1], prompt, made, **({} if known is None else {"cached_tokens": known}))
        for (prompt, made), known in parts
    ]


def test_a_turn_does_not_count_the_turns_before_it_again(tmp_path: Path) -> None:
    for cached in [(0, 12, 23), (None, None, None)]:
        path, whole = saved(tmp_path, *turns(cached)), text(39)
        same(requests(path), (10, whole[:12]), (8, whole[12:23]), (13, whole[23:]))
        assert "35 prompt tokens came from the engine's prefix cache" in notes(path)
        assert ("35 repeat the rows" in notes(path)) == (cached[0] is None)


def test_rows_that_were_computed_again_count_again(tmp_path: Path) -> None:
    assert [len(rows) for _, rows in requests(saved(tmp_path, *turns((0, 0, 0))))] == [12, 23, 39]


def test_cached_tokens_are_left_out_wherever_they_are_counted(tmp_path: Path) -> None:
    for response in [
        {"choices": [{"routed_experts": npy(ROWS)}], **usage(10, 3, 7)},
        {"choices": [{"sgl_ext": {"routed_experts": flat(ROWS), "cached_tokens_details": {"device": 4, "host": 3}}}]}
        | usage(10, 3),
        native(ROWS, 10, 3, cached_tokens=7),
        {"choices": [{"routed_experts": npy(ROWS)}], "num_cached_tokens": 7, **usage(10, 3)},
        {
            "choices": [{"routed_experts": np.where(np.arange(12)[:, None, None] < 7, -1, ROWS).tolist()}],
            **usage(10, 3),
        },
        {"choices": [{"routed_experts": np.where(np.arange(12)[:, None, None] < 7, 0, ROWS).tolist()}], **usage(10, 3)},
    ]:
        same(requests(saved(tmp_path, response), SHAPE), (3, ROWS[7:]))


def test_the_prompts_last_token_is_computed_whatever_is_cached(tmp_path: Path) -> None:
    same(requests(saved(tmp_path, native(ROWS, 10, 3, cached_tokens=10)), SHAPE), (1, ROWS[9:]))


def test_choices_of_one_prompt_compute_it_once(tmp_path: Path) -> None:
    other = np.concatenate([ROWS[:10], text(4, 5)])
    choices = [{"sgl_ext": {"routed_experts": flat(rows)}} for rows in (ROWS, other)]
    path = saved(tmp_path, {"choices": choices, **usage(10, 8)})
    same(requests(path), (10, ROWS), (1, other[9:]))
    both = saved(tmp_path, {"choices": choices, **usage(10, 8, 0)})
    same(requests(both), (10, ROWS), (10, other))


# ---------------------------------------------------------------- rows of some tokens only


def test_rows_from_a_later_token_on(tmp_path: Path) -> None:
    for options in [MODEL, SHAPE]:
        for start in [1, 5, 6, 9]:
            path = saved(tmp_path, native(ROWS[start:], 10, 3))
            same(requests(path, options), (10 - start, ROWS[start:]))


def test_rows_of_the_answer_alone_lack_the_prompts_last_token(tmp_path: Path) -> None:
    path = saved(tmp_path, native(ROWS[10:], 10, 3))
    same(requests(path, SHAPE), (1, np.concatenate([np.full((1, LAYERS, K), -1), ROWS[10:]])))
    assert "9 prompt tokens" in notes(path, SHAPE) and "10 have no row" in notes(path, SHAPE)


def test_tokens_that_ran_without_a_row_are_not_routed(tmp_path: Path) -> None:
    path = saved(tmp_path, native(ROWS[8:], 10, 3, cached_tokens=6))
    blank = np.full((2, LAYERS, K), -1)
    same(requests(path, SHAPE), (4, np.concatenate([blank, ROWS[8:]])))
    assert "2 tokens ran and have no row" in notes(path, SHAPE)


def test_a_start_that_is_stated_is_taken(tmp_path: Path) -> None:
    stated = native(ROWS[6:], 10, 3, routed_experts_start_len=6)
    same(requests(saved(tmp_path, stated)), (4, ROWS[6:]))
    packed = {"data": flat(ROWS[6:], "u1"), "shape": [6, LAYERS, K], "start": 6}
    same(requests(saved(tmp_path, {"choices": [{"routed_experts": packed}], **usage(10, 3)})), (4, ROWS[6:]))
    ignored = native(ROWS, 10, 3, routed_experts_start_len=6)  # some builds return all rows whatever was asked for
    same(requests(saved(tmp_path, ignored), SHAPE), (10, ROWS))


def test_another_response_says_how_wide_rows_are(tmp_path: Path) -> None:
    path = saved(tmp_path, native(ROWS, 10, 3), native(text(24, 3)[12:], 20, 5, cached_tokens=12))
    same(requests(path), (10, ROWS), (8, text(24, 3)[12:]))


def test_partial_rows_of_a_lone_response_are_refused_by_the_options_name(tmp_path: Path) -> None:
    for rows in [independent(24)[12:], text(24)[12:], text(24)[16:], text(24)[13:]]:
        said = refusal(saved(tmp_path, native(rows, 20, 5, cached_tokens=12)))
        assert "routed_experts_start_len" in said and "--model" in said and "24 computed tokens" in said


def test_all_rows_of_a_lone_response_are_known_by_neighbouring_tokens(tmp_path: Path) -> None:
    path = saved(tmp_path, native(text(48), 40, 9, cached_tokens=32))
    same(requests(path), (8, text(48)[32:]))


def test_rows_that_fit_no_count_are_refused_with_both_numbers(tmp_path: Path) -> None:
    for rows in [1, 14, 20]:
        for response in (native(text(rows), 10, 3), {"choices": [{"routed_experts": npy(text(rows))}], **usage(10, 3)}):
            said = refusal(saved(tmp_path, response), SHAPE)
            assert f"{rows} rows" in said and "10 prompt tokens and 3 generated ones" in said and "2 to 12" in said


def test_a_prompt_without_an_answer_may_lack_its_last_row(tmp_path: Path) -> None:
    for rows in [9, 10]:
        same(requests(saved(tmp_path, native(ROWS[:rows], 10, 0))), (rows, ROWS[:rows]))


# ---------------------------------------------------------------- rows that are none


def test_a_row_of_the_last_token_is_left_out(tmp_path: Path) -> None:
    for last in [np.zeros(K, int), np.arange(K), text(1, 9)[0, 0]]:
        padded = np.concatenate([ROWS, np.broadcast_to(last, (1, LAYERS, K))])
        same(requests(saved(tmp_path, {"choices": [{"routed_experts": npy(padded)}], **usage(10, 3)})), (10, ROWS))


def test_padding_without_counts_is_left_out(tmp_path: Path) -> None:
    padded = np.concatenate([ROWS, np.zeros((3, LAYERS, K), int)])
    path = saved(tmp_path, {"choices": [{"routed_experts": npy(padded)}]})
    same(requests(path), (0, ROWS))
    assert "3 rows at the ends of responses are padding" in notes(path)


def test_aborted_requests_are_left_out(tmp_path: Path) -> None:
    aborted = {
        "text": "",
        "meta_info": {"prompt_tokens": 4, "completion_tokens": 0, "finish_reason": {"type": "abort"}},
    }
    path = saved(tmp_path, native(ROWS, 10, 3), aborted)
    same(requests(path), (10, ROWS))
    assert "1 choices have no routed_experts" in notes(path)


def test_speculative_decoding_is_said(tmp_path: Path) -> None:
    assert "speculative decoding" in notes(saved(tmp_path, native(ROWS, 10, 3, spec_verify_ct=2)))


def test_a_shape_for_rows_that_state_theirs_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", ROWS)
    assert "--shape requires" in refusal(tmp_path / "a.npy", SHAPE)


# ---------------------------------------------------------------- ids that are other numbers


def lines(folder: Path, rows: np.ndarray) -> Path:
    names = "request,token,layer," + ",".join(f"expert_{rank}" for rank in range(rows.shape[2]))
    body = [
        ",".join(map(str, [0, token, layer, *rows[token, layer]]))
        for token in range(len(rows))
        for layer in range(rows.shape[1])
    ]
    return written(folder / "a.csv", "\n".join([names, *body, ""]))


def test_ids_that_count_on_become_those_of_each_layer(tmp_path: Path) -> None:
    for skipped in [0, 2]:
        for options in [SIZED, MODEL]:
            rows = text(200)
            path = lines(tmp_path, rows + EXPERTS * (np.arange(LAYERS)[:, None] + skipped))
            trace, _ = imported(path, options.model_copy(update={"ids": "global"}))
            assert trace.geometry.experts == EXPERTS
            np.testing.assert_array_equal(trace.read("chosen"), rows)


def test_ids_of_each_layer_do_not_count_on(tmp_path: Path) -> None:
    said = refusal(lines(tmp_path, text(200)), SIZED.model_copy(update={"ids": "global"}))
    assert "do not count on" in said and "--ids global" in said


def test_experts_without_weights_are_not_routed(tmp_path: Path) -> None:
    path = lines(tmp_path, text(100))
    trace, _ = imported(path, SIZED.model_copy(update={"real_experts": 20}))
    assert trace.geometry.experts == 20
    for row, whole in zip(trace.read("chosen").reshape(-1, K), text(100).reshape(-1, K), strict=True):
        kept = [expert for expert in whole.tolist() if expert < 20]
        assert row.tolist() == kept + [-1] * (K - len(kept))


def test_the_note_counts_choices_of_experts_without_weights(tmp_path: Path) -> None:
    ids = text(100)
    trace, _ = imported(lines(tmp_path, ids), SIZED.model_copy(update={"real_experts": 20}))
    [note] = [each for each in trace.header.provenance.notes if "--real-experts" in each]
    assert f"from 20 to {ids.max()} " in note and f"{100 * (ids >= 20).mean():.3g}% of" in note


def test_a_number_of_real_experts_above_every_id_is_refused(tmp_path: Path) -> None:
    for beyond in [0, 100]:
        ids = text(100)
        wrong = int(ids.max()) + 1 + beyond
        said = refusal(lines(tmp_path, ids), SIZED.model_copy(update={"real_experts": wrong}))
        assert f"--real-experts {wrong}" in said and f"at most {ids.max()}" in said


def test_another_number_of_real_experts_than_the_model_has_is_refused(tmp_path: Path) -> None:
    said = refusal(lines(tmp_path, text(100)), MODEL.model_copy(update={"real_experts": 20}))
    assert "--real-experts 20" in said and f"expected {EXPERTS}" in said


def test_a_model_with_fewer_experts_names_the_option(tmp_path: Path) -> None:
    fewer = Options(geometry=Geometry(layers=LAYERS, experts=20, k=K, expert_bytes=(7,) * LAYERS))
    path = lines(tmp_path, text(100))
    assert "--real-experts 20" in refusal(path, fewer)
    assert imported(path, fewer.model_copy(update={"real_experts": 20}))[0].geometry.experts == 20


def test_weights_go_with_their_experts(tmp_path: Path) -> None:
    ids, weights = text(50), np.random.default_rng(0).random((50, LAYERS, K)).astype(np.float32)
    np.savez(tmp_path / "a.npz", ids=ids, w=weights)
    columns = {"experts": ("ids",), "weights": ("w",)}
    options = SIZED.model_copy(update={"real_experts": 20, "columns": columns})
    trace, _ = imported(tmp_path / "a.npz", options)
    np.testing.assert_allclose(trace.read("weights").sum(-1), np.where(ids < 20, weights, 0).sum(-1), rtol=1e-6)
    assert (trace.read("weights")[trace.read("chosen") < 0] == 0).all()


def test_padding_at_the_end_of_an_array_is_left_out(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.concatenate([ROWS, np.zeros((2, LAYERS, K), int)]))
    same(requests(tmp_path / "a.npy"), (0, ROWS))
    assert "2 rows at the end are padding" in notes(tmp_path / "a.npy")
