"""A sample of every format that can be imported, written for it, and what an import of it must give.

`python -m tests.kit.importer_samples` writes tests/samples/; a test holds the files there to what this module writes.
Every number follows from request, token, layer and rank by formulas (`importer_formulas.py`), so that a reader can work
out each byte. `importer_recorders.py` writes what recorders write, `importer_engines.py` what inference engines do and
transformers' logits, this file what anybody may. Plug-ins have their own (`contrib/importers/tests/samples.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from moereplay.traces.importers.contract import NO_PHASE, Options
from moereplay.traces.schema import Request
from tests.kit.importer_contract import rewrite
from tests.kit.importer_engines import ENGINES
from tests.kit.importer_formulas import (
    BITS_UNKNOWN,
    BYTES,
    DECODE_ONLY,
    EXPERTS,
    EXPERTS_UNKNOWN,
    LAYERS,
    METADATA,
    SAMPLES,
    K,
    Sample,
    expert,
    grid,
    ids,
    logit,
    weight,
    weights,
)
from tests.kit.importer_logits import ROUTER_LOGITS
from tests.kit.importer_recorders import (
    TURNS,
    decoded,
    routed_turn,
    write_gptoss_json,
    write_gptoss_npz,
    write_route_trace,
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


LINES = 9  #: tokens of the array


# ---------------------------------------------------------------- lines among those of a log, requests mixed

LOGGED = {"chat": (2, 5), "7": (0, 4)}  #: request: prompt tokens, tokens
LOGGED_FROM_TWO = "layers 2..3 of the file are MoE layers"


def write_route_lines(file: Path) -> None:
    """Two requests by turns, layers from 2 on; a token of the second is printed twice, and it never ends."""
    lines = ["server: listening on 8080", "@moe-begin chat 2", "I 10:00:01 slot 0: @moe 7 3 2 5,1 .9,.1"]
    for token in range(5):
        for number, (name, (_, tokens)) in enumerate(LOGGED.items()):
            lines += [logged_row(name, number, token, layer) for layer in range(LAYERS)] if token < tokens else []
    file.write_text("".join(f"{line}\n" for line in [*lines, "@moe-end chat", "server: bye"]))


def logged_row(name: str, request: int, token: int, layer: int) -> str:
    """One token at one layer."""
    chosen = ",".join(str(expert(request, token, layer, rank)) for rank in range(K))
    mass = ",".join(str(weight(token, layer, rank)) for rank in range(K))
    return f"I 10:00:0{token} slot {request}: @moe {name} {token} {layer + 2} {chosen} {mass}"


def logged() -> list[Request]:
    """Both requests, in the order in which they end."""
    return [Request(ids(at, n), prompt, weights(n)) for at, (prompt, n) in enumerate(LOGGED.values())]


# ---------------------------------------------------------------- tables with names of their own, and an array

OWN_NAMES = {"token": ("pos",), "layer": ("moe_layer",), "experts": ("topk",), "weights": ("gate",)}
OWN = Options(expert_bytes=BYTES, columns=OWN_NAMES)
OWN_REQUESTS = (4, 3)  #: tokens of each
OWN_TEXT = (
    "column pos is the token; column moe_layer is the layer; column topk has the experts; column gate has the weights"
)
FROM_ONE = "layers 1..2 of the file are MoE layers 0..1"


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
    """Write the same rows in columns of lists."""
    import polars as pl

    names = ["pos", "moe_layer", "topk", "gate"]
    pl.DataFrame([dict(zip(names, row, strict=True)) for row in own_rows()]).write_parquet(file, statistics=False)


# ---------------------------------------------------------------- exports


def write_exported(folder: Path) -> None:
    """The rows of the JSON lines as a data set, a request in each shard."""
    import polars as pl

    (folder / "data").mkdir(parents=True)
    for at, (request, (prompt, tokens)) in enumerate(PLAIN.items()):
        rows = [json_row(request, token, layer, prompt) for token in range(tokens) for layer in range(LAYERS)]
        shard = folder / "data" / f"train-{at:05}-of-{len(PLAIN):05}.parquet"
        pl.DataFrame(rows).write_parquet(shard, statistics=False, metadata={"moereplay": json.dumps(METADATA)})


def own() -> list[Request]:
    """Both requests."""
    return [Request(ids(request, tokens), 0, weights(tokens)) for request, tokens in enumerate(OWN_REQUESTS)]


def own_notes(*more: str) -> tuple[str, ...]:
    """Return the expected notes."""
    said = ["no request column: 2 requests, a new one where the token falls back", FROM_ONE, *more, "k = 2"]
    basis = ["layers 0..1", "experts = 8 as the largest id + 1"]
    return (f"assumed: {'; '.join([OWN_TEXT, *said, *basis])}", NO_PHASE, BITS_UNKNOWN)


def write_npy(file: Path) -> None:
    """Nine tokens."""
    np.save(file, ids(0, LINES).astype(np.int16))


ALL = [
    *ENGINES,
    *ROUTER_LOGITS,
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
        "route_lines",
        "route_lines.log",
        write_route_lines,
        logged(),
        (
            f"assumed: k = 2; {LOGGED_FROM_TWO}; layers 0..1; experts = 8 as the largest id + 1",
            "1 rows replace earlier rows of the same token and layer",
            BITS_UNKNOWN,
        ),
    ),
    Sample("generic", "generic.csv", write_csv, plain(False), (), options=Options(), model="made-up"),
    Sample("generic", "generic.jsonl", write_jsonl, plain(True), (), options=Options(), model="made-up"),
    Sample("exported", "exported", write_exported, plain(True), (), options=Options(), model="made-up"),
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
            NO_PHASE,
            BITS_UNKNOWN,
        ),
    ),
]


if __name__ == "__main__":
    rewrite(SAMPLES, ALL)
