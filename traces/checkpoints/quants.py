"""Estimate the bytes of a known model in a published quantisation: `Q4_K_M`, `UD-Q2_K_XL`, `FP8`, `AWQ`.

llama.cpp stores an expert's down projection in a type that depends on the layer, and gate and up in the mix's own type;
a matrix whose rows do not divide into blocks of 256 gets a larger type (src/llama-quant.cpp, read at 007dbbf3). So
GLM-4.5-Air in Q4_K_M, whose experts are 1,408 wide, has 5.5 bits per weight and not 4.84. Files are taken to be
made with an importance matrix, as the published ones are. `make study-quants` compares with published files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from moereplay.traces.checkpoints.gguf import TYPES
from moereplay.traces.geometry import KnownModel, Published
from moereplay.traces.schema import TraceError, shown
from moereplay.traces.texts import hint
from moereplay.traces.weight_formats import BITS_PER_WEIGHT, CHECKPOINT_BITS, OF_EXPERTS

BITS = {name: 8 * size / block for name, block, size in TYPES.values()}
#: Types of ik_llama.cpp whose rows begin with a scale of two or four bytes, which is left out.
ROWS = {"IQ2_KS": 2.1875, "IQ2_KL": 2.6875, "IQ3_KS": 3.1875, "IQ4_KSS": 4.0, "IQ4_KS": 4.25, "IQ5_KS": 5.25}
ROWS |= {"IQ1_KT": 1.75, "IQ2_KT": 2.125, "IQ3_KT": 3.125, "IQ4_KT": 4.0}
BLOCK = {name: block for name, block, _ in TYPES.values()} | dict.fromkeys(ROWS, 256)
BITS |= ROWS
#: The type that replaces one whose block does not divide a row.
WIDER = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q2_K", "Q3_K"), "Q4_0"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    **dict.fromkeys((*ROWS, "IQ2_K", "IQ3_K"), "IQ4_NL"),
    **dict.fromkeys(("IQ4_K", "IQ5_KS"), "Q5_0"),
    "IQ5_K": "Q6_0",
    "IQ6_K": "Q8_0",
}
F32, GATE_BITS = "F32", 32  #: a router's gate is stored as F32

Down = Callable[[int, int], str]  #: the type of a down projection by layer and number of layers


class Mix(NamedTuple):
    """Types in which a mix stores experts, the other weights of layers, the head, and a separate embedding table."""

    base: str
    down: Down | None = None  #: None: as `base`
    middle: str = ""  #: of gate and up in the layers between the first and the last eighth
    attention: float = 0  #: bits per weight outside experts; 0: the experts' mean, without replacements
    head: str = "Q6_K"
    table: str = ""  #: of an embedding separate from the head; "": `base`


def _more(many: str, few: str) -> Down:
    """Return the rule of the M mixes: the first and last eighth, and every third layer between, get more bits."""
    return lambda at, of: many if at < of // 8 or at >= 7 * of // 8 or (at - of // 8) % 3 == 2 else few


def _first(many: str, few: str, part: int = 8) -> Down:
    """Return the rule that the first `1 / part` of the layers get more bits."""
    return lambda at, of: many if at < of // part else few


MIXES: dict[str, Mix] = {
    "Q2_K": Mix("Q2_K", _first("Q3_K", "Q3_K")),
    "Q2_K_S": Mix("Q2_K", _first("Q4_K", "Q2_K")),
    "Q3_K_S": Mix("Q3_K"),
    "Q3_K_M": Mix("Q3_K", _first("Q5_K", "Q4_K", 16)),
    "Q3_K_L": Mix("Q3_K", _first("Q5_K", "Q5_K")),
    "Q4_0": Mix("Q4_0", _first("Q4_1", "Q4_0")),
    "Q4_1": Mix("Q4_1"),
    "Q4_K_S": Mix("Q4_K", _first("Q5_K", "Q4_K")),
    "Q4_K_M": Mix("Q4_K", _more("Q6_K", "Q4_K")),
    "Q5_0": Mix("Q5_0", _first("Q5_1", "Q5_0")),
    "Q5_1": Mix("Q5_1"),
    "Q5_K_S": Mix("Q5_K"),
    "Q5_K_M": Mix("Q5_K", _more("Q6_K", "Q5_K")),
    "Q6_K": Mix("Q6_K"),
    "Q8_0": Mix("Q8_0", head="Q8_0"),
    "IQ1_S": Mix("IQ1_S", _first("Q2_K", "IQ1_S"), head="Q5_K", table="Q2_K"),
    "IQ1_M": Mix("IQ1_M", _first("Q2_K", "IQ1_M"), head="Q5_K", table="Q2_K"),
    "IQ2_XXS": Mix("IQ2_XXS", _first("Q2_K", "IQ2_XXS"), head="Q5_K", table="Q2_K"),
    "IQ2_XS": Mix("IQ2_XS", _first("Q2_K", "IQ2_XS"), head="Q5_K", table="Q2_K"),
    "IQ2_S": Mix("IQ2_XS", _first("IQ3_S", "IQ2_XS"), head="Q5_K", table="IQ3_S"),
    "IQ2_M": Mix("IQ2_S", _first("IQ3_S", "IQ2_S"), head="Q5_K", table="IQ3_S"),
    "IQ3_XXS": Mix("IQ3_XXS", head="Q5_K", table="IQ3_S"),
    "IQ3_XS": Mix("IQ3_S", middle="IQ3_XXS"),
    "IQ3_S": Mix("IQ3_S"),
    "IQ3_M": Mix("IQ3_S", _first("Q4_K", "IQ3_S")),
    "IQ4_XS": Mix("IQ4_XS"),
    "IQ4_NL": Mix("IQ4_NL"),
    **{name: Mix(name) for name in (*ROWS, "IQ2_K", "IQ3_K", "IQ4_K", "IQ5_K", "IQ6_K")},
    "MXFP4": Mix("MXFP4", attention=8.5, head="Q8_0", table="Q8_0"),
    "BF16": Mix("BF16", head="BF16"),
    "F16": Mix("F16", head="F16"),
}
#: Checkpoints for other engines: bits of a weight in layers outside the experts; head and table stay at 16.
CHECKPOINTS: dict[str, float] = {
    **{name: CHECKPOINT_BITS[name] for name in ("FP8", "W8A8", "AWQ", "GPTQ")},
    "NVFP4": 16,  # as in nvidia's checkpoints of experts
}
#: Dynamic mixes, whose types differ from tensor to tensor: mean bits over a published file.
DYNAMIC: dict[str, tuple[float, str]] = {
    "UD-Q2_K_XL": (2.70, "DeepSeek-R1, 211.03 GiB (github.com/ikawrakow/ik_llama.cpp/discussions/258)"),
}
SPELLINGS = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "FP16": "F16", "INT4": "AWQ", "MXFP4_MOE": "MXFP4"}
SPELLINGS |= {"FP4": "NVFP4", "INT8": "W8A8", "W4A16": "GPTQ", "W4A4": "NVFP4", "W8A8_INT8": "W8A8", "W8A8_FP8": "FP8"}
NAMES = (*MIXES, *CHECKPOINTS, *DYNAMIC)


def quantised(model: KnownModel, quant: str) -> KnownModel:
    """Return the model with its weights in the bytes of a quantisation. Raises TraceError for an unknown one.

    The name of a dynamic mix without a published mean (`UD-Q4_K_XL`) is read as the plain mix of its bits.
    """
    name, note = _known(quant)
    geometry = model.geometry
    if not geometry.expert_params or geometry.dense_params is None:
        raise TraceError(f"--quant {quant}: {model.name} states bytes but no number of weights; omit --quant")
    if model.stored:
        raise TraceError(f"--quant {quant}: the weights of {model.name} are already quantised; omit --quant")
    experts, layer_bits, head_bits, table_bits = _bits(model, name)
    label = quant.upper() if quant.upper().startswith("UD-") else name
    form = name
    if name in MIXES and model.published.format in OF_EXPERTS:  # llama.cpp keeps these blocks where they are smaller
        if any(map(int.__gt__, experts, geometry.expert_bytes)):
            note = "; ".join(filter(None, (note, f"experts stay in the published {model.published.format}")))
        experts = tuple(map(min, experts, geometry.expert_bytes))
        form = model.published.format if experts == geometry.expert_bytes else name
    gates = model.hidden * geometry.experts
    inside = round((max(0, geometry.dense_params - gates) * layer_bits + gates * GATE_BITS) / 8)
    vocabulary = min(model.embedding_params or geometry.head_params or 0, geometry.head_params or 0)
    head = round((vocabulary * head_bits + ((geometry.head_params or 0) - vocabulary) * layer_bits) / 8)
    table = round(model.embedding_params * table_bits / 8)
    mean = sum(experts) * 8 / (geometry.layers * geometry.expert_params)
    return model.model_copy(
        update={
            "name": model.name,
            "quant": label,
            "published": Published(format=label if form == name else form, bits=round(mean, 4)),
            "note": "; ".join(filter(None, (model.note, note))),
            "geometry": geometry.model_copy(
                update={
                    "expert_bytes": experts,
                    "expert_bits": round(mean, 4),
                    "bytes_by_bits": {},
                    "dense_layer_bytes": (inside,) * geometry.layers,
                    "head_bytes": head,
                    "dense_bytes": inside * geometry.layers + head + table,
                    "dense_stated": True,
                    "weight_format": form if form in BITS_PER_WEIGHT else "",
                }
            ),
        }
    )


def _known(quant: str) -> tuple[str, str]:
    """Return the name of a quantisation, and a note if another one is used in its place. Raises TraceError."""
    spelled = quant.strip().upper().replace(" ", "_")
    if spelled in NAMES:
        return spelled, ""
    plain = re.sub(r"_(XL|L)$", "_M", SPELLINGS.get(spelled, spelled.removeprefix("UD-")))
    plain = {"Q2_K_M": "Q2_K", "Q6_K_M": "Q6_K", "Q8_K_M": "Q8_0"}.get(plain, SPELLINGS.get(plain, plain))
    if plain not in NAMES:
        raise TraceError(f"unknown --quant {shown(quant)}; {hint(spelled, list(NAMES))}")
    exact = spelled in SPELLINGS
    return (
        plain,
        ""
        if exact
        else f"{spelled} differs between files and is estimated as {plain}; pass the GGUF file itself for exact sizes",
    )


def _bits(model: KnownModel, name: str) -> tuple[tuple[int, ...], float, float, float]:
    """Return bytes of an expert by layer, and bits of other weights in layers, of the head and of the table."""
    geometry = model.geometry
    params = geometry.expert_params or 0
    if name in MIXES:
        mix = MIXES[name]
        experts = tuple(round(_expert(model, mix, at) * params / 8) for at in range(geometry.layers))
        return experts, _layer_bits(mix), BITS[mix.head], BITS[mix.table or mix.base]
    if name in CHECKPOINTS:
        return (round(params * CHECKPOINT_BITS[name] / 8),) * geometry.layers, CHECKPOINTS[name], 16, 16
    mean = DYNAMIC[name][0]
    return (round(params * mean / 8),) * geometry.layers, mean, BITS["Q6_K"], BITS["Q4_K"]


def _expert(model: KnownModel, mix: Mix, at: int) -> float:
    """Return the mean bits of an expert's weight in the MoE layer `at`."""
    layer, layers = model.dense_layers + at, model.dense_layers + model.geometry.layers
    width = (model.geometry.expert_params or 0) // (sum(model.matrices) * model.hidden)
    inner = mix.middle if mix.middle and layers // 8 <= layer < 7 * layers // 8 else mix.base
    down = mix.down(layer, layers) if mix.down else mix.base
    parts = sum(model.matrices)
    return ((parts - 1) * _stored(inner, model.hidden) + _stored(down, width)) / parts


def _stored(kind: str, row: int) -> float:
    """Return the bits of a type for rows of that length."""
    return BITS[kind if row % BLOCK[kind] == 0 else WIDER.get(kind, "F16")]


def _layer_bits(mix: Mix) -> float:
    """Return the mean bits of attention and shared experts: as an expert's whose rows divide into blocks."""
    if mix.attention:
        return mix.attention
    down = [mix.down(at, 48) if mix.down else mix.base for at in range(48)]
    return (2 * BITS[mix.base] + sum(BITS[each] for each in down) / len(down)) / 3
