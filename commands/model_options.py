"""Options of the verbs that run a real model, typed once: what it reads, how, and where it is."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moereplay.commands.terminal import say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moereplay.commands.options import Given
    from moereplay.simulator.config import ReplayConfig
    from moereplay.tracegen.checkpoint import Loaded
    from moereplay.tracegen.folder import Folder
    from moereplay.tracegen.live.offloaded import Transfers
    from moereplay.tracegen.live.run import Prepared
    from moereplay.tracegen.offload.bench import SlowTiers
    from moereplay.tracegen.offload.part import Named
    from moereplay.traces.schema import Geometry


NEW_TOKENS, WINDOW = 64, 1024

Model = Annotated[
    str, typer.Argument(help="Hugging Face id, local folder, or `miniature` (bundled).", show_default=False)
]
Prompts = Annotated[
    list[Path] | None,
    typer.Option(help=".jsonl, .csv, .parquet (with --field) or .txt (one per line); .gz too; may be given again."),
]
Field = Annotated[str | None, typer.Option(help="What holds the prompt; dots reach inside, as in turns.0.")]
Text = Annotated[list[Path] | None, typer.Option(help="Text to read instead, cut into windows; may be given again.")]
Window = Annotated[int | None, typer.Option(min=2, help=f"Tokens of a --text window; default {WINDOW}.")]
PromptTokens = Annotated[
    int | None, typer.Option(min=1, help="Of a window: these in one pass, the rest one by one; default all in one.")
]
Chat = Annotated[bool, typer.Option("--chat", help="Each prompt as a user's message in the model's chat template.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut prompts that are too long; their end is kept.")]
Limit = Annotated[int | None, typer.Option(min=1, help="The first N requests only.")]
NewTokens = Annotated[int | None, typer.Option(min=1, help=f"At most so many per prompt; default {NEW_TOKENS}.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="Sample; default 0, greedy.")]
LookAhead = Annotated[int, typer.Option(min=0, help="Layers ahead whose gates are evaluated at every gate.")]
Quantiser = Annotated[
    str, typer.Option(help="Stores experts at few bits: affine, hqq, bitsandbytes, torchao, ...; best: by width.")
]


class Placement(NamedTuple):
    """Where the model is, and how its weights are stored."""

    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto"
    device_map: Annotated[
        str | None, typer.Option(help="Spread over devices: auto, balanced, ...; needs accelerate.")
    ] = None
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, float16.")] = "auto"
    quantise: Annotated[str | None, typer.Option(help="bnb-8bit, bnb-4bit (not fused experts), fp8 (GPU).")] = None
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face id.")] = None

    def located(self, model: str) -> Folder:
        """The checkpoint of `model`, checked as far as torch is not needed. Raises RecordError."""
        from moereplay.tracegen.folder import check_revision, located
        from moereplay.tracegen.plan import check_device, check_placement

        check_device(self.device)
        check_placement(self.dtype, self.device_map, self.quantise)
        check_revision(model, self.revision)
        return located(model, self.revision)

    def loaded(self, model: str, folder: Folder) -> Loaded:
        """The model of that checkpoint. Raises RecordError."""
        say(f"loading {model}")
        from moereplay.tracegen.checkpoint import load  # torch takes seconds: the line above comes first

        where = {name: value for name, value in self._asdict().items() if name != "revision"}
        return load(folder, progress=sys.stderr.isatty(), **where)


# -- Slow tiers that options name, and real transfers of a live model.


class Real(NamedTuple):
    """A slow tier that is read."""

    named: Named
    bytes_per_s: float | None  #: the throttle
    threads: int | None  #: that compute, on a CPU; torch's own number if None


class Offloading(NamedTuple):
    """Real transfers, and what is compared with them."""

    slow_tier: Annotated[
        str | None, typer.Option(help="Read experts for real: disk:DIR, disk:DIR:buffered or pinned; MEASURED times.")
    ] = None
    throttle: Annotated[str | None, typer.Option(help="Of --slow-tier: the fastest that it gives, 400MB/s.")] = None
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of --slow-tier: that compute, on a CPU; torch's own unsaid.")
    ] = None
    eager: Annotated[
        bool, typer.Option("--eager", help="Compute experts one by one, as with --slow-tier, to compare with it.")
    ] = False

    def checked(self, config: ReplayConfig, settings: Given, placement: Placement) -> Real | None:
        """None without a slow tier. Raises ConfigError for what cannot run with it, or means nothing without."""
        from moereplay.simulator.errors import ConfigError
        from moereplay.tracegen.live.requests import check_offloadable
        from moereplay.tracegen.offload.part import require_place, slow_tier_named, throttle_named

        if self.slow_tier is None:
            for name in ("throttle", "threads"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"--{name} means nothing without --slow-tier; leave it out")
            return None
        if "platform" in settings.typed:
            raise ConfigError("--platform: with --slow-tier times are of this machine; leave one of them out")
        if placement.device_map:
            raise ConfigError("--device-map: with --slow-tier the model is on one device; leave one of them out")
        check_offloadable(config)
        real = Real(slow_tier_named(self.slow_tier), throttle_named(self.throttle or "none"), self.threads)
        require_place(real.named, "cpu" if placement.device == "auto" else placement.device)
        return real


@contextmanager
def slow_tier_of(text: str, device: str, geometry: Geometry, bits: Sequence[float]) -> Iterator[SlowTiers]:
    """The slow tier that an option names, of random weights of a model's sizes, one for each precision.

    Raises ConfigError.
    """
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
    """For one run; None where transfers are simulated."""
    if real is None:
        yield None
        return
    from moereplay.tracegen.live.offloaded import real_transfers
    from moereplay.tracegen.offload.device import compute_on

    if real.threads:
        compute_on(real.threads)
    geometry, named = ready.modules.geometry, real.named
    size = sum(geometry.expert_bytes) * geometry.experts
    say(f"experts: {size / 1e9:.3g} GB of {ready.loaded.dtype} in {named.folder or 'main memory'}, beside the model")
    with real_transfers(ready.loaded, ready.modules, ready.plan, named, real.bytes_per_s) as transfers:
        yield transfers


def measured_on(about: dict[str, Any]) -> list[str]:
    """The line that says what was measured; none of a simulated run."""
    if about["seconds"] != "measured":
        return []
    rate = about["throttle_bytes_per_s"]
    limit = "" if rate is None else f", at most {rate / 1e6:g} MB/s"
    return [f"experts read from {about['slow_tier']}{limit}; computed on {about['device']}"]
