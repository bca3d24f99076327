"""Placements, rules, loads and routing profiles for engines: llama.cpp, KTransformers and SGLang."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np

from moereplay.traces.documents import json_text
from moereplay.traces.exporters.contract import Answer, Exporter, Options, Target, dense_layers, scores
from moereplay.traces.exporters.rows import Block, blocks
from moereplay.traces.geometry import experts_per_layer, held_layers, layers_by_worth
from moereplay.traces.schema import Trace
from moereplay.traces.summary import uses
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
    size = sum(geometry.layer_bytes[layer] for layer in held)
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


# -- Counts and rules for KTransformers, which keeps the most used experts on the GPU.


TYPED = (
    "python -m sglang.launch_server --model-path MODEL --kt-weight-path MODEL --kt-num-gpu-experts {count} "
    "--kt-expert-placement-strategy frequency --init-expert-location {{path}}"
)


def write_counts(trace: Trace, options: Options, target: Target) -> Answer:
    """Write loads of experts for KTransformers (kt-kernel in SGLang).

    A file of `torch.save`, {"logical_count": int64 (1, layers of the model, E)}: with
    `--kt-expert-placement-strategy frequency --init-expert-location FILE.pt` KTransformers selects GPU experts from
    it: with `--kt-num-gpu-experts N`, the N x layers experts with the largest counts (kvcache-ai/sglang,
    kt_ep_wrapper.py). It ignores files with other suffixes.

    The counts are those of the trace, or the user's ranking as counts.
    """
    before, said = dense_layers(trace, options)
    counts, held = scores(trace, options), experts_per_layer(trace.geometry, options.cache_bytes or 0)
    with target.open() as file:
        write_tensor(file, "logical_count", np.pad(counts, ((before, 0), (0, 0)))[None])
    total = held * trace.geometry.layers
    share = np.sort(counts, axis=None)[::-1][:total].sum() / max(1, counts.sum())
    note = f"{held} experts per layer, {total:,} in all: the most used anywhere, which have {share:.1%} of the counts"
    return Answer(TYPED.format(count=held), (note, *said))


KTRANSFORMERS = Exporter(
    name="ktransformers",
    summary="counts for kt-kernel's `--kt-expert-placement-strategy frequency`: masks of the experts on the GPU",
    writes="NAME.pt",
    write=write_counts,
    keeps=frozenset(),
    takes=frozenset({"cache_bytes", "ranking", "dense_layers"}),
    needs=frozenset({"cache_bytes"}),
)


# ---------------------------------------------------------------- rules

RULE = """- match:
    name: "^model\\\\.layers\\\\.({layers})\\\\.mlp\\\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs:
      generate_device: "{device}"
      generate_op: "{operator}"
      out_device: "cuda:0"
  recursive: False
"""


def write_rules(trace: Trace, options: Options, target: Target) -> Answer:
    """Write rules of KTransformers' YAML (`--optimize_config_path`), which keep the experts of whole layers on the GPU.

    A rule replaces the modules whose names its pattern matches; the first match applies. So these
    must come before the rule for all experts in the model's own file (ktransformers/optimize/optimize_rules). Modules
    are called `model.layers.N.mlp.experts`, as in the models that it ships rules for; N counts dense layers.

    One rule covers the most valuable layers that fit in `cache_bytes`, one the other layers.
    """
    geometry, (before, said) = trace.geometry, dense_layers(trace, options)
    held = held_layers(geometry, options.cache_bytes or 0, layers_by_worth(geometry, scores(trace, options)))
    others = [layer for layer in range(geometry.layers) if layer not in held]
    rules = [rule(held, before, "cuda:0", "KExpertsMarlin"), rule(others, before, "cpu", "KExpertsCPU")]
    with target.open() as file:
        file.write("".join(rules).encode())
    note = f"the experts of {len(held)} of {geometry.layers} layers stay on the GPU, in Marlin's 4 bits"
    fix = "put the model's own rules for everything else behind them"
    return Answer("python ktransformers/local_chat.py --optimize_config_path {path}", (note, fix, *said))


def rule(layers: Sequence[int], before: int, device: str, operator: str) -> str:
    """Return the rule of these MoE layers; none for no layers."""
    numbers = "|".join(str(before + layer) for layer in layers)
    return RULE.format(layers=numbers, device=device, operator=operator) if layers else ""


KTRANSFORMERS_RULES = Exporter(
    name="ktransformers-rules",
    summary="rules of KTransformers' YAML that keep whole layers of experts on the GPU, as many as fit",
    writes="NAME.yaml",
    write=write_rules,
    keeps=frozenset(),
    loses=("placement of single experts",),
    takes=frozenset({"cache_bytes", "ranking", "dense_layers"}),
    needs=frozenset({"cache_bytes"}),
)


# ---------------------------------------------------------------- files of torch.save

LONG_AGO = (1980, 1, 1, 0, 0, 0)  #: the same bytes whenever it is written
# Opcodes of pickle protocol 2, as `pickletools` names them.
PROTO, STOP, EMPTY_DICT, SETITEM = b"\x80\x02", b".", b"}", b"s"
MARK, TUPLE, EMPTY_TUPLE, REDUCE, BINPERSID, NEWFALSE = b"(", b"t", b")", b"R", b"Q", b"\x89"


def write_tensor(file: BinaryIO, name: str, array: np.ndarray) -> None:
    """Write one array of int64 under a name, as `torch.save({name: tensor}, file)` writes it, without torch.

    The file is a zip of a pickle with shape and type, and of the data (torch/serialization.py). The
    pickle is written opcode by opcode, because exporters must not need torch; readers load it with `weights_only=True`.

    Raises OSError.
    """
    numbers = np.ascontiguousarray(array, "<i8")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as packed:
        members = {"data.pkl": _pickle(name, numbers.shape), "byteorder": b"little", "data/0": numbers.tobytes()}
        for member, data in (members | {"version": b"3\n"}).items():
            packed.writestr(zipfile.ZipInfo(f"archive/{member}", LONG_AGO), data)


def _pickle(name: str, shape: Sequence[int]) -> bytes:
    count = int(np.prod(shape))
    strides = [int(np.prod(shape[at + 1 :])) for at in range(len(shape))]
    storage = _tuple(_text("storage"), _named("torch", "LongStorage"), _text("0"), _text("cpu"), _whole(count))
    hooks = _named("collections", "OrderedDict") + EMPTY_TUPLE + REDUCE
    places = [_whole(0), _tuple(*map(_whole, shape)), _tuple(*map(_whole, strides))]
    tensor = _named("torch._utils", "_rebuild_tensor_v2") + _tuple(storage + BINPERSID, *places, NEWFALSE, hooks)
    return PROTO + EMPTY_DICT + _text(name) + tensor + REDUCE + SETITEM + STOP


def _tuple(*items: bytes) -> bytes:
    return MARK + b"".join(items) + TUPLE


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _whole(number: int) -> bytes:
    return b"J" + struct.pack("<i", number)


def _named(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


# -- Loads of experts for SGLang's --init-expert-location FILE.json, from which it places and replicates them on GPUs.
# -- {"logical_count": [[[...]]]}, (1, layers of the model, E): SGLang balances the counts itself (expert_location.py,
# -- init_by_eplb), so the numbers of GPUs and redundant experts are options of SGLang. Dense layers have counts of 0.


def write_loads(trace: Trace, options: Options, target: Target) -> Answer:
    """Write how often each expert was chosen."""
    before, said = dense_layers(trace, options)
    counts = np.pad(uses(trace), ((before, 0), (0, 0)))
    with target.open() as file:
        file.write(f"{json_text({'logical_count': [counts.tolist()]})}\n".encode())
    typed = "python -m sglang.launch_server --model-path MODEL --ep-size N --init-expert-location {path}"
    return Answer(typed, said)


SGLANG = Exporter(
    name="sglang",
    summary="`logical_count` for `--init-expert-location`: SGLang places experts on its GPUs by these loads",
    writes="NAME.json",
    write=write_loads,
    keeps=frozenset(),
    takes=frozenset({"dense_layers"}),
)
