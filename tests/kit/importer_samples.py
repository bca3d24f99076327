"""A sample of every format that can be imported, written for it, and what an import of it must give.

`python -m tests.kit.importer_samples` writes tests/samples/; a test holds the files there to what this module writes.
Every number follows from request, token, layer and rank by the formulas below, so that a reader can work out each byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from traces.importers.contract import Options
from traces.schema import Request

SAMPLES = Path(__file__).resolve().parents[1] / "samples"
LAYERS, EXPERTS, K = 2, 8, 2
BYTES = (96, 128)
SIZED = Options(expert_bytes=BYTES)
METADATA = {"moereplay": {"model": "made-up", "layers": LAYERS, "experts": EXPERTS, "k": K, "expert_bytes": BYTES}}
DECODE_ONLY = "decode steps only: rows of the prompts were not recorded"
EXPERTS_UNKNOWN = "number of experts not recorded: 8 is the highest id + 1"
BITS_UNKNOWN = "precision of the expert bytes not known: taken as 16 bits; --expert-bits tells it"


def expert(request: int, token: int, layer: int, rank: int) -> int:
    """An id; those of ranks 0 and 1 differ, and over some tokens all occur."""
    first = request + 3 * token + 5 * layer
    return (first + rank * (1 + token % 7)) % EXPERTS


def weight(token: int, layer: int, rank: int) -> float:
    """A gate weight that float16 holds exactly; those of a token at a layer sum to 1."""
    second = (1 + (token + layer) % 3) / 8
    return second if rank else 1 - second


def logit(request: int, token: int, layer: int, expert_id: int) -> float:
    """A raw logit; those of the chosen are the largest, in rank order."""
    ranks = {expert(request, token, layer, rank): rank for rank in range(K)}
    return 3.0 - ranks[expert_id] if expert_id in ranks else -expert_id / 4


def residency(token: int, layer: int, rank: int) -> int:
    """What a cache would say: 0 miss, 1 hit, 2 prefetched."""
    return (token + layer + rank) % 3


def grid(tokens: int, value: Callable[..., float], width: int = K) -> np.ndarray:
    """(T, L, width) of a formula over token, layer and rank or expert."""
    cells = [[[value(token, layer, at) for at in range(width)] for layer in range(LAYERS)] for token in range(tokens)]
    return np.array(cells)


def ids(request: int, tokens: int) -> np.ndarray:
    """(T, L, k) the experts of a request."""
    return grid(tokens, lambda token, layer, rank: expert(request, token, layer, rank))


def weights(tokens: int) -> np.ndarray:
    """(T, L, k) their weights."""
    return grid(tokens, weight)


@dataclass(frozen=True)
class Sample:
    """One format's sample: the file or folder, what writes it, and what comes out of it."""

    importer: str
    name: str  #: of the file or folder in tests/samples
    write: Callable[[Path], None]
    requests: list[Request]
    notes: tuple[str, ...]
    expert_bytes: tuple[int, ...] = BYTES
    options: Options = SIZED
    model: str = "unknown"

    @property
    def path(self) -> Path:
        """Where it lies."""
        return SAMPLES / self.name


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


# ---------------------------------------------------------------- streams, layer first: ids only, cut into chunks

CHUNK = 4
STREAMS = {"code": 10, "essay": 5}


def stream(number: int, tokens: int) -> np.ndarray:
    """(T, L, k) ids of a file; its last token was not routed at the last layer."""
    chosen = ids(number, tokens)
    chosen[-1, -1] = -1
    return chosen


def write_layers_npz(folder: Path) -> None:
    """Two streams, by name; the recorder cleared its context every four tokens."""
    folder.mkdir()
    meta = {"model": "made-up", "num_experts": EXPERTS, "n_moe_layers": LAYERS, "k": K, "chunk": CHUNK, "source": "r1"}
    for number, (name, tokens) in enumerate(STREAMS.items()):
        experts = stream(number, tokens).transpose(1, 0, 2).astype(np.int16)
        np.savez(folder / f"{name}.npz", experts=experts, meta=json.dumps(meta))


def chunks() -> list[Request]:
    """4, 4, 2 and 4, 1 tokens, all of them prompt."""
    streams = [stream(number, tokens) for number, tokens in enumerate(STREAMS.values())]
    parts = [part[start : start + CHUNK] for part in streams for start in range(0, len(part), CHUNK)]
    return [Request(part, len(part)) for part in parts]


# ---------------------------------------------------------------- a phone's route trace: sizes, phases, residency

#: turn -> (first position, prompt tokens, tokens); the second turn goes on where the first stopped
TURNS = {0: (0, 3, 5), 1: (5, 2, 3)}


def route_cell(turn: int, token: int, layer: int, rank: int) -> bool:
    """Whether there is a row: llama.cpp computes the last layer for the last prompt token and for decoded ones only."""
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


# ---------------------------------------------------------------- the plain formats

PLAIN = {3: (2, 4), 7: (0, 2)}  #: request number -> (prompt tokens, tokens)


def write_csv(file: Path) -> None:
    """Sizes in front; quotes around ids, as spreadsheets put them; the layers of a token from the last to the first."""
    names = ["request", "token", "layer", "expert_0", "expert_1", "weight_0", "weight_1", "phase"]
    lines = [f"# {json.dumps(METADATA)}", ",".join(f'"{name}"' for name in names)]
    for request, (prompt, tokens) in PLAIN.items():
        for token in range(tokens):
            for layer in reversed(range(LAYERS)):
                chosen = ",".join(f'"{plain_id(request, token, layer, rank)}"' for rank in range(K))
                mass = ",".join(str(weight(token, layer, rank)) for rank in range(K))
                lines.append(f"{request},{token},{layer},{chosen},{mass},{int(token >= prompt)}")
    file.write_text("".join(f"{line}\n" for line in lines))


def plain_id(request: int, token: int, layer: int, rank: int) -> int:
    """The second choice of one token was not routed."""
    return -1 if (request, token, layer, rank) == (3, 1, 0, 1) else expert(request, token, layer, rank)


def write_jsonl(file: Path) -> None:
    """The same rows with logits, and numbers of tokens that start where an earlier prompt ended."""
    lines = [json.dumps(METADATA)]
    for request, (prompt, tokens) in PLAIN.items():
        for token in range(tokens):
            lines += [json.dumps(json_row(request, token, layer, prompt)) for layer in range(LAYERS)]
    file.write_text("".join(f"{line}\n" for line in lines))


def json_row(request: int, token: int, layer: int, prompt: int) -> dict[str, object]:
    """One token at one layer."""
    return {
        "request": request,
        "token": 10 + token,
        "layer": layer,
        "experts": [plain_id(request, token, layer, rank) for rank in range(K)],
        "weights": [weight(token, layer, rank) for rank in range(K)],
        "logits": [logit(request, token, layer, each) for each in range(EXPERTS)],
        "phase": int(token >= prompt),
    }


def plain(with_logits: bool) -> list[Request]:
    """Both requests of the plain formats."""
    requests = []
    for number, (prompt, tokens) in PLAIN.items():
        chosen = grid(tokens, lambda *at, number=number: plain_id(number, *at))
        raw = grid(tokens, lambda *at, number=number: logit(number, *at), EXPERTS)
        requests.append(Request(chosen, prompt, weights(tokens), raw if with_logits else None))
    return requests


# ---------------------------------------------------------------- lines of tokens: decoded steps, ids that ascend

LINES = 9


def write_token_lines(file: Path) -> None:
    """Steps 3 to 11 of a run."""
    chosen = np.sort(ids(0, LINES)).tolist()
    lines = [json.dumps({"tok": 3 + token, "layers": layers}) for token, layers in enumerate(chosen)]
    file.write_text("".join(f"{line}\n" for line in lines))


# ---------------------------------------------------------------- tables with names of their own, and an array

OWN_NAMES = {"token": ("pos",), "layer": ("moe_layer",), "experts": ("topk",), "weights": ("gate",)}
OWN = Options(expert_bytes=BYTES, columns=OWN_NAMES)
OWN_REQUESTS = (4, 3)  #: tokens of each
OWN_TEXT = (
    "column pos is the token; column moe_layer is the layer; column topk has the experts; column gate has the weights"
)
FROM_ONE = "layers 1..2 of the file are MoE layers 0..1"
DECODED = "no phase recorded: every token counts as decoded"


def own_rows() -> list[tuple[int, int, list[int], list[float]]]:
    """Position, layer from 1 on, experts and weights; nothing says where a request ends but the positions."""
    cells = [(request, token) for request, tokens in enumerate(OWN_REQUESTS) for token in range(tokens)]
    return [
        (
            token,
            layer + 1,
            [expert(request, token, layer, rank) for rank in range(K)],
            [weight(token, layer, rank) for rank in range(K)],
        )
        for request, token in cells
        for layer in range(LAYERS)
    ]


def write_tsv(file: Path) -> None:
    """A row per expert."""
    lines = ["pos\tmoe_layer\tnote\ttopk\tgate"]
    for token, layer, chosen, mass in own_rows():
        lines += [f"{token}\t{layer}\tx\t{one}\t{each}" for one, each in zip(chosen, mass, strict=True)]
    file.write_text("".join(f"{line}\n" for line in lines))


def write_parquet(file: Path) -> None:
    """The same in columns of lists."""
    import polars as pl

    names = ["pos", "moe_layer", "topk", "gate"]
    pl.DataFrame([dict(zip(names, row, strict=True)) for row in own_rows()]).write_parquet(file, statistics=False)


def own() -> list[Request]:
    """Both requests."""
    return [Request(ids(request, tokens), 0, weights(tokens)) for request, tokens in enumerate(OWN_REQUESTS)]


def own_notes(*more: str) -> tuple[str, ...]:
    """What is said of these."""
    said = ["no request column: 2 requests, a new one where the token falls back", FROM_ONE, *more, "k = 2"]
    basis = ["layers 0..1", "experts = 8 as the largest id + 1"]
    return (f"assumed: {'; '.join([OWN_TEXT, *said, *basis])}", DECODED, BITS_UNKNOWN)


def write_npy(file: Path) -> None:
    """Nine tokens."""
    np.save(file, ids(0, LINES).astype(np.int16))


ALL = [
    Sample(
        "gptoss_npz",
        "gptoss_npz",
        write_gptoss_npz,
        [decoded(run) for run in range(3)],
        (DECODE_ONLY, EXPERTS_UNKNOWN, BITS_UNKNOWN),
    ),
    Sample(
        "gptoss_json",
        "gptoss_json",
        write_gptoss_json,
        [decoded(run) for run in range(2)],
        (DECODE_ONLY, EXPERTS_UNKNOWN, BITS_UNKNOWN),
    ),
    Sample(
        "layers_npz",
        "layers_npz",
        write_layers_npz,
        chunks(),
        (
            "teacher-forced text: every token is prompt; replay it token by token",
            "split into requests of 4 tokens, as told",
            BITS_UNKNOWN,
        ),
        model="made-up",
    ),
    Sample(
        "route_trace",
        "route_trace.csv",
        write_route_trace,
        [routed_turn(turn) for turn in TURNS],
        (
            "1 layers of the preamble have no rows (dense): left out",
            "1 experts were dropped by the recorder's policy; kept among the chosen",
            BITS_UNKNOWN,
        ),
        options=Options(),
        model="made up.gguf",
    ),
    Sample(
        "token_lines",
        "token_lines.jsonl",
        write_token_lines,
        [Request(np.sort(ids(0, LINES)), 0)],
        (
            "no phase recorded: every token counts as decoded",
            "ids stand in ascending order everywhere: ranks were not recorded",
            EXPERTS_UNKNOWN,
            BITS_UNKNOWN,
        ),
    ),
    Sample("generic", "generic.csv", write_csv, plain(False), (), options=Options(), model="made-up"),
    Sample("generic", "generic.jsonl", write_jsonl, plain(True), (), options=Options(), model="made-up"),
    *(
        Sample("columns", f"own_names.{suffix}", write, own(), own_notes(*more), options=OWN)
        for suffix, write, more in (
            ("tsv", write_tsv, ("a row per expert, ranks in the order of rows",)),
            ("parquet", write_parquet, ()),
        )
    ),
    Sample(
        "arrays",
        "array.npy",
        write_npy,
        [Request(ids(0, LINES), 0)],
        (
            "assumed: axes are (token, layer, rank), 9 tokens, k = 2; one request; layers 0..1; "
            "experts = 8 as the largest id + 1",
            DECODED,
            BITS_UNKNOWN,
        ),
    ),
]


def write_all(folder: Path) -> None:
    """Every sample into an empty folder."""
    for sample in ALL:
        sample.write(folder / sample.name)


if __name__ == "__main__":
    import shutil

    shutil.rmtree(SAMPLES, ignore_errors=True)
    SAMPLES.mkdir()
    write_all(SAMPLES)
