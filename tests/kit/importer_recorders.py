"""Samples of what recorders write: gpt-oss fingerprints, a phone's route trace."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from moereplay.traces.schema import Request
from tests.kit.importer_formulas import BYTES, LAYERS, K, expert, grid, ids, residency, weight, weights

# ---------------------------------------------------------------- gpt-oss: decode steps only, with gate weights

STEPS = (4, 1, 3)
PROMPTS = (5, 9, 2)


def write_gptoss_npz(folder: Path) -> None:
    """Three runs end to end, and beside them their listing."""
    folder.mkdir()
    chosen = np.concatenate([ids(run, steps) for run, steps in enumerate(STEPS)])
    probs = np.concatenate([weights(steps) for steps in STEPS])
    np.savez(
        folder / "decode.npz",
        ids=chosen.astype(np.uint8),
        probs=probs.astype(np.float16),
        offsets=np.cumsum([0, *STEPS]),
        pos0=np.array(PROMPTS),
    )
    runs = [{"n_prompt_tokens": prompt, "n_decode_steps": steps} for prompt, steps in zip(PROMPTS, STEPS, strict=True)]
    (folder / "decode.meta.json").write_text(json.dumps(runs) + "\n")


def write_gptoss_json(folder: Path) -> None:
    """Two runs, one document each, decoded from positions 5 and 9 on; only the second has the highest id."""
    folder.mkdir()
    for run, name in enumerate(("run_a", "run_b")):
        steps = [json_step(run, token, PROMPTS[run] + token) for token in range(STEPS[run])]
        (folder / f"{name}.json").write_text(json.dumps({"prompt": "made up", "router_data": steps}) + "\n")


def json_step(run: int, token: int, position: int) -> dict[str, object]:
    """The experts of one token at every layer, in the published form."""
    layers = {}
    for layer in range(LAYERS):
        chosen = [expert(run, token, layer, rank) for rank in range(K)]
        probs = [weight(token, layer, rank) for rank in range(K)]
        layers[f"layer_{layer}"] = {"selected_experts": chosen, "selected_probs": probs}
    return {f"token_{position}": layers}


def decoded(run: int) -> Request:
    """A run without its prompt."""
    return Request(ids(run, STEPS[run]), 0, weights=weights(STEPS[run]))


# ---------------------------------------------------------------- a phone's route trace: sizes, phases, residency

#: turn -> (first position, prompt tokens, tokens); the second turn goes on where the first stopped
TURNS = {0: (0, 3, 5), 1: (5, 2, 3)}


def route_cell(turn: int, token: int, layer: int, rank: int) -> bool:
    """Return True if there is a row: llama.cpp computes the last layer only for the last prompt and decoded tokens."""
    return layer < LAYERS - 1 or token >= TURNS[turn][1] - 1


def write_route_trace(file: Path) -> None:
    """Layer 0 is dense, so that MoE layers 0 and 1 are the model's 1 and 2; turn 1 skips an expert."""
    lines = ["# route_trace v1", "# model=/data/made up.gguf arch=none n_layer=3 n_expert=8 n_expert_used=2"]
    lines += [f"# layer={layer} expert_bytes={size} dense_bytes=64" for layer, size in enumerate((0, *BYTES))]
    lines.append("turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped")
    for turn, (start, prompt, tokens) in TURNS.items():
        for token in range(tokens):
            for layer in range(LAYERS):
                place = f"{turn},{int(token >= prompt)},{start + token},{layer + 1}"
                lines += [f"{place},{route_slot(turn, token, layer, rank)}" for rank in range(K)]
    file.write_text("".join(f"{line}\n" for line in lines if not line.endswith("absent")))


def route_slot(turn: int, token: int, layer: int, rank: int) -> str:
    """A row from the slot on; "absent" for a cell without one."""
    if not route_cell(turn, token, layer, rank):
        return "absent"
    if unrouted(turn, token, layer, rank):
        return f"{rank},-1,nan,-1,0,0"
    said, dropped = residency(token, layer, rank), int((turn, token, layer, rank) == (0, 4, 1, 1))
    read = 0 if said else BYTES[layer]
    return f"{rank},{expert(turn, token, layer, rank)},{weight(token, layer, rank)},{said},{read},{dropped}"


def unrouted(turn: int, token: int, layer: int, rank: int) -> bool:
    """The second choice of one token was skipped."""
    return (turn, token, layer, rank) == (1, 2, 0, 1)


def routed_turn(turn: int) -> Request:
    """The turn's rows; -1, 0 and -1 where nothing was routed."""
    _, prompt, tokens = TURNS[turn]
    routed = grid(tokens, lambda *at: route_cell(turn, *at) and not unrouted(turn, *at)).astype(bool)
    return Request(
        np.where(routed, ids(turn, tokens), -1),
        prompt,
        weights=np.where(routed, weights(tokens), 0),
        residency=np.where(routed, grid(tokens, residency), -1),
    )
