"""What to set in engines that people run, for a cache of so many bytes: one function per engine, with its source."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from moereplay.simulator.memory import Memory
from moereplay.traces.placement import experts_per_layer, last_layers, mean_experts
from moereplay.traces.schema import Geometry


class Held(NamedTuple):
    """What an engine is set up for."""

    geometry: Geometry
    memory: Memory
    cache_bytes: int  #: of experts that fast memory holds
    beside_cpu: bool  #: the memory is an accelerator's with a CPU beside it, as these engines expect

    @property
    def per_layer(self) -> int:
        """Experts of each layer that the cache holds if every layer gets the same number."""
        return experts_per_layer(self.geometry, self.cache_bytes)


def llama_cpp(held: Held) -> str:
    """It keeps the experts of whole layers (github.com/ggml-org/llama.cpp, pull request 15077)."""
    return f"--n-cpu-moe {held.geometry.layers - last_layers(held.geometry, held.cache_bytes)}"


def ktransformers(held: Held) -> str:
    """Experts of each layer on the GPU, the others on the CPU (kt-kernel's documents; SGLang has the same option)."""
    return f"--kt-num-gpu-experts {held.per_layer}"


def moe_infinity(held: Held) -> str:
    """The share of the device's memory that holds parameters (github.com/EfficientMoE/MoE-Infinity, README)."""
    share = (held.memory.dense_bytes + held.cache_bytes) / held.memory.total_bytes
    return f"device_memory_ratio={share:.2f}"


def mixtral_offloading(held: Held) -> str:
    """Experts of each layer that are not cached (github.com/dvmazur/mixtral-offloading, its notebook)."""
    return f"offload_per_layer={held.geometry.experts - held.per_layer}"


ENGINES: dict[str, Callable[[Held], str]] = {
    "llama.cpp": llama_cpp,
    "ktransformers": ktransformers,
    "MoE-Infinity": moe_infinity,
    "mixtral-offloading": mixtral_offloading,
}


def flags(held: Held) -> dict[str, object]:
    """The cache in MiB and in experts of mean size, and where it is a GPU's every engine's own words for it."""
    return {
        "cache_mib": held.cache_bytes // 2**20,
        "slots": mean_experts(held.geometry, held.cache_bytes),
        "slots_per_layer": held.per_layer,
        "unequal": len(set(held.geometry.expert_bytes)) > 1,
        **{name: spelled(held) for name, spelled in ENGINES.items() if held.beside_cpu},
    }
