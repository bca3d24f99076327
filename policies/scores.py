"""Router probabilities of all experts of a layer, chosen or not."""


def mean_score(step, e):
    """The router's probability of expert e in UNITs, over several tokens their mean, rounded down."""
    total = 0
    for t in range(len(step.gate)):
        total += step.gate[t][e]
    return total // len(step.gate)
