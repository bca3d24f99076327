"""Discovery of a transformers MoE model's gates, the norms before them and its experts.

Nothing is found by its name: gates are the modules that the model declares as the source of `router_logits`, and a
probe run finds the rest. The block is what holds the gate in its decoder layer, the norm is the layer's module whose
output tensor is the block's input, the experts are what the gate's ids are given to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from moereplay.tracegen.decoding import input_device
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.families import routing_of
from moereplay.traces.schema import Geometry

PROBE_TOKENS = 32
#: How models name the correction bias of a gate, a buffer of the gate or of its block.
BIAS_NAMES = ("e_score_correction_bias", "expert_bias")


@dataclass(frozen=True)
class Site:
    """The modules of one MoE layer that hooks are put on."""

    layer: int  #: index of the decoder layer
    gate: nn.Module
    index: int  #: position of the logits in the gate's output; weights and ids follow
    norm: nn.Module
    experts: nn.Module
    block: nn.Module  #: holds gate and experts
    extra: tuple[Tensor, ...] = ()  #: the gate's further arguments: tensors of the block


@dataclass(frozen=True)
class MoeModules:
    """The modules of a model that take part in routing; `sites` in the order in which they run."""

    model: transformers.PreTrainedModel
    sites: tuple[Site, ...]
    family: str
    geometry: Geometry
    bias: np.ndarray | None  #: (L, E) f32 correction bias

    @property
    def name(self) -> str:
        """The model's name in messages."""
        return name_of(self.model)

    def bias_at(self, site: int) -> Tensor | None:
        """Return the correction bias (E,) f32 of a site, on its gate's device."""
        if self.bias is None:
            return None
        return torch.from_numpy(self.bias[site]).to(next(self.sites[site].gate.parameters()).device)


class Gate(NamedTuple):
    """A gate as the model declares it."""

    owner: transformers.PreTrainedModel  #: whose config states the routing
    path: str
    module: nn.Module
    index: int


class Place(NamedTuple):
    """The decoder layer that a gate is in."""

    layer: int
    module: nn.Module
    gate: Gate


def name_of(model: transformers.PreTrainedModel) -> str:
    """Return the name of a model for messages: its checkpoint, or its class."""
    return model.config.name_or_path or type(model).__name__


def discover(model: transformers.PreTrainedModel) -> MoeModules:
    """Find every MoE layer of a model in evaluation mode, its sizes and its routing rule.

    Raises RecordError naming model and layer if a layer is not one gate that gives (logits, weights, ids) to one
    experts module behind one norm, if layers differ, or if the routing follows no known rule.
    """
    if model.training:
        raise RecordError(f"{name_of(model)} is in training mode; call .eval() before recording")
    try:
        places = _places(model)
        calls = probe(model, PROBE_TOKENS, [place.module for place in places])
        return _describe(model, places, tuple(_site(place, calls) for place in places), calls)
    except RecordError as unsuited:
        raise RecordError(f"{name_of(model)}: {unsuited}") from None


def _places(model: transformers.PreTrainedModel) -> list[Place]:
    """Return the gates in order, each in its own decoder layer."""
    if model.config.is_encoder_decoder:
        raise RecordError("an encoder-decoder; only decoders that run on token ids alone can be recorded")
    found = [Place(*_decoder_layer(model, each.path), each) for each in gates_of(model)]
    places = sorted(found, key=lambda place: place.layer)
    if not places:
        raise RecordError(f"no MoE layers: {type(model).__name__} declares no router logits to record")
    for place in places:
        if len({other.gate.path for other in places if other.layer == place.layer}) > 1:
            raise RecordError(f"layer {place.layer} has several gates: expected one")
        _check_present(place, place.gate.module)
    return places


def _check_present(place: Place, part: nn.Module) -> None:
    """Raises RecordError for offloaded gates or norms.

    Look-ahead runs them outside their layer, where accelerate has not loaded their weights.
    """
    if any(tensor.is_meta for tensor in part.parameters()):
        raise RecordError(f"layer {place.layer}: {type(part).__name__} is offloaded; keep gates and norms on a device")


def gates_of(model: transformers.PreTrainedModel) -> list[Gate]:
    """List the modules that the model, or a model inside it, declares as sources of `router_logits`."""
    owners = [(path, each) for path, each in model.named_modules() if isinstance(each, transformers.PreTrainedModel)]
    found: dict[nn.Module, Gate] = {}
    # Inner models come later and describe their own gates best
    for prefix, owner in owners:
        for target, index, layer_name in _recorders(owner):
            for path, module in owner.named_modules(prefix=prefix):
                if isinstance(module, target) and (not layer_name or f".{layer_name}." in f".{path}."):
                    found[module] = Gate(owner, path, module, index)
    return list(found.values())


def _recorders(owner: transformers.PreTrainedModel) -> list[tuple[Any, int, str]]:
    """Return (class, index, part of the path) of each source the model declares: OutputRecorders, or bare classes."""
    declared: Any = owner.can_record_outputs.get("router_logits", [])
    several = declared if isinstance(declared, list) else [declared]
    # A bare class means the second of its outputs, as in transformers
    return [
        (getattr(each, "target_class", each), getattr(each, "index", 1), getattr(each, "layer_name", None) or "")
        for each in several
    ]


def _decoder_layer(model: nn.Module, path: str) -> tuple[int, nn.Module]:
    """Index and module of the outermost list entry on the way to a module."""
    parts = path.split(".")
    for depth, part in enumerate(parts):
        if part.isdecimal() and isinstance(model.get_submodule(".".join(parts[:depth])), nn.ModuleList):
            return int(part), model.get_submodule(".".join(parts[: depth + 1]))
    raise RecordError(f"{path} is not in a list of decoder layers")


def _site(place: Place, calls: Calls) -> Site:
    gate = place.gate.module
    block = next((each for each in place.module.children() if gate in set(each.modules())), None)
    if block is None or any(len(calls.get(each, ())) != 1 for each in (gate, block)):
        raise RecordError(f"layer {place.layer}: {place.gate.path} does not run exactly once, inside its own module")
    ids = _triple(place, calls)[2]
    norm = next((each for each in place.module.children() if _makes(calls.get(each, []), calls[block][0].first)), None)
    if norm is None:
        raise RecordError(f"layer {place.layer}: the input of {type(block).__name__} is not the output of one norm")
    _check_present(place, norm)
    experts = next((module for module in block.modules() if _takes(calls.get(module, []), ids)), None)
    if experts is None:
        raise RecordError(f"layer {place.layer}: no module of {type(block).__name__} receives the ids of its gate")
    return Site(place.layer, gate, place.gate.index, norm, experts, block, _extra(place, block, calls[gate][0]))


def _makes(calls: list[Call], state: Tensor) -> bool:
    """Return whether a module's one call created this tensor from residuals (1, T, H)."""
    return len(calls) == 1 and calls[0].output is state and calls[0].first.shape[:2] == (1, PROBE_TOKENS)


def _takes(calls: list[Call], ids: Tensor) -> bool:
    """Return whether a module's one call took this tensor."""
    return len(calls) == 1 and any(part is ids for part in calls[0].given)


def _triple(place: Place, calls: Calls) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logits (T, E), weights (T, k), ids (T, k)) that a gate gave."""
    output, index = calls[place.gate.module][0].output, place.gate.index
    triple: Any = output[index : index + 3] if isinstance(output, tuple) else ()
    fits = [isinstance(each, Tensor) and each.ndim == 2 and len(each) == PROBE_TOKENS for each in triple]
    if fits != [True] * 3 or triple[2].is_floating_point() or triple[1].shape != triple[2].shape:
        what = f"{type(place.gate.module).__name__} does not give router logits, weights and ids"
        raise RecordError(f"layer {place.layer}: {what} in that order, one row per token; an adapter is needed")
    return triple


def _extra(place: Place, block: nn.Module, call: Call) -> tuple[Tensor, ...]:
    """Return the arguments of the gate besides its input: tensors of the block, which are the same in every pass."""
    held = [*block.buffers(), *block.parameters()]
    extra = tuple(part for part in call.given if part is not call.first)
    if not all(any(part is tensor for tensor in held) for part in extra):
        raise RecordError(f"layer {place.layer}: {place.gate.path} does not route by its input alone")
    return extra


def _describe(
    model: transformers.PreTrainedModel, places: list[Place], sites: tuple[Site, ...], calls: Calls
) -> MoeModules:
    outputs = [_triple(place, calls) for place in places]
    shapes = {(logits.shape[-1], ids.shape[-1]) for logits, _, ids in outputs}
    if len(shapes) > 1:
        raise RecordError(f"layers differ in (experts, k): {sorted(shapes)}: expected one shape")
    ((experts, k),) = shapes
    bias = _biases(sites, experts)
    family, router, shared = routing_of(places[0].gate.owner.config, outputs, bias)
    sizes = measure(model, [site.experts for site in sites], [place.module for place in places], experts)
    counts = {"layers": len(sites), "experts": experts, "k": k, "shared_experts": shared}
    return MoeModules(model, sites, family, Geometry(router=router, **counts, **sizes._asdict()), bias)


def _biases(sites: tuple[Site, ...], experts: int) -> np.ndarray | None:
    found = [_bias(site) for site in sites]
    present = [each.detach().float().cpu().numpy().reshape(experts) for each in found if each is not None]
    if present and len(present) < len(sites):
        raise RecordError(f"only {len(present)} of {len(sites)} layers have a correction bias")
    return np.stack(present) if present else None


def _bias(site: Site) -> Tensor | None:
    tensors = [*site.block.named_buffers(), *site.block.named_parameters()]
    return next((tensor for name, tensor in tensors if name.rpartition(".")[2] in BIAS_NAMES), None)


# -- The probe run: one short forward pass that keeps every call of chosen modules, to find and check a model's parts.

SEED = 20240924


class Call(NamedTuple):
    """Arguments and output of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def given(self) -> tuple[Any, ...]:
        """All arguments, positional ones first."""
        return (*self.args, *self.kwargs.values())

    @property
    def first(self) -> Any:
        """The first argument, by position or by name: a module's input."""
        return self.given[0]


Calls = dict[nn.Module, list[Call]]


def probe(model: transformers.PreTrainedModel, tokens: int, beneath: Iterable[nn.Module]) -> Calls:
    """Return the calls of every module beneath the given ones, modules in the order in which they first return.

    The pass is one row of `tokens` random token ids, the same at every call, without a cache.
    """
    calls: dict[nn.Module, list[Call]] = {}

    def keep(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        calls.setdefault(module, []).append(Call(args, kwargs, output))

    watched = dict.fromkeys(module for root in beneath for module in root.modules())
    hooks = [module.register_forward_hook(keep, with_kwargs=True) for module in watched]
    try:
        with torch.inference_mode():
            vocabulary = len(next(model.get_input_embeddings().parameters()))
            ids = torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(SEED))
            model(input_ids=ids.to(input_device(model)), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


# -- Sizes of a loaded model, as `traces/geometry.py` defines them, measured on its tensors.

#: Dtypes that hold no plain numbers, so that elements cannot be counted.
PACKED = (torch.uint8, torch.int32)


class Sizes(NamedTuple):
    """Fields of `traces.schema.Geometry`. Parameters include biases and norms."""

    expert_bytes: tuple[int, ...]  #: of one expert, per MoE layer, at the loaded precision
    expert_bits: float  #: per parameter, scales of quantised experts included
    expert_params: int
    dense_params: int  #: per MoE layer, on average: all but the routed experts
    head_params: int  #: used by every token outside the MoE layers: head, last norm, dense layers
    dense_bits: float  #: per parameter of these two


def measure(
    model: transformers.PreTrainedModel, experts: list[nn.Module], layers: list[nn.Module], count: int
) -> Sizes:
    """Return sizes from the experts module and the decoder layer of each gate, `count` experts in each.

    Raises RecordError if a layer does not hold `count` experts of one size, or holds them in an unknown packed format.
    """
    held = [_experts(each, count, at) for at, each in enumerate(experts)]
    sizes, params = ([sum(map(size, each)) // count for each in held] for size in (_bytes, _numbers))
    moe = sum(_params(layer) for layer in layers)
    dense = _params(model) - count * sum(params) - _embedding(model)
    return Sizes(
        expert_bytes=tuple(sizes),
        expert_bits=8 * sum(sizes) / sum(params),
        expert_params=sum(params) // len(params),
        dense_params=(moe - count * sum(params)) // len(layers),
        head_params=_params(model) - moe - _embedding(model),
        dense_bits=_dense_bits(model, count * sum(sizes), dense),
    )


def _experts(module: nn.Module, count: int, at: int) -> list[Tensor]:
    """Return the tensors of a layer's experts."""
    tensors = list(chain(module.parameters(), module.buffers()))
    held = int(getattr(module, "num_experts", count))
    if held != count or not tensors or sum(map(_bytes, tensors)) % count or sum(map(_numbers, tensors)) % count:
        raise RecordError(
            f"MoE layer {at}: {type(module).__name__} does not hold the {count} equal experts of its gate"
        )
    for tensor in tensors:
        if tensor.dtype in PACKED and not hasattr(tensor, "quant_state"):
            raise RecordError(f"MoE layer {at}: experts are packed as {tensor.dtype}; load the checkpoint unpacked")
    return tensors


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _numbers(tensor: Tensor) -> int:
    """Count the numbers that a tensor represents: bitsandbytes packs two in a byte and stores the shape separately."""
    packed = getattr(tensor, "quant_state", None)
    return tensor.numel() if packed is None else packed.shape.numel()


def _params(module: nn.Module) -> int:
    return sum(map(_numbers, module.parameters()))


def _dense_bits(model: transformers.PreTrainedModel, experts: int, params: int) -> float:
    """Return the bits per weight of all but routed experts and embedding tables; 16 if there are none."""
    embedding = _embedding(model) and sum(map(_bytes, model.get_input_embeddings().parameters()))
    return 8 * (sum(map(_bytes, model.parameters())) - experts - embedding) / params if params else 16.0


def _embedding(model: transformers.PreTrainedModel) -> int:
    """Return parameters that only look tokens up: none if the head multiplies by the same matrix."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    return 0 if tied else _params(embedding)
