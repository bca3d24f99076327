"""Writes digests.json: `python -m tests.digests.make`. An entry changes only with a defect, named in the commit.

An entry that is there keeps the counters that it was made with; `--all` takes those of today.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from moereplay.results.counters import COUNTERS
from tests.digests.runs import digest_of, exp_of_this_machine, replays

FILE = Path(__file__).with_name("digests.json")


def main() -> None:
    """Replay everything, write, and print which entries changed."""
    before = json.loads(FILE.read_text()) if FILE.exists() else {"counters": list(COUNTERS), "digests": {}}
    counters = list(COUNTERS) if "--all" in sys.argv else before["counters"]
    digests = {run.name: digest_of(run, counters, log=True) for run in replays()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(digest)}" for name, digest in digests.items())
    head = f'"exp": "{exp_of_this_machine()}",\n"counters": {json.dumps(counters)},\n"digests": {{\n'
    FILE.write_text(f"{{\n{head}{lines}\n}}\n}}\n")
    for name, known in before["digests"].items():
        if digests.get(name) != known:
            print(name, known, "->", digests.get(name))


if __name__ == "__main__":
    main()
