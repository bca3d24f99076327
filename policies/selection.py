"""Choosing experts by score, with the ties that semantics fixes."""

import math

UNNAMED = -(1 << 60)  # below every score: a correction bias makes scores negative
SLACK = 1e-9  # 2.2 * 25 is 55 experts, although 2.2 * 25 > 55 in floats


def times_k(now, factor):
    """ceil(factor * k), at most all experts."""
    return min(now["experts"], math.ceil(factor * now["k"] - SLACK))


def routed(ids):
    """How many experts the router gave a token; -1 is none."""
    count = 0
    for e in ids:
        count += 1 if e >= 0 else 0
    return count


def protected(now, top_j):
    """How many of a token's experts routing policies always keep or lift; -1 is 2, or k - 1 if that is less.

    The authors of Cache-Prior take 2, and 1 for models of two experts per token, where 2 would leave nothing to choose.
    """
    return int(top_j) if top_j >= 0 else min(2, now["k"] - 1)


def is_among(names, count, e):
    """Whether e is one of the first `count`."""
    for i in range(count):
        if names[i] == e:
            return True
    return False


def keep_best(names, scores, e, score):
    """Enter e into a list by descending score, behind its equals; the last falls out."""
    place = len(names) - 1
    if not score > scores[place]:
        return
    while place > 0 and scores[place - 1] < score:
        names[place], scores[place] = names[place - 1], scores[place - 1]
        place -= 1
    names[place], scores[place] = e, score


def write_by_rank(row, count, ids, scores):
    """Put the first `count` names of a row (-1 none) in order: as recorded, then by descending score, ties by id."""
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
    """Which of a token's recorded experts are in the row: bit j for the j-th."""
    own = 0
    for j in range(len(ids)):
        own |= 1 << j if ids[j] >= 0 and is_among(row, count, ids[j]) else 0
    return own


def foreign_first(row, count, ids):
    """Move what was not recorded to the front of the row, over the rest; returns how many."""
    foreign = 0
    for i in range(count):
        if row[i] >= 0 and not is_among(ids, len(ids), row[i]):
            row[foreign] = row[i]
            foreign += 1
    return foreign


def sort_by_score(row, first, last, scores):
    """Places [first, last) by descending score, ties by id."""
    for i in range(first + 1, last):
        e, place = row[i], i
        while place > first and outranks(scores, e, row[place - 1]):
            row[place] = row[place - 1]
            place -= 1
        row[place] = e


def outranks(scores, e, other):
    """Whether e comes before the other; neither was recorded."""
    return scores[e] > scores[other] or (scores[e] == scores[other] and e < other)


def next_best(scores, first, experts):
    """The expert of largest score; ties to the earliest in `first` (rank order, -1 none), then to the lowest id.

    Scores of experts that are out of the question are -inf. Returns -1 if all are.
    """
    best = -1
    for e in first:
        if e >= 0 and scores[e] > -float("inf") and (best < 0 or scores[e] > scores[best]):
            best = e
    for e in range(experts):
        if scores[e] > -float("inf") and (best < 0 or scores[e] > scores[best]):
            best = e
    return best


def name_best(now, step, d, t, wanted, out, count):
    """Append one token's `wanted` best of layer + 1 + d. Returns the new count; nothing beyond the last layer."""
    target = now["layer"] + 1 + d
    if target >= now["layers"]:
        return count
    for j in range(wanted):
        out[count + j] = (target * now["experts"] + step.look_order[d][t][j]) * now["precisions"]
    return count + wanted


def name_predicted(now, step, d, wanted, out, count):
    """Append to `out` each token's `wanted[t]` best of layer + 1 + d, united, by descending largest score.

    Ties to the lowest id. Returns the new count; nothing beyond the last layer.
    """
    target = now["layer"] + 1 + d
    if target >= now["layers"]:
        return count
    best = [UNNAMED] * now["experts"]
    for t in range(len(wanted)):
        for j in range(wanted[t]):
            best[step.look_order[d][t][j]] = 0
    for e in range(now["experts"]):
        if best[e] == 0:
            best[e] = largest_score(step, d, len(wanted), e)
    return append_descending(best, target * now["experts"], now["precisions"], out, count)


def largest_score(step, d, tokens, e):
    """The largest look-ahead score of expert e over all tokens of the pass."""
    largest = step.look_score[d][0][e]
    for t in range(1, tokens):
        largest = max(largest, step.look_score[d][t][e])
    return largest


def append_descending(best, first, precisions, out, count):
    """Append copies (most precise) of experts whose best[e] is not UNNAMED in descending order; empties `best`."""
    while True:
        top = 0
        for e in range(1, len(best)):
            if best[e] > best[top]:
                top = e
        if best[top] == UNNAMED:
            return count
        out[count] = (first + top) * precisions
        best[top] = UNNAMED
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


def sort_descending(scores, names):
    """Sort both lists by descending score, ties to the lowest name (heapsort: no worst case, and quick to compile)."""
    for root in range(len(names) // 2 - 1, -1, -1):
        sift_down(scores, names, root, len(names))
    for end in range(len(names) - 1, 0, -1):
        exchange(scores, names, 0, end)
        sift_down(scores, names, 0, end)


def sift_down(scores, names, root, end):
    """Restore the heap below `root`, whose top is what sorts last."""
    while 2 * root + 1 < end:
        child = 2 * root + 1
        if child + 1 < end and sorts_before(scores, names, child, child + 1):
            child += 1
        if not sorts_before(scores, names, root, child):
            return
        exchange(scores, names, root, child)
        root = child


def sorts_before(scores, names, i, j):
    """Whether entry i comes before entry j."""
    return scores[i] > scores[j] or (scores[i] == scores[j] and names[i] < names[j])


def exchange(scores, names, i, j):
    """Swap two entries."""
    scores[i], scores[j] = scores[j], scores[i]
    names[i], names[j] = names[j], names[i]
