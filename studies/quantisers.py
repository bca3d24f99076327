"""Compare quantisers of experts at few bits: `make study-quantisers`; studies/pages/quantisers.md has the figures.

Last changed in commit 391cf4f6. Which quantiser errs least at a width?
Answer: hqq: docs/precision.md.

Three tables. Experts of OLMoE's shape with random weights, normal and heavy-tailed (Student's t, 4 degrees of freedom):
error of the weights and of an expert's output, stored bits, time. The same through the libraries' own kernels: do
they multiply by the weights that are restored here? And the bundled miniature with every expert at one width, LIVE:
perplexity and KL against the unmodified model on held-out windows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from miniature_quality import heldout
from torch import Tensor
from torch.nn.functional import linear, silu

from moereplay.analysis.tables import console, table
from moereplay.simulator.config import configure
from moereplay.tracegen.checkpoint import Loaded, load
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live.experts import tiers_of
from moereplay.tracegen.live.run import LiveRequest, proven, run
from moereplay.tracegen.modules import MoeModules
from moereplay.tracegen.precision import CONTRIB, DEFAULT, check_quantiser
from moereplay.tracegen.precision.contract import Packed, Quantiser, imported
from moereplay.tracegen.precision.contract import load as quantiser_of
from moereplay.traces.documents import json_text
from moereplay_quantisers.torchao_intx import as_theirs

BITS = (8, 4, 3, 2)
HIDDEN, INNER = 2048, 1024  #: of OLMoE
SPREAD = 0.02  #: standard deviation of the normal weights, and the scale of the others
TOKENS = 64
WINDOW = 256  #: tokens of a request of the miniature


class Expert(NamedTuple):
    """Gate and up fused, as transformers keeps them, and down."""

    gate_up: Tensor  #: (2 inner, hidden)
    down: Tensor  #: (hidden, inner)


class Kept(NamedTuple):
    """An expert that was stored and restored."""

    expert: Expert
    packed: list[Packed]
    pack_ms: float
    restore_ms: float


def main() -> None:
    """Print the tables, and write them to --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=4, help="of each kind of weights")
    parser.add_argument("--inner", type=int, default=INNER, help="of an expert")
    parser.add_argument("--windows", type=int, default=16, help=f"of {WINDOW} tokens; 0: without the miniature")
    parser.add_argument("--names", nargs="+", default=[DEFAULT, *CONTRIB], choices=[DEFAULT, *CONTRIB])
    parser.add_argument("--out", type=Path, default=Path("runs/quantisers.json"))
    options = parser.parse_args()
    chosen = [quantiser_of(name) for name in options.names if _is_there(name)]
    found = {
        "experts": list(_experts(chosen, options.experts, options.inner)),
        "kernels": list(_kernels(options.names, options.inner)),
        "miniature": list(_miniature(chosen, options.windows)) if options.windows else [],
    }
    for title, rows in found.items():
        console().print(table(rows, title=title))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json_text({"torch": torch.__version__, "threads": torch.get_num_threads(), **found}))


def _is_there(name: str) -> bool:
    try:
        check_quantiser(name)
    except RecordError as error:
        print(f"left out: {error}")
        return False
    return True


def _widths(quantiser: Quantiser) -> list[int]:
    return [bits for bits in BITS if quantiser.widths is None or bits in quantiser.widths]


# Random experts


def _experts(chosen: list[Quantiser], count: int, inner: int) -> Iterator[dict[str, object]]:
    drawn = {kind: [_drawn(kind, seed, inner) for seed in range(count)] for kind in ("normal", "t4")}
    for quantiser in chosen:
        for bits in _widths(quantiser):
            kept = {kind: [_kept(quantiser, each, bits) for each in experts] for kind, experts in drawn.items()}
            pairs = {kind: list(zip(drawn[kind], kept[kind], strict=True)) for kind in drawn}
            row: dict[str, object] = {"quantiser": quantiser.name, "bits": bits}
            row |= {f"weights {kind}": _mean(_weight_error, pairs[kind]) for kind in drawn}
            row |= {f"output {kind}": _mean(_output_error, pairs[kind]) for kind in drawn}
            every = [each for of in kept.values() for each in of]
            row["bits stored"] = _bits(kept["normal"][0].packed)
            row["pack ms"], row["restore ms"] = (min(getattr(e, f"{what}_ms") for e in every) for what in STEPS)
            yield row


STEPS = ("pack", "restore")


def _drawn(kind: str, seed: int, inner: int) -> Expert:
    """Draw an expert in bfloat16, the precision of checkpoints."""
    torch.manual_seed(seed)
    shapes = (2 * inner, HIDDEN), (HIDDEN, inner)
    heavy = torch.distributions.StudentT(4.0)
    make = torch.randn if kind == "normal" else heavy.sample
    return Expert(*((make(torch.Size(shape)) * SPREAD).bfloat16() for shape in shapes))


def _kept(quantiser: Quantiser, expert: Expert, bits: int) -> Kept:
    began = time.perf_counter()
    packed = [quantiser.pack(each, bits) for each in expert]
    then = time.perf_counter()
    restored = Expert(*(quantiser.restore(each, torch.bfloat16) for each in packed))
    return Kept(restored, packed, 1e3 * (then - began), 1e3 * (time.perf_counter() - then))


def _mean(error: Callable[[Expert, Expert], float], pairs: list[tuple[Expert, Kept]]) -> float:
    return sum(error(own, kept.expert) for own, kept in pairs) / len(pairs)


def _bits(packed: list[Packed]) -> float:
    return 8 * sum(each.bytes for each in packed) / sum(each.shape[0] * each.shape[1] for each in packed)


def _weight_error(own: Expert, other: Expert) -> float:
    """Return the relative error of both matrices together."""
    both = [torch.cat([each.float().flatten() for each in expert]) for expert in (own, other)]
    return _relative(*both)


def _output_error(own: Expert, other: Expert) -> float:
    state = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    return _relative(_output(own, state), _output(other, state))


def _output(expert: Expert, state: Tensor) -> Tensor:
    gate, up = linear(state, expert.gate_up.float()).chunk(2, -1)
    return linear(silu(gate) * up, expert.down.float())


def _relative(own: Tensor, other: Tensor) -> float:
    return ((other - own).norm() / own.norm()).item()


# The libraries' own kernels


def _kernels(names: list[str], inner: int) -> Iterator[dict[str, object]]:
    """Compare the product with the restored weight to the library's own product of the same weight and state."""
    weight = _drawn("normal", 0, inner).down.float()
    state = torch.randn(TOKENS, inner, generator=torch.Generator().manual_seed(2))
    for name in (name for name in KERNELS if name in names and _is_there(name)):
        quantiser = quantiser_of(name)
        for bits in (bits for bits in _widths(quantiser) if (name, bits) != ("bitsandbytes", 8)):
            for dtype in (torch.float32, torch.bfloat16):
                packed = quantiser.pack(weight.to(dtype), bits)
                ours = linear(state.to(dtype), quantiser.restore(packed, dtype))
                theirs = KERNELS[name](weight.to(dtype), packed, state.to(dtype))
                most = ((ours - theirs).abs().max() / theirs.abs().max()).item()
                said = "yes" if torch.equal(ours, theirs) else "no"
                yield {"quantiser": name, "bits": bits, "dtype": str(dtype), "equal": said, "largest difference": most}


def _of_hqq(weight: Tensor, packed: Packed, state: Tensor) -> Tensor:
    """Multiply with hqq's layer, which restores weights in its compute precision."""
    library: Any = imported("hqq.core.quantize")
    config = library.BaseQuantizeConfig(nbits=int(packed.bits), group_size=64, axis=1)
    config["weight_quant_params"]["round_zero"] = False  # its layers round offsets at 4 bits, its quantiser does not
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight.data = weight.clone()
    with torch.no_grad():
        theirs = library.HQQLinear(layer, config, compute_dtype=weight.dtype, device="cpu")
        theirs.meta |= {each: packed.tensors[each].view(-1, 1).to(weight.dtype) for each in ("scale", "zero")}
        return theirs(state)


def _of_bitsandbytes(kind: str) -> Callable[[Tensor, Packed, Tensor], Tensor]:
    def product(weight: Tensor, packed: Packed, state: Tensor) -> Tensor:
        library: Any = imported("bitsandbytes")
        values, kept = library.functional.quantize_4bit(weight, blocksize=64, quant_type=kind)
        return library.matmul_4bit(state, values.t(), kept)

    return product


def _of_intx(weight: Tensor, packed: Packed, state: Tensor) -> Tensor:
    return linear(state, as_theirs(packed)[:, : packed.shape[1]].to(state.dtype))


KERNELS: dict[str, Callable[[Tensor, Packed, Tensor], Tensor]] = {
    "hqq": _of_hqq,
    "bitsandbytes": _of_bitsandbytes("nf4"),
    "bitsandbytes_fp4": _of_bitsandbytes("fp4"),
    "torchao_intx": _of_intx,
}


# The miniature


def _miniature(chosen: list[Quantiser], count: int) -> Iterator[dict[str, object]]:
    loaded = load("miniature")
    modules = proven(loaded)
    to_run = [LiveRequest(tuple(each.tolist()), WINDOW) for each in heldout(loaded, count, WINDOW)]
    for quantiser in chosen:
        for bits in _widths(quantiser):
            yield _live(loaded, modules, to_run, quantiser.name, bits)


def _live(loaded: Loaded, modules: MoeModules, to_run: list[LiveRequest], name: str, bits: int) -> dict[str, object]:
    """Run with all experts at one width: misses fetch no other, and the cache starts empty."""
    config = configure(capacity="25%", miss=f"lowest_bit:bits={bits}")
    live = run(loaded, to_run, config, modules=modules, quantiser=name)
    assert live.quality is not None
    judged, (stored,) = live.quality.total, live.stored
    return {
        "quantiser": name,
        "bits": bits,
        "weights": _error(loaded, modules, name, bits),
        "bits stored": stored.bits_per_weight,
        "perplexity": judged.perplexity,
        "unmodified": judged.perplexity_base,
        "KL": judged.mean_kl,
        "same likeliest": judged.top1,
    }


def _error(loaded: Loaded, modules: MoeModules, name: str, bits: int) -> float:
    """Return the relative error of all matrices of the first layer's experts."""
    tiers, experts = tiers_of(modules, name, loaded.weights_sha256), modules.sites[0].experts
    which = [(each, expert) for each in ("gate_up_proj", "down_proj") for expert in range(modules.geometry.experts)]
    own = torch.cat([getattr(experts, each).data[expert].float().flatten() for each, expert in which])
    return _relative(own, torch.cat([tiers.weight(experts, *each, bits).float().flatten() for each in which]))


if __name__ == "__main__":
    main()
