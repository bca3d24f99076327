"""The part of an answer about drafts and streams that decode together: whether to draft, and what the cache does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moereplay.analysis.tables import table
from moereplay.traces.texts import between, digits, percent, size

Document = Mapping[str, Any]
SAME = 0.01  #: smaller gains count as none
#: Of a plain pass, what a row beyond the first took besides its experts in 12 series (studies/pages/drafts.md).
FURTHER_ROW = 0.1
MS = 1e6


def drafting_lines(known: Document, tier: str) -> Iterator[str]:
    """Yield the verdict, what drafts and streams do to the cache, the speed by number of drafts, and by engine."""
    yield ""
    yield verdict(known)
    yield from with_dense_rows(known)
    steps, streams = known["steps"], known["concurrency"]
    best = next((each for each in steps if each["drafts"] == known["drafts"]), steps[0])
    of = best if best["drafts"] else max(steps[1:], key=_middle, default=None)
    if of:
        yield f"cache: {_cache(steps[0], of, tier)}"
    if known["alone"]:
        yield _together(known, best, tier)
    if len(steps) > 1:
        together = f"{streams} streams together" if streams > 1 else "one stream"
        yield table(
            [_row(each, streams) for each in steps],
            f"by number of drafts, {known['engine']}, {together} (experts: distinct ones of a layer and pass, of which "
            f"hit are in {tier}; MB: of experts that are not, per token; pass: in passes without drafts):",
        )
        yield table([_engine(each) for each in known["by_engine"]], "by engine, each with its best number of drafts:")


def verdict(known: Document) -> str:
    """Return whether to draft, and how many, in a sentence."""
    tried = max(known["steps"][1:], key=_middle, default=None)
    engine, gain = known["engine"], known["gain"]
    if tried is None:
        unknown = not next(each for each in known["by_engine"] if each["engine"] == engine)["drafts_known"]
        why = (
            f"{engine} is not known to draft"
            if unknown
            else "pass --draft auto to try them"
            if len(known["steps"]) < 2
            else "none fits"
        )
        return f"drafts: none, {why}"
    many, change = tried["drafts"], in_words(gain)
    drafts = f"{many} draft{'s' if many > 1 else ''} per pass"
    than = f"than without on {engine}, in passes {digits(tried['plain_passes'], 3)} times as long"
    if not known["drafts"] and known["pays"]:
        other = "the fastest engine is not known to draft, or is faster without"
        return f"drafts: none, {other}; {drafts} {'give' if many > 1 else 'gives'} {change} {than}"
    if known["pays"] is None:
        return f"drafts: it depends on the routing: {drafts}: {change} {than}"
    if not known["pays"]:
        return f"drafts: do not draft: the best, {drafts}: {change} {than}"
    return f"drafts: use {drafts}: {change} {than}"


def with_dense_rows(known: Document) -> Iterator[str]:
    """Say what is left of the gain if each further row costs dense work as well, which the closed form leaves out."""
    if tried := max(known["steps"][1:], key=_middle, default=None):
        many = tried["drafts"]
        gain = percent(with_dense_work(known, tried) / with_dense_work(known, known["steps"][0]) - 1, signed=True)
        yield (
            "if each further row also took a tenth of a plain pass, as in measured runs: "
            f"{gain} tokens/s with {many} draft{'s' if many > 1 else ''}"
        )


def with_dense_work(known: Document, step: Document) -> float:
    """Return tokens/s, middle routing, if each row of a pass beyond the first takes FURTHER_ROW of a plain pass."""
    none = known["steps"][0]
    pass_s = known["concurrency"] / _middle(none)
    plain_s = 1 / _middle(known["alone"] or none)
    return step["tokens_per_pass"] / (step["plain_passes"] * pass_s + FURTHER_ROW * plain_s * (step["rows"] - 1))


def in_words(gain: Document) -> str:
    """Return a gain in tokens/s over routings: 12% to 20% more tokens/s."""
    least, most = gain["least"], gain["most"]
    if max(abs(least), abs(most)) <= SAME:
        return "as many tokens/s, no more"
    if least < 0 < most:
        return f"{percent(-least)} fewer to {percent(most)} more tokens/s"
    return f"{span_of(gain)} {'more' if most > 0 else 'fewer'} tokens/s"


def span_of(gain: Document) -> str:
    """Return the sizes of a gain over routings: 12% to 20%, or one of them if they are equal."""
    low, high = map(percent, sorted((abs(gain["least"]), abs(gain["most"]))))
    return between(low, high)


def _middle(step: Document) -> float:
    return step["tokens_per_s"]["middle"]


def _cache(none: Document, of: Document, tier: str) -> str:
    """Say what drafts do to the experts of a pass, to the share that is at hand, and to the bytes of a token."""
    many, rows = of["drafts"], of["rows"]
    return (
        f"with {many} draft{'s' if many > 1 else ''} a pass has {rows} rows and demands "
        f"{three(of['experts_per_layer'])} experts of a layer in place of {three(none['experts_per_layer'])}; "
        f"{tier} holds {_hit(of)} of them in place of {_hit(none)}; it lacks "
        f"{size(of['bytes_missed_per_token'])} per token in place of {size(none['bytes_missed_per_token'])}"
    )


def _together(known: Document, best: Document, tier: str) -> str:
    """Say what streams that decode together do, beside one without drafts, at most and with dense work."""
    alone, streams = known["alone"], known["concurrency"]
    each, one = three(best["tokens_per_s_per_stream"]), _middle(alone)
    ends = {"least": with_dense_work(known, best) / one - 1, "most": _middle(best) / one - 1}
    return (
        f"{streams} streams: {three(_middle(best))} tokens/s together, {in_words(ends).removesuffix(' tokens/s')} than "
        f"one without drafts (the less if each further row also took a tenth of a plain pass, as in measured runs), "
        f"{each} each. A pass demands "
        f"{three(best['experts_per_layer'])} experts of a layer in place of {three(alone['experts_per_layer'])}, "
        f"{tier} holds {_hit(best)} of them in place of {_hit(alone)}, and it lacks "
        f"{size(best['bytes_missed_per_token'])} per token in place of {size(alone['bytes_missed_per_token'])}"
    )


def _row(each: Document, streams: int) -> dict[str, object]:
    row: dict[str, object] = {
        "drafts": each["drafts"],
        "rows": each["rows"],
        "tokens": three(each["tokens_per_pass"]),
        "experts": three(each["experts_per_layer"]),
        "hit": _hit(each),
        "MB": three(each["bytes_missed_per_token"] / 1e6),
        "pass": digits(each["plain_passes"], 3),
        "tokens/s": speeds(each["tokens_per_s"]),
    }
    return row | ({"each": three(each["tokens_per_s_per_stream"])} if streams > 1 else {})


def _engine(each: Document) -> dict[str, object]:
    """Return the row of an engine: without drafts, with the best number of them, and whether to draft."""
    row: dict[str, object] = {"engine": each["engine"], "without": three(each["tokens_per_s_without"])}
    if each["tokens_per_s"] is None:
        return row | {
            "drafts": "",
            "with": "",
            "gain": "",
            "draft?": "not known to" if not each["drafts_known"] else "no",
        }
    draft = {True: "yes", False: "no", None: "depends"}[each["pays"]]
    gain = percent(each["gain"]["middle"], signed=True)
    return row | {"drafts": each["drafts"], "with": three(each["tokens_per_s"]), "gain": gain, "draft?": draft}


def replayed_lines(known: Document) -> Iterator[str]:
    """Yield the verdict and the table by number of drafts of a search by replays."""
    steps, streams = known["steps"], known["concurrency"]
    tried = max(steps[1:], key=lambda each: each["tokens_per_s"], default=None)
    if tried:
        drafts = f"{tried['drafts']} draft{'s' if tried['drafts'] > 1 else ''} per pass"
        words = f"use {drafts}" if known["pays"] else f"do not draft: the best, {drafts}"
        yield f"drafts: {words}: {percent(known['gain'], signed=True)} tokens/s beside none, each with its fastest set"
    alone = known["alone"]
    best = next((each for each in steps if each["drafts"] == known["drafts"]), steps[0])
    if alone:
        yield (
            f"streams: {streams} together have {three(best['throughput_tokens_per_s'])} tokens/s with prompts, "
            f"{three(best['tokens_per_s'])} each in decoding; one at a time without drafts has "
            f"{three(alone['throughput_tokens_per_s'])} and {three(alone['tokens_per_s'])}; "
            f"hit rate {best['hit_rate']:.0%} in place of {alone['hit_rate']:.0%}"
        )
    yield table(
        [
            {
                "drafts": each["drafts"],
                "tokens": three(each["tokens_per_pass"]),
                "tokens/s": three(each["tokens_per_s"]),
                "with prompts": three(each["throughput_tokens_per_s"]),
                "hit": f"{each['hit_rate']:.0%}",
                "MB": three(each["bytes_moved_per_token"] / 1e6),
                "miss": each["set"]["miss"],
            }
            for each in steps
        ],
        f"by number of drafts, {streams} at a time (tokens: of a request's pass; tokens/s: of a request in decoding, "
        "with prompts: of all together; MB: moved per decoded token):",
    )
    chances = "/".join(digits(each, 3) for each in known["accept"])
    if tried:
        yield f"a draft is right with {chances} if those before it are, {known['accept_source']}"


def drafts_assumed(known: Document | None) -> Sequence[str]:
    """Return what is assumed of drafts, with what replaces it."""
    if known is None or len(known["steps"]) < 2:
        return ()
    chances = "/".join(digits(each, 3) for each in known["accept"])
    found = [f"a draft is right with {chances} if those before it are, {known['accept_source']}"]
    if known["head"]:
        takes = f"its layer's {size(known['head_bytes'])} lie in fast memory" if known["head_bytes"] else ""
        takes = f"; {takes}" if takes else ""
        found.append(f"a draft takes the time of one layer and the output head{takes} (--draft N:head=none)")
    return found


def _hit(each: Document) -> str:
    return f"{each['hit_rate']['middle']:.0%}"


def three(value: float) -> str:
    """Return a number with three digits."""
    return digits(value, 3)


def speeds(found: Document) -> str:
    """Return the least, the middle and the most of a range, or the one that all routings give."""
    values = [three(found[name]) for name in ("least", "middle", "most")]
    return " ".join(values) if len(set(values)) > 1 else values[0]
