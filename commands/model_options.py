"""Options of the verbs that run a model: input, placement, and real transfers from a slow tier."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moereplay.commands.options import Given
from moereplay.commands.terminal import say
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.tracegen.folder import Folder, check_revision, located
from moereplay.tracegen.plan import check_device, check_placement
from moereplay.traces.schema import Geometry

if TYPE_CHECKING:
    from moereplay.tracegen.checkpoint import Loaded
    from moereplay.tracegen.live.offloaded import Transfers
    from moereplay.tracegen.live.run import Prepared
    from moereplay.tracegen.offload.bench import SlowTiers
    from moereplay.tracegen.offload.part import Named
NEW_TOKENS, WINDOW = 64, 1024

Model = Annotated[
    str, typer.Argument(help="Hugging Face id, local folder, or `miniature` (bundled).", show_default=False)
]
Prompts = Annotated[
    list[Path] | None,
    typer.Option(
        help="Prompts: .jsonl, .csv or .parquet (with --field), or .txt (one per line); .gz too (repeatable)."
    ),
]
Field = Annotated[
    str | None,
    typer.Option(
        help="With --prompts: field of the text, or of the list of token ids; dots reach nested values: turns.0."
    ),
]
Text = Annotated[list[Path] | None, typer.Option(help="Text files instead of prompts, cut into windows (repeatable).")]
Window = Annotated[int | None, typer.Option(min=2, help=f"With --text: tokens per window (default: {WINDOW}).")]
PromptTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="With --text: tokens of a window in its first pass; the rest follow one by one (default: all)."
    ),
]
Chat = Annotated[bool, typer.Option("--chat", help="Apply the model's chat template to each prompt.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut prompts that are too long at their start.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use only the first N requests.")]
NewTokens = Annotated[
    int | None, typer.Option(min=1, help=f"Maximum number of new tokens per prompt (default: {NEW_TOKENS}).")
]
Temperature = Annotated[float | None, typer.Option(min=0, help="Sampling temperature (default: 0, greedy).")]
LookAhead = Annotated[
    int, typer.Option(min=0, help="Number of following layers whose gates are evaluated at every gate.")
]
Quantiser = Annotated[
    str,
    typer.Option(
        help="Quantisation library of experts: affine, hqq, bitsandbytes, torchao, ..., or best for each width."
    ),
]


class Placement(NamedTuple):
    """Device of the model, and storage of its weights."""

    device: Annotated[str, typer.Option(help="Device of the model: auto, cpu, cuda, cuda:1, ...")] = "auto"
    device_map: Annotated[
        str | None, typer.Option(help="Spread the model over devices: auto, balanced, ...; requires accelerate.")
    ] = None
    dtype: Annotated[str, typer.Option(help="Data type: auto (the checkpoint's), float32, bfloat16, float16.")] = "auto"
    quantise: Annotated[
        str | None, typer.Option(help="Quantise the model: bnb-8bit, bnb-4bit (not fused experts), fp8 (GPU).")
    ] = None
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face model.")] = None
    threads: Annotated[
        int | None, typer.Option(min=1, max=512, help="Compute threads of a CPU (default: all; one for a small model).")
    ] = None

    def located(self, model: str) -> Folder:
        """Locate the checkpoint of `model` and check what can be checked without torch. Raises RecordError."""
        check_device(self.device)
        check_placement(self.dtype, self.device_map, self.quantise)
        check_revision(model, self.revision)
        return located(model, self.revision)

    def loaded(self, model: str, folder: Folder) -> Loaded:
        """Load the model of that checkpoint. Raises RecordError."""
        say(f"loading {model}")
        from moereplay.tracegen.checkpoint import load

        where = {name: value for name, value in self._asdict().items() if name != "revision"}
        return load(folder, progress=sys.stderr.isatty(), **where)


# -- slow tiers and real transfers


class Real(NamedTuple):
    """A slow tier to read experts from."""

    named: Named
    bytes_per_s: float | None  #: the throttle


class Offloading(NamedTuple):
    """Real transfers, and computation that is comparable with them."""

    slow_tier: Annotated[
        str | None,
        typer.Option(help="Read experts from disk:DIR, disk:DIR:buffered or pinned; times are then MEASURED."),
    ] = None
    throttle: Annotated[
        str | None, typer.Option(help="With --slow-tier: upper bound on the read rate, such as 400MB/s.")
    ] = None
    eager: Annotated[
        bool, typer.Option("--eager", help="Compute experts one by one, as --slow-tier does, for a comparison.")
    ] = False

    def checked(self, config: ReplayConfig, settings: Given, placement: Placement) -> Real | None:
        """Return the slow tier, None without one. Raises ConfigError for options that do not fit."""
        from moereplay.tracegen.live.requests import check_offloadable
        from moereplay.tracegen.offload.part import require_place, slow_tier_named, throttle_named

        if self.slow_tier is None:
            if self.throttle is not None:
                raise ConfigError("--throttle requires --slow-tier")
            return None
        if "platform" in settings.typed:
            raise ConfigError("--platform cannot be combined with --slow-tier: times are measured on this machine")
        if placement.device_map:
            raise ConfigError("--device-map cannot be combined with --slow-tier: the model is on one device")
        check_offloadable(config)
        real = Real(slow_tier_named(self.slow_tier), throttle_named(self.throttle or "none"))
        require_place(real.named, "cpu" if placement.device == "auto" else placement.device)
        return real


@contextmanager
def slow_tier_of(text: str, device: str, geometry: Geometry, bits: Sequence[float]) -> Iterator[SlowTiers]:
    """Open slow tiers of random weights of a model's sizes, one per precision. Raises ConfigError."""
    from moereplay.tracegen.offload.part import slow_tier_named

    named = slow_tier_named(text)
    from moereplay.tracegen.offload.compute import layout_of
    from moereplay.tracegen.offload.slow_tier import opened

    with ExitStack() as stack:
        shelves = {}
        for each in bits:
            layout = layout_of(geometry, each)
            say(f"experts: {layout.total / 1e9:.3g} GB of {layout.dtype} with random weights, {text}")
            shelves[layout.sizes] = stack.enter_context(opened(named, layout, device))
        yield shelves


@contextmanager
def real_transfers(ready: Prepared, real: Real | None) -> Iterator[Transfers | None]:
    """Open real transfers for one run; None for simulated transfers."""
    if real is None:
        yield None
        return
    from moereplay.tracegen.live.offloaded import real_transfers

    geometry, named = ready.modules.geometry, real.named
    size = geometry.total_bytes
    say(f"experts: {size / 1e9:.3g} GB of {ready.loaded.dtype} in {named.folder or 'main memory'}, in addition to it")
    with real_transfers(ready.loaded, ready.modules, ready.plan, named, real.bytes_per_s) as transfers:
        yield transfers


def measured_on(about: dict[str, Any]) -> list[str]:
    """Return a line about the measurement; none for a simulated run."""
    if about["seconds"] != "measured":
        return []
    rate = about["throttle_bytes_per_s"]
    limit = "" if rate is None else f", at most {rate / 1e6:g} MB/s"
    return [f"experts read from {about['slow_tier']}{limit}; computed on {about['device']}"]
