"""How large the model of a run is: its experts, and what every token reads beside them."""

from __future__ import annotations

from dataclasses import dataclass

from moereplay.calibration.files import Line
from moereplay.calibration.refusal import RefusalError
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import MIB
from moereplay.traces.dense import TABLE_BITS, dense_of, resolved, with_bytes
from moereplay.traces.geometry import KnownModel, known
from moereplay.traces.schema import Geometry, TraceError
from moereplay.traces.weight_formats import BITS_PER_WEIGHT, named_in


@dataclass(frozen=True)
class Sizes:
    """Of one model as one run stored it."""

    layers: int
    experts: int
    k: int  #: of the run, which may use fewer than the model's own
    expert_bytes: float  #: mean over layers
    dense_bytes: float | None  #: that a token reads and that are no routed expert; None if nobody says
    dense_from: str  #: where the dense bytes are from
    weight_format: str  #: of the experts

    @property
    def demand_bytes(self) -> float:
        """Of all experts that one token is routed to."""
        return self.layers * self.k * self.expert_bytes


def sizes_of(cell: Line, model: Line | None) -> Sizes:
    """The sizes of a cell's model, from its row, models.csv and known models. Raises RefusalError."""
    like = _known(cell.text("model"))
    geometry = like.geometry if like else None
    layers = _whole(cell, "moe_layers", geometry and geometry.layers)
    experts = _whole(cell, "experts", geometry and geometry.experts)
    k = _whole(cell, "k", geometry and geometry.k)
    if k > experts:
        raise ConfigError(f"{cell.where}: k is {k}; expected at most the {experts} experts of a layer")
    each = _expert_bytes(cell, geometry)
    dense, said = _dense(cell, model, like, layers * experts * each, each)
    return Sizes(layers, experts, k, each, dense, said, named_in(cell.text("quant")) or "")


def _known(name: str) -> KnownModel | None:
    try:
        return known(name)
    except TraceError:
        return None


def _whole(cell: Line, column: str, otherwise: int | None) -> int:
    value = cell.amount(column) or otherwise
    if not value:
        raise RefusalError(f"{column} is not said, and {cell.text('model')} is no known model")
    return int(value)


def _expert_bytes(cell: Line, geometry: Geometry | None) -> float:
    """Mean bytes of an expert: the row's, else the known model's in the format that the row names."""
    if said := cell.amount("expert_bytes_mean"):
        return said
    stored = named_in(cell.text("quant"))
    if geometry is None or geometry.expert_params is None or stored is None:
        raise RefusalError("expert_bytes_mean is not said, and model and quant do not tell it")
    if known_bytes := geometry.bytes_by_bits.get(int(BITS_PER_WEIGHT[stored])):
        return sum(known_bytes) / len(known_bytes)
    return geometry.expert_params * BITS_PER_WEIGHT[stored] / 8


def _dense(
    cell: Line, model: Line | None, like: KnownModel | None, all_experts: float, each: float
) -> tuple[float | None, str]:
    """Bytes that a token reads beside its experts, and where the figure is from."""
    if model and (read := model.amount("dense_read_per_token_mib")):
        return read * MIB, "models.csv"
    if model and (whole := model.amount("file_bytes")) and whole > all_experts:
        return whole - all_experts - _embedding(like), "the file's bytes without its experts"
    if held := cell.amount("dense_mib"):
        return _read_of(held * MIB, like), "dense_mib"
    if like and like.geometry.dense_params and like.geometry.expert_params:
        weights = like.geometry.dense_params * like.geometry.layers + (like.geometry.head_params or 0)
        return weights * each / like.geometry.expert_params, "its weights, stored as the experts are"
    return None, "not said"


def _read_of(held: float, like: KnownModel | None) -> float:
    """Bytes that a token reads of so many dense ones: all but an embedding table apart from the head."""
    if like is None:
        return held
    return dense_of(resolved(with_bytes(like.geometry, round(held)), like.name)).read


def _embedding(like: KnownModel | None) -> float:
    """Bytes of an embedding table apart from the head, of which a token reads one row."""
    return 0.0 if like is None else like.embedding_params * TABLE_BITS / 8
