"""Placements and routing profiles for llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from moereplay.traces.exporters.contract import Answer, Exporter, Options, Target, dense_layers, scores
from moereplay.traces.exporters.lines import Block, blocks
from moereplay.traces.geometry import held_layers, layers_by_worth
from moereplay.traces.schema import Trace
from moereplay.traces.units import GB
from moereplay.traces.weight_formats import REPACKED, named_in

TENSORS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  #: of experts, as llama.cpp finds them; shared ones end in shexp


def write_arguments(trace: Trace, options: Options, target: Target) -> Answer:
    r"""Write llama.cpp's placement of experts as arguments of its command line: `--n-cpu-moe N`, or `-ot` if need be.

    Either leaves the expert tensors of whole layers to the CPU. `--n-cpu-moe N` is `blk\.I\.ffn_(...)exps=CPU` for
    the first N layers, dense ones counted (llama.cpp, common/common.h, LLM_FFN_EXPS_REGEX); `-ot PATTERN=CPU`
    searches for the pattern in the name of every tensor. A tensor holds all experts of a layer, so no expert can be
    placed alone.

    They keep on the GPU the layers that are worth most of what fits `cache_bytes`.
    """
    geometry, (before, said) = trace.geometry, dense_layers(trace, options)
    held = held_layers(geometry, options.cache_bytes or 0, layers_by_worth(geometry, scores(trace, options)))
    on_cpu = [layer for layer in range(geometry.layers) if layer not in held]
    with target.open() as file:
        file.write(f"{' '.join(arguments(on_cpu, before))}\n".encode())
    size = sum(geometry.expert_bytes[layer] for layer in held) * geometry.experts
    note = f"the experts of {len(held)} of {geometry.layers} layers stay on the GPU, {size / GB:.4g} GB"
    notes = (note, *_repacked(trace), *said) if on_cpu else (note, *said)
    return Answer("llama-server -m MODEL.gguf -ngl 999 $(cat {path})", notes)


def _repacked(trace: Trace) -> Iterator[str]:
    provenance = trace.header.provenance
    stored = named_in(provenance.dtype or "") or named_in(provenance.model)
    if stored in REPACKED:
        what = f"llama.cpp copies {stored} experts into another layout in memory (repacks)"
        yield f"{what}; add --no-repack if the file is larger than memory, so that they stay mapped"


def arguments(on_cpu: Sequence[int], dense_layers: int) -> list[str]:
    """Return command-line words that leave the given MoE layers to the CPU; no word needs quotes."""
    if not on_cpu:
        return ["--n-cpu-moe", "0"]
    if list(on_cpu) == list(range(len(on_cpu))):
        return ["--n-cpu-moe", str(dense_layers + len(on_cpu))]
    numbers = "|".join(str(dense_layers + layer) for layer in on_cpu)
    return ["-ot", rf"blk\.({numbers}){TENSORS}=CPU"]


LLAMA_CPP = Exporter(
    name="llama.cpp",
    summary="the arguments, `--n-cpu-moe` or `-ot`, that keep whole layers of experts on the GPU, as many as fit",
    writes="FILE",
    write=write_arguments,
    keeps=frozenset(),
    loses=("placement of single experts",),
    takes=frozenset({"cache_bytes", "ranking", "dense_layers"}),
    needs=frozenset({"cache_bytes"}),
)


# ---------------------------------------------------------------- routing profiles


def write_profile(trace: Trace, options: Options, target: Target) -> Answer:
    """Write a routing profile for `--moe-cache-profile` of thecodacus' llama.cpp, in the format of its llama-moe-trace.

    A line `position,layer,expert,expert,...` per token and layer, no header (github.com/thecodacus/llama.cpp,
    moe-trace.cpp). Positions of a prompt are negative and end at -1, decoded ones count from 0, and start again
    with each request. Layer numbers are the model's, with dense layers counted. Unrouted tokens have no line.

    """
    before, said = dense_layers(trace, options)
    with target.open() as file:
        for block in blocks(trace, logits=False):
            file.writelines(line.encode() for line in _profile_lines(block, trace.prompt_lengths, before))
    return Answer("llama-server -m MODEL.gguf --moe-cache-profile {path} --moe-cache-slots N", said)


def _profile_lines(block: Block, prompts: np.ndarray, before: int) -> Iterator[str]:
    positions = (block.token - prompts[block.request]).tolist()
    for position, layers in zip(positions, block.chosen.tolist(), strict=True):
        for layer, ids in enumerate(layers, before):
            routed = [expert for expert in ids if expert >= 0]
            if routed:
                yield ",".join(map(str, (position, layer, *routed))) + "\n"


LLAMA_CPP_PROFILE = Exporter(
    name="llama.cpp-profile",
    summary="position,layer,experts for `--moe-cache-profile` of thecodacus/llama.cpp, as its own recorder writes",
    writes="NAME.csv",
    write=write_profile,
    keeps=frozenset({"chosen", "prompt_lengths", "request_offsets"}),
    takes=frozenset({"dense_layers"}),
)
