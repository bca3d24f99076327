r"""llama.cpp's placement of experts, as arguments of its command line: `--n-cpu-moe N`, or `-ot` if need be.

Either leaves the expert tensors of whole layers to the CPU. `--n-cpu-moe N` is `blk\.I\.ffn_(...)exps=CPU` for the
first N layers, dense ones counted (llama.cpp, common/common.h, LLM_FFN_EXPS_REGEX); `-ot PATTERN=CPU` searches for the
pattern in the name of every tensor. A tensor holds all experts of a layer, so no expert can be placed alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from moereplay.traces.exporters.contract import Answer, Exporter, Options, Target
from moereplay.traces.exporters.scores import dense_layers, scores
from moereplay.traces.geometry import held_layers, layers_by_worth
from moereplay.traces.schema import Trace

TENSORS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  #: of experts, as llama.cpp finds them; shared ones end in shexp


def write(trace: Trace, options: Options, target: Target) -> Answer:
    """The arguments that keep on the GPU the layers that are worth most of what fits `cache_bytes`."""
    geometry, (before, said) = trace.geometry, dense_layers(trace, options)
    held = held_layers(geometry, options.cache_bytes or 0, layers_by_worth(geometry, scores(trace, options)))
    on_cpu = [layer for layer in range(geometry.layers) if layer not in held]
    with target.open() as file:
        file.write(f"{' '.join(arguments(on_cpu, before))}\n".encode())
    size = sum(geometry.expert_bytes[layer] for layer in held) * geometry.experts
    note = f"the experts of {len(held)} of {geometry.layers} layers stay on the GPU, {size / 1e9:.4g} GB"
    return Answer("llama-server -m MODEL.gguf -ngl 999 $(cat {path})", (note, *said))


def arguments(on_cpu: Sequence[int], dense_layers: int) -> list[str]:
    """Words of the command line that leave these MoE layers to the CPU; none of them has a blank or a quote."""
    if not on_cpu:
        return ["--n-cpu-moe", "0"]
    if list(on_cpu) == list(range(len(on_cpu))):
        return ["--n-cpu-moe", str(dense_layers + len(on_cpu))]
    numbers = "|".join(str(dense_layers + layer) for layer in on_cpu)
    return ["-ot", rf"blk\.({numbers}){TENSORS}=CPU"]


EXPORTER = Exporter(
    name="llama.cpp",
    summary="the arguments, `--n-cpu-moe` or `-ot`, that keep whole layers of experts on the GPU, as many as fit",
    writes="FILE",
    write=write,
    keeps=frozenset(),
    loses=("placement of single experts",),
    takes=frozenset({"cache_bytes", "ranking", "dense_layers"}),
    needs=frozenset({"cache_bytes"}),
)
