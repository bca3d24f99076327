"""`moereplay bench run`, `verify`, `table`: enter policies in the benchmark of expert caches, repeat and print rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moereplay import policies
from moereplay.analysis.tables import markdown
from moereplay.commands import options
from moereplay.commands.options import CORES
from moereplay.commands.terminal import keeping, progress, say, say_when_compiling
from moereplay.policies.contract import PolicyError
from moereplay.policies.files import register
from moereplay.policies.grammar import foresight
from moereplay.results.errors import check_output
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.bench import (
    KINDS,
    LRU,
    SUITE,
    Entry,
    Row,
    Written,
    check_current,
    check_entries,
    check_together,
    read_rows,
    read_suite,
    replays,
    run_entries,
    traces_of,
    verified,
)
from moereplay.sweeps.grid import expand
from moereplay.traces.files import write_whole
from moereplay.traces.texts import counted

SuiteFile = Annotated[Path, typer.Option("--suite", help="Suite to replay, as sweeps/bench.toml.", show_default=False)]
Rows = Annotated[list[Path], typer.Argument(help="Files with rows of `bench run`.", show_default=False)]
LISTS = "Comma list; each combination is an entry, with a row."


def bench_run(
    *,
    eviction: Annotated[str, typer.Option(help=f"Eviction policies (default: lru). {LISTS}", show_default=False)] = "",
    prefetch: Annotated[str, typer.Option(help=f"Prefetch policies (default: none). {LISTS}", show_default=False)] = "",
    miss: Annotated[str, typer.Option(help=f"Miss policies (default: fetch). {LISTS}", show_default=False)] = "",
    policy_file: options.PolicyFiles = None,
    shipped: Annotated[
        bool, typer.Option("--all", help="Enter every policy of the project alone, and name those that are refused.")
    ] = False,
    suite: SuiteFile = SUITE,
    workers: options.Workers = CORES,
    out: Annotated[Path | None, typer.Option(help="File for the rows, .jsonl (default: printed).")] = None,
) -> None:
    """Enter policies in the benchmark of expert caches: one JSON row for each entry. SIMULATED."""
    typed = {"eviction": eviction, "prefetch": prefetch, "miss": miss}
    if shipped and (policy_file or any(typed.values())):
        raise ConfigError("--all cannot be combined with --eviction, --prefetch, --miss or --policy-file")
    if out:
        check_output(out)
    read = read_suite(suite)
    wanted = _shipped() if shipped else _typed(typed, policy_file or [])
    if not shipped:
        for entry in wanted:
            entry.chosen()
    traces = traces_of(read, suite)
    entries: list[Entry] = []
    for entry in wanted:
        try:
            check_entries([entry], read, traces)
            entries.append(entry)
        except (PolicyError, ConfigError) as refused:
            if not shipped:
                raise
            say(f"not entered: {refused}")
    with keeping(lambda: "nothing was written"), progress(replays(entries, read), "replays") as advance:
        rows = run_entries(entries, read, traces, workers, advance)
        say_when_compiling()
    lines = "".join(f"{row.line()}\n" for row in rows)
    if out:
        write_whole(out, lines.encode())
    else:
        print(lines, end="")
    for row in rows:
        say(_in_one_line(row))
    if out:
        say(f"wrote {out}: {counted(len(rows), 'row')}")


def bench_verify(
    rows: Rows,
    *,
    policy_file: options.PolicyFiles = None,
    suite: SuiteFile = SUITE,
    workers: options.Workers = CORES,
) -> None:
    """Run the entries of rows again, and compare the rows to the byte. SIMULATED."""
    written = read_rows(rows)
    read = read_suite(suite)
    for each in written:
        check_current(each, read)
    entries = list(dict.fromkeys(each.row.entry for each in written))
    traces = traces_of(read, suite)
    with progress(replays(entries, read), "replays") as advance:
        again = dict(zip(entries, run_entries(entries, read, traces, workers, advance), strict=True))
    for each in written:
        same = verified(each, again[each.row.entry])
        name, code = each.row.entry.name(), each.row.digests.code
        print(f"{each.where}: {name} is the same{'' if same else f', though made by other code ({code})'}")


def bench_table(rows: Rows) -> None:
    """Print rows as a page in Markdown, the fewest misses first, with what the table does not say."""
    written = read_rows(rows)
    check_together(written)
    print(_page(written))


# -- entries


def _typed(lists: dict[str, str], files: Sequence[Path]) -> list[Entry]:
    """Return the entries of a command line. A policy file is entered as its kind unless that kind is typed."""
    found = {kind: text for kind, text in lists.items() if text}
    for policy in map(register, files):
        if policy.kind not in KINDS:
            raise PolicyError(f"{policy.kind} {policy.name} changes what the model computes; bench takes none")
        if not lists[policy.kind]:
            found[policy.kind] = ",".join(filter(None, (found.get(policy.kind), policy.name)))
    return [Entry(config.eviction, config.prefetch, config.miss) for config in expand(found, {})]


def _shipped() -> list[Entry]:
    """Return every policy of the project in place of that of LRU, fetched on a miss and not prefetched."""
    own = [LRU._replace(**{kind: name}) for kind in KINDS for name in policies.NAMES[kind]]
    return list(dict.fromkeys(own))


# -- what is printed


def _in_one_line(row: Row) -> str:
    speeds = ", ".join(f"{name} {value:g}" for name, value in row.tokens_per_s.items())
    least = min(row.may_take_us.values())
    entry = ", ".join(f"{kind} {text}" for kind, text in row.entry._asdict().items())
    return f"{entry}: misses {row.misses:g} (LRU 0, Belady 100); tokens/s {speeds}; {_price(least)}"


def _price(least: float) -> str:
    if least <= 0:
        return "no faster than LRU on one machine or more"
    return f"decisions may take {least:g} us per token and layer more than LRU's"


def _page(written: Sequence[Written]) -> str:
    first = written[0].row
    knows = foresight()
    ordered = sorted((each.row for each in written), key=lambda row: (-row.misses, row.entry))
    lines: list[dict[str, Any]] = [
        {
            **row.entry._asdict(),
            "knows the future": "yes" if knows({"routing": "standard", **row.entry._asdict()}) else "",
            "misses": row.misses,
            **{f"{name}, tokens/s": value for name, value in row.tokens_per_s.items()},
            "decisions may take, us": min(row.may_take_us.values()),
        }
        for row in ordered
    ]
    about = (
        f"Suite {first.bench} (`{first.digests.suite}`), semantics {first.digests.semantics}, "
        f"code {', '.join(sorted({f'`{each.row.digests.code}`' for each in written}))}. SIMULATED."
    )
    return f"{HEAD}\n{about}\n\n{markdown(lines)}\n\n{FOOT}"


HEAD = """\
# The benchmark of expert caches

Which policy has the fewest misses on the same traces, capacities and machines? `moereplay bench run` makes a row,
`moereplay bench verify` runs it again, `moereplay bench table` prints this page. A policy of your own is entered as
[CONTRIBUTING.md](../CONTRIBUTING.md#enter-a-policy-in-the-benchmark) says.

- **misses**: 0 is as many as LRU, 100 as few as Belady; the mean over traces, capacities, contracts and machines.
  A prefetch policy can pass 100, because Belady fetches nothing ahead. A miss policy that computes an expert on the CPU
  leaves it out of the cache: its misses are no fault, so compare tokens/s.
- **tokens/s**: decoded tokens, the geometric mean over traces, capacities and contracts. One request runs at a time.
- **decisions may take**: how much more time than LRU's the decisions may take, per token and layer, before LRU is as
  fast; below 0 LRU is faster. It is a mean, in which slow cells weigh most, of the machine that leaves the least.
  Replays charge nothing for decisions.
"""

FOOT = """\
What the table does not say:

- Routing is drawn from statistics of four models, 4 requests of each; only that of the small bundled one is recorded.
  Differences of a few points may be others on real text ([how near drawn routing is](routing.md)).
- Look-ahead of the drawn traces errs at random, with an assumed recall; a real predictor errs in patterns.
- There is nothing about quality: what is entered leaves the model's output as it is. Routing policies, and miss
  policies that drop, substitute or round, are not entered.
- Policies have their default parameters unless parameters are named. One that was chosen on this suite is fitted to it.
- Speeds are those of modelled machines ([how near they are](evidence.md)); a cache of an engine has costs of its own.
- Prompts run token by token, and one request at a time; batches and servers are not here."""
