"""Rows with more experts or larger weights than the others of their layer, and tokens that all route alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moereplay.traces.schema import Geometry, Header, Request, Trace, memory_trace
from moereplay.traces.validator import Finding, examine
from tests.kit.command import moereplay_here

LAYERS, EXPERTS, K, TOKENS = 3, 16, 3, 60
SAMPLES = Path(__file__).parents[1] / "samples"
IMPORT = ("--expert-bytes", 1000, "--dense", 1000)


def rows_of(width: int, tokens: int = TOKENS) -> np.ndarray:
    """(T, L, K) rows of so many experts, -1 in the places left."""
    ids = np.random.default_rng(1).permuted(np.tile(np.arange(EXPERTS), (tokens, LAYERS, 1)), axis=-1)[..., :K]
    ids[..., width:] = -1
    return ids


def trace_of(*requests: np.ndarray, weights: np.ndarray | None = None) -> Trace:
    geometry = Geometry(layers=LAYERS, experts=EXPERTS, k=K, expert_bytes=(10,) * LAYERS)
    return memory_trace(Header(geometry=geometry), [Request(rows, 0, weights=weights) for rows in requests])


def finding(trace: Trace, check: str) -> Finding:
    (found,) = (seen for seen in examine(trace) if seen.check == check)
    return found


def test_one_row_that_is_wider_than_the_others_of_its_layer_is_named() -> None:
    rows = rows_of(2)
    rows[7, 1, 2] = next(expert for expert in range(EXPERTS) if expert not in rows[7, 1])
    found = finding(trace_of(rows), "experts per row")
    assert found.level == "warning"
    assert "1 of 60 rows of layer 1 have more than 2 experts" in found.text and "k = 3" in found.text


def test_layers_may_have_numbers_of_experts_of_their_own() -> None:
    rows = rows_of(2)
    rows[:, 0] = rows_of(3)[:, 0]
    found = finding(trace_of(rows), "experts per row")
    assert (found.level, found.noted) == ("ok", False)


def test_rows_of_many_widths_are_counted_and_not_warned_of() -> None:
    rows = rows_of(3)
    rows[::4, :, 2] = -1  # 15 of 60 tokens, at 3 layers
    found = finding(trace_of(rows), "experts per row")
    assert (found.level, found.noted) == ("ok", True)
    assert "45 of 180 rows have fewer experts" in found.text and "k = 3" in found.text


def test_rows_are_counted_through_all_requests() -> None:
    rows = rows_of(2)
    wide = rows_of(3, 1)
    found = finding(trace_of(rows, wide), "experts per row")
    assert found.level == "warning" and "1 of 61 rows of layer 0" in found.text and "2 other layers" in found.text


def test_a_row_whose_weights_are_far_larger_is_named() -> None:
    weights = np.random.default_rng(0).uniform(0.1, 0.9, (TOKENS, LAYERS, K)).astype(np.float32)
    assert finding(trace_of(rows_of(3), weights=weights), "sums of weights").level == "ok"
    weights[7, 2, 1] = 65536
    found = finding(trace_of(rows_of(3), weights=weights), "sums of weights")
    assert found.level == "warning"
    assert all(fact in found.text for fact in ("token 7 of request 0, layer 2", "65,53", "1 rows"))


def test_weights_of_any_scale_are_fine() -> None:
    for scale in (0.001, 2.5, 16.0):
        weights = np.random.default_rng(0).uniform(0.1, 0.9, (TOKENS, LAYERS, K)).astype(np.float32) * scale
        assert finding(trace_of(rows_of(3), weights=weights.astype(np.float32)), "sums of weights").level == "ok"


def test_an_import_says_that_one_score_too_many_made_k(tmp_path: Path) -> None:
    for at, score in enumerate(("65536", "1")):
        folder = tmp_path / str(at)
        folder.mkdir()
        lines = (SAMPLES / "dynande.csv").read_text().splitlines()
        cells = lines[3].split(",")
        cells[2 + cells[2:].index("0.0")] = score
        file = folder / "scores.csv"
        file.write_text("\n".join([*lines[:3], ",".join(cells), *lines[4:], ""]))
        done = moereplay_here("import", file, "--out", folder / "a.zarr", *IMPORT)
        assert done.returncode == 0
        assert "1 of 6 rows of layer 0 have more than 2 experts" in done.stdout + done.stderr
        assert ("sum to 65,536" in done.stdout + done.stderr) == (score == "65536")
        sound = moereplay_here("import", SAMPLES / "dynande.csv", "--out", folder / "b.zarr", *IMPORT)
        assert "experts per row" not in sound.stdout + sound.stderr


def test_an_import_says_how_many_rows_have_fewer_experts(tmp_path: Path) -> None:
    """Lists of two lengths, as top-p routing makes them."""
    cells = [f'{token},0,"[{", ".join(map(str, range(1 + token % 2)))}]"' for token in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(["token,layer,topk", *cells, ""]))
    done = moereplay_here(
        "import", tmp_path / "a.csv", "--columns", "experts=topk", "--out", tmp_path / "a.zarr", *IMPORT
    )
    assert done.returncode == 0, done.stderr
    assert "note: experts per row: 20 of 40 rows have fewer experts" in done.stdout + done.stderr


def test_tokens_that_all_route_alike_are_not_called_shuffled() -> None:
    rows = np.broadcast_to(rows_of(3)[:1], (TOKENS, LAYERS, K))
    found = finding(trace_of(rows), "adjacent overlap")
    assert found.level == "ok" and "shuffled" not in found.text and "1.000" in found.text
