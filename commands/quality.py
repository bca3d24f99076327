"""`moereplay quality` measures the quality loss of policy sets; `forecast` estimates it for sets that were not run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import polars as pl
import typer

from moereplay.analysis.forecast import Forecast, of_perplexity, page, refusals, share_of, with_forecasts, within
from moereplay.analysis.forecast import document as forecast_document
from moereplay.analysis.forecast import forecast as made_of
from moereplay.analysis.forecast_fit import LEVEL
from moereplay.analysis.quality import document, order_of, tables
from moereplay.analysis.tables import table
from moereplay.commands import model_options
from moereplay.commands.model_options import Placement
from moereplay.commands.options import grouped, naming
from moereplay.commands.terminal import QualityMeter, keeping, say, show, show_json
from moereplay.results.errors import ResultError, check_output
from moereplay.results.files import write_frame
from moereplay.results.quality import EXAMPLES, FILE, UNMODIFIED, examples_of, load
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps import extra
from moereplay.sweeps.policy_sets import named_sets, read_sets, study
from moereplay.tracegen.errors import require_torch
from moereplay.tracegen.live.requests import check_live
from moereplay.tracegen.precision import check_quantiser
from moereplay.tracegen.quality.named import named_tasks
from moereplay.traces.schema import Geometry
from moereplay.traces.texts import counted

if TYPE_CHECKING:
    from moereplay.tracegen.checkpoint import Loaded
    from moereplay.tracegen.quality.evaluation import Evaluation, Job
    from moereplay.tracegen.quality.harness import Task
#: Policy sets of a model, which depend on its sizes in studies.
Chosen = Callable[[Geometry], dict[str, ReplayConfig]]


class Sets(NamedTuple):
    """Policy sets, from a file or a study."""

    sets: Annotated[Path | None, typer.Option(help="Named policy sets (.toml), see docs/quality.md.")] = None
    study: Annotated[str | None, typer.Option(help="Study instead of --sets: ranks, lambda or precision.")] = None
    capacity: Annotated[str | None, typer.Option(help="With --study: cache size (default: the study's).")] = None


class Asked(NamedTuple):
    """Tasks and how to run them."""

    tasks: Annotated[
        str,
        typer.Option(help="Comma list of perplexity:FILE, tasks of lm-evaluation-harness, or their .yaml files."),
    ]
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N examples or windows of each task.")] = (
        None
    )
    window: Annotated[int, typer.Option(min=2, help="Tokens per window of perplexity:FILE.")] = 512
    shots: Annotated[int | None, typer.Option(min=0, help="Few-shot examples per question (default: the task's).")] = (
        None
    )
    chat: model_options.Chat = False
    seed: Annotated[int, typer.Option(min=0, help="Seed of few-shot examples and of sampling.")] = 0
    batch: Annotated[int, typer.Option(min=1, help="Number of texts per batch.")] = 1


@grouped
def quality(
    model: model_options.Model,
    *,
    sets: Sets,
    asked: Asked,
    out: Annotated[Path, typer.Option(help="Folder for answers and figures; a rerun continues in it.")],
    placement: Placement,
    quantiser: model_options.Quantiser = "affine",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure perplexity and tasks under every policy set, and compare with the unmodified model.

    Answers are stored task by task and set by set. The unmodified model's routing is recorded for sweeps.
    """
    chosen = _chosen(sets)
    extra("plot", "matplotlib")
    check_output(out / FILE)
    check_output(out / EXAMPLES)
    names = named_tasks(asked.tasks)
    folder = placement.located(model)
    require_torch()
    check_quantiser(quantiser)
    from moereplay.tracegen.quality.harness import Asking, tasks_of

    tasks = tasks_of(names, Asking(asked.limit, asked.seed, asked.window, asked.shots, asked.chat))
    with keeping(lambda: f"answers are kept in {out}; run the same command to resume"):
        loaded = placement.loaded(model, folder)
        frame = _answered(_evaluation(loaded, chosen, asked, out, quantiser), tasks)
    _write(frame, out)
    _report(frame, as_json)


def _chosen(sets: Sets) -> Chosen:
    """Return a function from a geometry to policy sets. Raises ConfigError unless one of file and study is given."""
    if (sets.sets is None) == (sets.study is None):
        raise ConfigError("missing policy sets: pass exactly one of --sets FILE and --study NAME")
    if sets.study is not None:
        return partial(study(sets.study).configs, capacity=sets.capacity)
    if sets.capacity is not None:
        raise ConfigError("--capacity requires --study; with --sets it is set in [base]")
    assert sets.sets is not None
    configs = _configs(sets.sets)
    return lambda geometry: configs


def _configs(path: Path) -> dict[str, ReplayConfig]:
    """Read the policy sets of a file. Raises ConfigError or PolicyError naming a set that cannot run live."""
    configs = named_sets(*read_sets(path))
    if UNMODIFIED in configs:
        raise ConfigError(
            f"policy sets {path}: {UNMODIFIED!r} is reserved for the model without policies; rename the set"
        )
    for name, config in configs.items():
        with naming(name):
            check_live(config)
    return configs


def _evaluation(loaded: Loaded, chosen: Chosen, asked: Asked, out: Path, quantiser: str) -> Evaluation:
    from moereplay.tracegen.live.run import proven
    from moereplay.tracegen.quality.evaluation import Evaluation

    modules = proven(loaded)
    sets = chosen(modules.geometry)
    evaluation = Evaluation(loaded, modules, sets, asked.seed, asked.batch, out, quantiser)
    for name, plan in evaluation.plans.items():
        if why := evaluation.alone(plan):
            say(f"note: set {name} runs without batches: {why}")
        if plan.warning:
            say(f"note: set {name}: {plan.warning}")
    return evaluation


def _answered(evaluation: Evaluation, tasks: Sequence[Task]) -> pl.DataFrame:
    """Return every row, from the folder or computed now."""
    meter = QualityMeter(len(tasks) * (len(evaluation.plans) + 1))

    gc.freeze()  # exempt the model and imports, so that collections only scan engines

    def done(job: Job, before: bool) -> None:
        meter.done(job.task.name, job.name, before)
        gc.collect()

    try:
        return pl.concat(list(evaluation.rows(tasks, meter.passed, done)))
    finally:
        gc.unfreeze()
        meter.close()


def _write(frame: pl.DataFrame, out: Path) -> None:
    from moereplay.analysis.figures.catalogue import draw_all, save

    write_frame(frame, out / FILE)
    write_frame(examples_of(frame), out / EXAMPLES)
    paths = [out / FILE, out / EXAMPLES]
    for name, figure in draw_all(frame).figures:
        paths += save(figure, out / "figures" / name)
    for path in paths:
        say(f"wrote {path}")


def _report(frame: pl.DataFrame, as_json: bool) -> None:
    if as_json:
        show_json(document(frame))
        return
    about = frame["about"][0]
    show(f"LIVE, emulated: {about['model']}, {about['dtype']}; times are SIMULATED")
    for task, rows in tables(frame).items():
        texts = frame.filter(pl.col("task") == task)["texts"][0]
        show("", table(rows, f"{task}: {counted(texts, 'text')}", spare=[*rows[0]][:5:-1], more="--json"))
        show(*filter(None, [order_of(frame, task)]))
    show("loss: how much worse than unmodified on the same examples; ±: half its 95 % interval over examples")


# -- forecasts of the quality loss of replays

Quality = Annotated[
    Path | None, typer.Option(help="Folder of `quality --out`, for a FORECAST of each replay's quality loss.")
]


class Foreseen(NamedTuple):
    """Live points to forecast from, and the largest loss to show."""

    quality: Quality = None
    max_loss: Annotated[
        str | None,
        typer.Option(help="With --quality: largest FORECAST loss to show, 1% of perplexity or 0.02 nats."),
    ] = None

    def with_forecasts(self, frame: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
        """Add forecasts to a frame of results. Return the frame and remarks; without --quality it is unchanged.

        Raises ResultError if no loss can be forecast, or none is within the largest loss.
        """
        if self.quality is None:
            if self.max_loss is not None:
                raise ResultError("--max-loss requires --quality FOLDER, written by `moereplay quality --out`")
            return frame, []
        most = None if self.max_loss is None else share_of(self.max_loss)
        made = forecast_of(self.quality)
        whole = with_forecasts(frame, made)
        kept = whole if most is None else within(whole, most)
        chosen = "" if most is None else f"; within {most:.4g}, interval included: {len(kept)} of {len(whole)}"
        live = f"{len(made.points)} live points of {made.task}"
        heading = f"FORECAST: rise of perplexity from {live}, {LEVEL:.0%} intervals{chosen}"
        return kept, [heading, *refusals(whole)]


def forecast_of(folder: Path) -> Forecast:
    """Fit a forecast of perplexity to the live points of a folder. Raises ResultError."""
    return of_perplexity(load(folder))


# -- forecast


def forecast(
    folder: Annotated[Path, typer.Argument(help="Folder of `quality --out`.", show_default=False)],
    task: Annotated[str | None, typer.Option(help="Task of the folder (default: the first).")] = None,
    measure: Annotated[str | None, typer.Option(help="Measure: nll (perplexity), kl, ... (default: nll).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Estimate the quality loss of policies from counters of replays, and report signal, errors, coverage. FORECAST."""
    made = made_of(load(folder), task, measure)
    if as_json:
        show_json({"forecast": forecast_document(made)})
    else:
        show(*page(made))
