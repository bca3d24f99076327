"""Integer times of one model on one platform, and the home link of each expert."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from functools import cached_property, partial
from itertools import accumulate, pairwise
from math import floor

from moereplay.policies.contract import Costs
from moereplay.simulator.capacity import layers_in
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Contention, Measured, Platform, Roofline
from moereplay.simulator.rates import MILLION, NS, bounded, ceiling, exact, half_even, ns_per_byte, share_up
from moereplay.simulator.wires import Wire
from moereplay.traces.dense import Dense, dense_of, params_of
from moereplay.traces.schema import Geometry


def homes(experts: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Return the home link of each expert of a layer; `shares` are those of the links, in any unit.

    Experts are assigned in contiguous runs in the order of their ids. The lengths follow the shares by largest
    remainder: every link gets the whole part of its quota, and the rest goes one each to the largest fractions, ties to
    the lower link.
    """
    exact = [Fraction(str(share)) for share in shares]
    quotas = [experts * share / sum(exact) for share in exact]
    runs = [floor(quota) for quota in quotas]
    by_fraction = sorted(range(len(quotas)), key=lambda link: (runs[link] - quotas[link], link))
    for link in by_fraction[: experts - sum(runs)]:
        runs[link] += 1
    return tuple(link for link, run in enumerate(runs) for _ in range(run))


def homes_of(platform: Platform, geometry: Geometry) -> tuple[int, ...]:
    """Return the home link of every expert x. Raises ConfigError if links name layers, and not each of them once."""
    if not platform.links[0].layers:
        return homes(geometry.experts, platform.shares) * geometry.layers
    named = [(layer, row) for row, link in enumerate(platform.links) for layer in layers_in(link.layers)]
    rows = Counter(layer for layer, _ in named)
    wrong = {
        "no row names": [layer for layer in range(geometry.layers) if layer not in rows],
        "two rows name": sorted(layer for layer, times in rows.items() if times > 1),
        "the model lacks": sorted(layer for layer in rows if layer >= geometry.layers),
    }
    if faults := [f"{fault} {', '.join(map(str, layers[:5]))}" for fault, layers in wrong.items() if layers]:
        raise ConfigError(
            f"platform {platform.name}: layers of [[links]]: expected each of the model's {geometry.layers} MoE layers "
            f"once, but {'; '.join(faults)}; add its layers after the platform, as {_even_layers(platform, geometry)}"
        )
    return tuple(row for _, row in sorted(named) for _ in range(geometry.experts))


def _even_layers(platform: Platform, geometry: Geometry) -> str:
    """Return what follows a platform's name so that its links divide the layers of a model evenly."""
    ends = [geometry.layers * row // len(platform.links) for row in range(len(platform.links) + 1)]
    return "".join(f":links.{row}.layers={first}-{last - 1}" for row, (first, last) in enumerate(pairwise(ends)))


# times

BATCH_TABLES = ("matrix_sum", "read_first", "read_size", "read_rate", "slow_read_rate", "lane_rate", "slow_lane_rate")
Weights = tuple[int, int, str]  #: number, bytes and format
EQUAL_MATRICES = (1, 1, 1)  #: gate, up and down, of a model that does not say


class Times:
    """Integer times of one geometry and its precision tiers on one platform, computed on demand."""

    def __init__(self, platform: Platform, geometry: Geometry, tiers: tuple[tuple[int, ...], ...]) -> None:
        """`tiers[p][row]` is the bytes of an expert at precision p, by the geometry's rows."""
        self._platform, self._geometry, self._tiers = platform, geometry, tiers
        self._rows = geometry.rows
        self.row_of: list[int] = self._rows.of.tolist()  #: of every expert x: where tables have its bytes and times
        #: Of each link: those into the fast tier first, then those that fill the tiers below, from the top down.
        self.latency_ns = tuple(link.idle_ns for link in platform.wires)
        self.first = tuple(link.first_millionths for link in platform.wires)  #: of an expert, before its compute begins
        self.depth = tuple(link.depth for link in platform.wires)
        self.by_matrix = platform.by_matrix
        #: Sums of the relative sizes of an expert's first 1, 2, ... matrices.
        self.matrices = tuple(accumulate(geometry.matrices or EQUAL_MATRICES))
        self.homes = homes_of(platform, geometry)  #: the link of every expert x
        self._known: dict[tuple[str, int, int, str, int, float], int] = {}
        self._left = platform.contention or Contention()  #: shares of their rates, while others work

    def kind(self, y: int) -> tuple[int, int]:
        """Return row and precision of a copy y, by which tables have its bytes and times."""
        x, precision = divmod(y, len(self._tiers))
        return self.row_of[x], precision

    def is_of(self, platform: Platform, geometry: Geometry, tiers: tuple[tuple[int, ...], ...]) -> bool:
        """Return True if these are the times of this model on an equal machine."""
        same = self._geometry is geometry or self._geometry == geometry
        return same and self._tiers == tiers and self._platform == platform

    @cached_property
    def _params(self) -> tuple[int, ...]:
        """Weights of an expert by row, derived from its bytes if the model's count is unknown."""
        known, bits = self._geometry.expert_params, exact(self._geometry.expert_bits)
        sizes = self._rows.sizes
        return tuple(known or half_even(size * 8 * bits.denominator, bits.numerator) for size in sizes)

    @cached_property
    def _formats(self) -> tuple[str, ...]:
        return tuple(self._geometry.weight_format if tier == self._rows.sizes else "" for tier in self._tiers)

    @cached_property
    def _dense_params(self) -> tuple[tuple[int, ...], int]:
        return params_of(self._geometry)

    @cached_property
    def costs(self) -> Costs:
        """Costs of the mean expert, rounded down, for policies that weigh its link against the CPU."""
        load = sum(
            times * (self.latency_ns[home] + self.wire_ns[home][row][0] + self.load_ns[row][0])
            for (row, home), times in Counter(zip(self.row_of, self.homes, strict=True)).items()
        )
        often = Counter(self.row_of).items()
        compute = sum(times * self.expert_ns(row, 0, 1) for row, times in often)
        cpu = sum(times * max(1, self.cpu_ns(row, 0, 1)) for row, times in often) if self._platform.cpu else 0
        return Costs(*(spent // len(self.homes) for spent in (load, compute, cpu)))

    @cached_property
    def dense(self) -> Dense:
        """Bytes of the dense weights; 0 if unknown."""
        return dense_of(self._geometry)

    # links

    @cached_property
    def wire_ns(self) -> list[list[list[int]]]:
        """[link][row][precision] nanoseconds on the wire."""
        return self._wire(1)

    @cached_property
    def contended_wire_ns(self) -> list[list[list[int]]]:
        """`wire_ns` of a transfer that starts while the CPU computes."""
        return self._wire(self._left.link)

    def _wire(self, share: float) -> list[list[list[int]]]:
        if self.by_matrix:
            self._check_batches(share)
            of = [partial(link.batch_ns, reads=len(self.matrices), share=share) for link in self._platform.links]
            return self._by_size(of)
        table = self._by_size([partial(link.wire_ns, share=share) for link in self._platform.wires])
        bounded(max(ns for link in table for layer in link for ns in layer), "bytes_per_s")
        return table

    @cached_property
    def start_ns(self) -> list[list[list[int]]]:
        """[link][row][precision] more latency of a transfer that starts on an idle wire."""
        return self._by_size([partial(self._idle_start_ns, link) for link in self._platform.wires])

    def _idle_start_ns(self, link: Wire, size: int) -> int:
        first = share_up(size, self.matrices[0], self.matrices[-1]) if self.by_matrix else ceiling(size, link.reads)
        return link.idle_start_ns(first)

    @property
    def has_start(self) -> bool:
        """True if `start_ns` is not zero everywhere."""
        return any(link.start_ns or link.start_ns_per_mib for link in self._platform.wires)

    def _by_size(self, of: Sequence[Callable[[int], int]]) -> list[list[list[int]]]:
        """Return the times of each copy's bytes on each link, [link][row][precision]."""
        sizes = {size for tier in self._tiers for size in tier}
        each = [{size: ns(size) for size in sizes} for ns in of]
        return [[[known[size] for size in copies] for copies in zip(*self._tiers, strict=True)] for known in each]

    @property
    def expert_bytes(self) -> tuple[int, ...]:
        """Bytes of an expert of each row at its highest precision."""
        return self._tiers[0]

    # links that read matrix by matrix: a batch is all demands of a step that start together

    @property
    def has_stages(self) -> bool:
        """True if compute follows the matrices, in as many stages."""
        return self.by_matrix and not self.waits_for_all

    def batch_ns(self, link: int, copies: Sequence[tuple[int, int]], contended: bool = False) -> int:
        """Return the time on the wire of a batch of copies, (row, precision) each."""
        size = sum(self._tiers[precision][row] for row, precision in copies)
        share = self._left.link if contended else 1
        return self._platform.links[link].batch_ns(size, len(copies) * len(self.matrices), share)

    def batch_tables(self) -> dict[str, Sequence[object]]:
        """Return the figures of `batch_ns` by the names of BATCH_TABLES, for an engine that cannot call it.

        Of each link the place of its first point, then of all links points (bytes of a read, whole bytes/s) and bytes/s
        by the number of reads, 1, 2, ... until more make no difference; `slow` of a link that contends with the CPU.
        """
        links, slow = self._platform.links, self._left.link
        reads = range(1, min(max(self.depth), self._geometry.experts * len(self.matrices)) + 1)
        points = [link.read_rates() for link in links]
        slow_rates = [rate for link in links for _, rate in link.read_rates(slow)]
        return {
            "matrix_sum": self.matrices,
            "read_first": [0, *accumulate(map(len, points))],
            "read_size": [size for of in points for size, _ in of],
            "read_rate": [rate for of in points for _, rate in of],
            "slow_read_rate": slow_rates,
            "lane_rate": [link.lanes_rate(many) for link in links for many in reads],
            "slow_lane_rate": [link.lanes_rate(many, slow) for link in links for many in reads],
        }

    def of_matrices(self, ns: int, many: int) -> int:
        """Return the part of a time that the first `many` matrices take, rounded up."""
        return share_up(ns, self.matrices[many - 1], self.matrices[-1]) if many else 0

    def _check_batches(self, share: float) -> None:
        """Raises ConfigError if a layer's experts could take too long as one batch."""
        size = self._geometry.experts * max(max(sizes) for sizes in self._tiers)
        for link in self._platform.links:
            rates = [*(rate for _, rate in link.read_rates(share)), link.lanes_rate(1, share)]
            bounded(max(ceiling(size * NS, rate) for rate in rates if rate) if any(rates) else 0, "bytes_per_s")

    @property
    def has_pieces(self) -> bool:
        """True if compute may begin with a partially loaded expert."""
        return min(self.first) < MILLION and not self.waits_for_all

    @cached_property
    def load_ns(self) -> list[list[int]]:
        """[row][precision] nanoseconds that compute spends on having a demanded expert fetched."""
        return [[self._platform.loading.ns(size) for size in copies] for copies in zip(*self._tiers, strict=True)]

    @property
    def has_loading(self) -> bool:
        """True if `load_ns` is not zero everywhere."""
        return max(map(max, self.load_ns)) > 0

    @property
    def loads_prefetches(self) -> bool:
        """True if compute spends `load_ns` on prefetched experts as well."""
        return self._platform.loading.prefetch and self.has_loading

    @property
    def waits_for_all(self) -> bool:
        """True if a step computes only after all its transfers have landed."""
        return self._platform.overlap == "none"

    # compute; `contended` if a link works when it begins

    @property
    def slows_compute(self) -> bool:
        """True if links take from the accelerator's rate."""
        return self._left.compute < 1

    def dense_ns(self, layer: int, tokens: int, contended: bool = False) -> int:
        """Return the time of attention, norms, gate and shared experts of one layer, and of the gate's decisions."""
        compute, gate_ns = self._platform.compute, self._platform.loading.gate_ns
        if isinstance(compute, Measured):
            return compute.dense(tokens, self._share(contended)) + gate_ns
        weights = self._dense_params[0][layer], self.dense.layers[layer], self._geometry.dense_format
        return self._once("dense", compute, weights, tokens, self._share(contended)) + gate_ns

    def draft_ns(self, drafts: int) -> int:
        """Return what the drafts of a pass take before layer 0. Contention does not change it."""
        return self._platform.draft.ns(drafts)

    @property
    def has_decisions(self) -> bool:
        """True if `decision_ns` may be more than 0."""
        return self._platform.decisions.of_steps

    def decision_ns(self, names: Collection[str], gates: int, tokens: int) -> int:
        """Return what policies of these `names` decide in a step of `tokens`, `gates` of later layers evaluated.

        Part of the dense time. Contention does not change it.
        """
        of = self._platform.decisions
        each = self._router_ns(tokens) if of.gates and gates else of.ns_per_prediction
        return bounded(of.ns_by_name(names) + gates * each, "decisions", "lower")

    def _router_ns(self, tokens: int) -> int:
        """Return the time of one router. Raises ConfigError if the model's hidden size is unknown."""
        of, compute = self._geometry, self._platform.compute
        if not of.hidden:
            raise ConfigError(
                f"platform {self._platform.name}: decisions.gates requires the hidden size of the model, which neither "
                "the trace nor its model's name gives; set decisions.ns_per_prediction"
            )
        assert isinstance(compute, Roofline)
        params = of.hidden * of.experts
        bits = exact(of.dense_bits)
        size = ceiling(params * bits.numerator, 8 * bits.denominator)
        return self._once("dense", compute, (params, size, of.dense_format), tokens, 1)

    @property
    def victim_ns(self) -> int:
        """More latency of a transfer for each copy that it evicts."""
        each, copies = self._platform.decisions.ns_per_victim, len(self._tiers) * self._geometry.experts
        bounded(each * copies * self._geometry.layers, "decisions.ns_per_victim", "lower")
        return each

    def pass_ns(self, tokens: int, contended: bool = False) -> int:
        """Return the time of embedding, head and dense layers, charged before layer 0."""
        compute = self._platform.compute
        if isinstance(compute, Measured):
            return compute.once(self._share(contended))
        weights = self._dense_params[1], self.dense.head, self._geometry.dense_format
        return self._once("dense", compute, weights, tokens, self._share(contended))

    def kv_ns(self, context: int, contended: bool = False) -> int:
        """Return one layer's part of reading the KV cache of `context` positions, rounded up."""
        rate = self._platform.compute.kv_bytes_per_s
        if not rate:
            return 0
        each = ns_per_byte(rate) / exact(self._share(contended)) / self._geometry.layers
        spent = ceiling(self._geometry.kv_cache(context) * each.numerator, each.denominator)
        return bounded(spent, "kv_bytes_per_s")

    @property
    def reads_kv(self) -> bool:
        """True if the dense time depends on the length of the context."""
        return bool(self._geometry.kv_bytes and self._platform.compute.kv_bytes_per_s)

    def expert_ns(self, row: int, precision: int, tokens: int, contended: bool = False) -> int:
        """Return the time of one expert over its tokens."""
        return self._expert("expert", self._platform.compute, row, precision, tokens, self._share(contended))

    def weights(self, row: int, precision: int) -> Weights:
        """Return all of a copy that its compute time follows from; its format is known at the stored precision only."""
        return self._params[row], self._tiers[precision][row], self._formats[precision]

    def _share(self, contended: bool) -> float:
        return self._left.compute if contended else 1

    # the CPU

    @property
    def cpu_tier(self) -> int:
        """The lower tier that the CPU reads, from the top down; -1: the slow tier."""
        return self._platform.cpu_tier

    @property
    def fifo(self) -> tuple[bool, ...]:
        """Return for each lower tier whether it evicts in order of arrival (fifo) instead of last use (lru)."""
        return tuple(tier.eviction == "fifo" for tier in self._platform.tiers)

    @property
    def sync_ns(self) -> int:
        """Return the CPU time added once to the work that a step queues at its gate."""
        return self._platform.cpu.sync_ns if self._platform.cpu else 0

    @property
    def has_cpu(self) -> bool:
        """True if experts may be computed on the CPU."""
        return self._platform.cpu is not None

    def cpu_ns(self, row: int, precision: int, tokens: int, contended: bool = False) -> int:
        """Return the time of an expert on the CPU; `contended` if the link works as well.

        Raises ConfigError if the platform has no CPU.
        """
        if self._platform.cpu is None:
            raise ConfigError(
                f"missing [cpu] table in platform {self._platform.name}: the miss policy computes on the CPU"
            )
        cpu, share = self._platform.cpu, self._left.cpu if contended else 1
        if cpu.rows_apart:
            each = self._expert("cpu", cpu, row, precision, 1, share)
            return bounded(each * tokens, "cpu.rows_apart", "lower")
        return self._expert("cpu", cpu, row, precision, tokens, share)

    def _expert(
        self, what: str, compute: Roofline | Measured, row: int, precision: int, tokens: int, share: float
    ) -> int:
        if isinstance(compute, Measured):
            return compute.expert(tokens, self._tiers[precision][row], share)
        return self._once(what, compute, self.weights(row, precision), tokens, share)

    def _once(self, what: str, compute: Roofline, weights: Weights, tokens: int, share: float) -> int:
        """Return the time of weights that are an `expert`, that of one on the `cpu`, or `dense`, computed once."""
        key = (what, *weights, tokens, share)
        if key not in self._known:
            params, size, weight_format = weights
            of = compute.dense_ns if what == "dense" else compute.ns
            self._known[key] = of(params, size, tokens, weight_format, share)
        return self._known[key]


#: Times of the last replays: a grid has few machines, and computing the times takes as long as the rest.
_recent: deque[Times] = deque(maxlen=8)


def times_of(machine: Platform, geometry: Geometry, tiers: tuple[tuple[int, ...], ...]) -> Times:
    """Return `Times`, shared by all replays of this process that have the same machine and model."""
    for times in tuple(_recent):
        if times.is_of(machine, geometry, tiers):
            return times
    made = Times(machine, geometry, tiers)
    _recent.append(made)
    return made
