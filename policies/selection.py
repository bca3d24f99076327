"""Choosing experts by score, with the ties that semantics fixes."""

UNNAMED = -(1 << 60)  # below every score: a correction bias makes scores negative


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
