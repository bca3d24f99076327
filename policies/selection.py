"""Choosing experts by score, with the ties that semantics fixes."""

import math

UNWANTED = -(1 << 60)  # below every score: a correction bias makes scores negative
SLACK = 1e-9  # 2.2 * 25 is 55 experts, although 2.2 * 25 > 55 in floats


def times_k(now, factor):
    """Return ceil(factor * k), at most all experts."""
    return min(now["experts"], math.ceil(factor * now["k"] - SLACK))


def routed(ids):
    """Count the experts that the router gave a token; -1 is none."""
    count = 0
    for e in ids:
        count += 1 if e >= 0 else 0
    return count


def protected(now, top_j):
    """Return how many of a token's experts routing policies always keep or lift; -1 is 2, or k - 1 if that is less.

    The authors of Cache-Prior take 2, and 1 for models of two experts per token, where 2 would permit no choice.
    """
    return int(top_j) if top_j >= 0 else min(2, now["k"] - 1)


def is_among(ids, count, e):
    """Return whether e is one of the first `count`."""
    found = 0
    for i in range(count):  # no branch, because it would be unpredictable
        found += 1 if ids[i] == e else 0
    return found > 0


def write_by_rank(row, count, ids, scores):
    """Put the first `count` experts of a row (-1 none) in order: as recorded, then by descending score, ties by id."""
    own = runs(row, count, ids)
    foreign = foreign_first(row, count, ids)
    kept = 0
    for j in range(len(ids)):
        kept += own >> j & 1
    for i in range(foreign - 1, -1, -1):
        row[kept + i] = row[i]
    sort_by_score(row, kept, kept + foreign, scores)
    for i in range(kept + foreign, count):
        row[i] = -1
    place = 0
    for j in range(len(ids)):
        if own >> j & 1:
            row[place] = ids[j]
            place += 1


def runs(row, count, ids):
    """Return which of a token's recorded experts are in the row: bit j for the j-th."""
    own = 0
    for j in range(len(ids)):
        own |= 1 << j if ids[j] >= 0 and is_among(row, count, ids[j]) else 0
    return own


def foreign_first(row, count, ids):
    """Move experts that were not recorded to the front of the row; return their number."""
    foreign = 0
    for i in range(count):
        if row[i] >= 0 and not is_among(ids, len(ids), row[i]):
            row[foreign] = row[i]
            foreign += 1
    return foreign


def sort_by_score(row, first, last, scores):
    """Sort positions [first, last) by descending score, ties by id."""
    for i in range(first + 1, last):
        e, place = row[i], i
        while place > first and outranks(scores, e, row[place - 1]):
            row[place] = row[place - 1]
            place -= 1
        row[place] = e


def outranks(scores, e, other):
    """Return whether e comes before the other; neither was recorded."""
    return scores[e] > scores[other] or (scores[e] == scores[other] and e < other)


def next_best(scores, first, experts):
    """Return the expert of largest score, -1 if all are excluded with -inf.

    Ties go to the earliest in `first` (rank order, -1 none), then to the lowest id.
    """
    best = -1
    for e in first:
        if e >= 0 and scores[e] > -float("inf") and (best < 0 or scores[e] > scores[best]):
            best = e
    for e in range(experts):
        if scores[e] > -float("inf") and (best < 0 or scores[e] > scores[best]):
            best = e
    return best


def fill_places(scores, ids, allowed, keep, wanted, row):
    """Write a token's row behind its `keep` best: recorded experts that are allowed (1), then others by score."""
    place, left = keep, [-float("inf")] * len(allowed)
    for e in range(len(allowed)):
        if allowed[e] == 1:
            left[e] = scores[e]
    for e in ids:
        if e >= 0:
            left[e] = -float("inf")
    for e in ids[keep:wanted]:
        if allowed[e] == 1:
            row[place] = e
            place += 1
    while place < wanted:
        e = next_best(left, ids, len(left))
        row[place] = e
        if e >= 0:
            left[e] = -float("inf")
        place += 1


def suggest_best(now, step, d, t, wanted, out, count):
    """Append one token's `wanted` best of layer + 1 + d. Returns the new count; nothing beyond the last layer."""
    target = now["layer"] + 1 + d
    if target >= now["layers"]:
        return count
    order, first, precisions = step.look_order[d][t], target * now["experts"], now["precisions"]
    for j in range(wanted):
        out[count + j] = (first + order[j]) * precisions
    return count + wanted


def suggest_best_of_each(now, step, d, each, out, count):
    """Append to `out` each token's `each` best of layer + 1 + d, as `suggest_marked` does."""
    if now["tokens"] == 1 or now["layer"] + 1 + d >= now["layers"]:
        return suggest_best(now, step, d, 0, each, out, count)
    unmark(now, out)
    for t in range(now["tokens"]):
        mark(now, step, d, t, each, out)
    return suggest_marked(now, step, d, out, count)


def notes(now, out):
    """Return the offset of a layer's notes, after the suggestions; the first layer is never suggested."""
    return len(out) - now["experts"]


def unmark(now, out):
    """Clear the notes of a layer's experts."""
    first = notes(now, out)
    for e in range(now["experts"]):
        out[first + e] = UNWANTED


def mark(now, step, d, t, wanted, out):
    """Mark token t's `wanted` best of layer + 1 + d, which exists."""
    first = notes(now, out)
    for j in range(wanted):
        out[first + step.look_order[d][t][j]] = 0


def suggest_marked(now, step, d, out, count):
    """Append marked experts of layer + 1 + d, by descending largest score, ties to the lowest id.

    Returns the new count; appends nothing beyond the last layer.
    """
    target, first = now["layer"] + 1 + d, notes(now, out)
    if target >= now["layers"]:
        return count
    for e in range(now["experts"]):
        if out[first + e] == 0:
            out[first + e] = largest_score(step, d, now["tokens"], e)
    return append_descending(now, target * now["experts"], out, count)


def largest_score(step, d, tokens, e):
    """Return the largest look-ahead score of expert e over all tokens of the pass."""
    largest = step.look_score[d][0][e]
    for t in range(1, tokens):
        largest = max(largest, step.look_score[d][t][e])
    return largest


def append_descending(now, x, out, count):
    """Append copies (most precise) of experts x + e whose note is not UNWANTED, largest first; empties the notes."""
    first = notes(now, out)
    while True:
        top = 0
        for e in range(1, now["experts"]):
            if out[first + e] > out[first + top]:
                top = e
        if out[first + top] == UNWANTED:
            return count
        out[first + top] = UNWANTED
        out[count] = (x + top) * now["precisions"]
        count += 1


def append_best(scores, most, first, precisions, out, count):
    """Append copies (most precise) of up to `most` experts of positive score, descending, ties to the lowest id.

    Empties `scores` of what it appended.
    """
    for _ in range(most):
        top = 0
        for e in range(1, len(scores)):
            if scores[e] > scores[top]:
                top = e
        if scores[top] <= 0:
            return count
        out[count] = (first + top) * precisions
        scores[top] = 0
        count += 1
    return count


def sort_descending(scores, ids):
    """Sort both lists by descending score, ties to the lowest id (heapsort: no worst case, and quick to compile)."""
    for root in range(len(ids) // 2 - 1, -1, -1):
        settle(scores, ids, root, len(ids), scores[root], ids[root])
    for end in range(len(ids) - 1, 0, -1):
        score, e = scores[end], ids[end]
        scores[end], ids[end] = scores[0], ids[0]
        settle(scores, ids, 0, end, score, e)


def settle(scores, ids, root, end, score, e):
    """Insert an entry into the heap below the free position `root`; the top of the heap sorts last.

    It sifts down to a leaf, then up: an entry from the end of a heap belongs near a leaf, which halves the comparisons.
    """
    place, child = root, 2 * root + 1
    while child < end:
        if child + 1 < end and sorts_before(scores[child], ids[child], scores[child + 1], ids[child + 1]):
            child += 1
        scores[place], ids[place] = scores[child], ids[child]
        place, child = child, 2 * child + 1
    above = (place - 1) // 2
    while place > root and sorts_before(scores[above], ids[above], score, e):
        scores[place], ids[place] = scores[above], ids[above]
        place, above = above, (above - 1) // 2
    scores[place], ids[place] = score, e


def sorts_before(score, e, other_score, other):
    """Return whether one entry comes before another."""
    return score > other_score or (score == other_score and e < other)
