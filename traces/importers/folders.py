"""Files that a folder lacks by its own numbering, and files of it that were not read: refused or named in a note.

`train-00001-of-00002.parquet` says how many files there are; without the others it is refused. Names with plain
numbers (`part-3.csv`, `layer7.npz`) do not say how many there are: a gap between the first and the last is named.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from moereplay.traces.schema import TraceError, shown

SHARD = re.compile(r"(\d{1,6})([-_. ]?of[-_. ]?)(\d{1,6})(?!\d)", re.ASCII | re.IGNORECASE)
COUNTED = re.compile(r"(?:part|shard|chunk|split|file|rank|layer)s?[-_.]?(\d{1,6})(?!\d)", re.ASCII | re.IGNORECASE)
NUMBER = re.compile(r"\d{1,6}(?!.*\d)", re.ASCII)
FROM_ZERO = re.compile(r"part[-_.]?\d", re.ASCII | re.IGNORECASE)  #: Spark and others count parts from 0
LISTED = 5  #: files that a note names
#: What describes a data set and holds no rows.
ABOUT = re.compile(
    r"(readme|licen[cs]e|notice|citation|changelog)(\..*)?|.*\.(md|rst|pdf|png|svg|yaml|yml|lock)|dataset_infos?\.json"
)


def refuse_missing(source: Path, files: Iterable[Path]) -> None:
    """Raises TraceError naming the files of a set that are not in the folder `source`."""
    sets: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    for file in files:
        if source.is_dir() and (found := SHARD.search(file.name)):
            pattern = f"{file.name[: found.start(1)]}{{}}{file.name[found.end(1) :]}"
            sets[pattern, int(found[3])][int(found[1])] = found[1]
    for (pattern, count), numbers in sets.items():
        first = 1 if count in numbers and 0 not in numbers else 0
        width = len(next(iter(numbers.values())))
        missing = [
            pattern.format(f"{number:0{width}}") for number in range(first, first + count) if number not in numbers
        ]
        if missing:
            either = (
                "" if {0, count} & set(numbers) else f", or {pattern.format(f'{count:0{width}}')} if counted from 1"
            )
            wrong = f"{len(numbers):,} of {count:,} files are here, without {_listed(missing)}{either}"
            raise TraceError(f"{source}: {wrong}; download the rest, or import the files one by one")


def notes(source: Path, files: list[Path], beside: Iterable[Path] = ()) -> list[str]:
    """What is said of numbers that are missing and of files of the folder that were not read; or of one shard alone."""
    if not source.is_dir():
        found = SHARD.search(source.name)
        alone = found is not None and int(found[3]) > 1
        return [f"one file of {int(found[3]):,}; import their folder to read all"] if found and alone else []
    return [*_gaps(files), *_unread(source, {*files, *beside})]


def _gaps(files: list[Path]) -> list[str]:
    """Numbers between the first and the last of files of one name, where most are there."""
    named: dict[str, dict[int, str]] = defaultdict(dict)
    for file in files:
        found = None if SHARD.search(file.name) else COUNTED.search(file.name) or NUMBER.search(file.name)
        if found:
            at, end = found.span(1) if found.re is COUNTED else found.span()
            named[f"{file.parent.name}/{file.name[:at]}*{file.name[end:]}"][int(file.name[at:end])] = file.name
    said = []
    for pattern, numbers in named.items():
        first = 0 if FROM_ZERO.search(pattern.replace("*", "0")) and min(numbers) == 1 else min(numbers)
        missing = sorted(set(range(first, max(numbers))) - set(numbers)) if max(numbers) < 2 * len(numbers) + 1 else []
        if missing and len(numbers) > 1:
            listed = _listed([str(number) for number in missing])
            said.append(f"no file {listed} of {pattern.partition('/')[2]}: is it missing?")
    return said


def _unread(source: Path, read: set[Path]) -> list[str]:
    """What is said of files in the folders that files were read from."""
    folders = {source, *(file.parent for file in read)}
    left = [entry for folder in sorted(folders) for entry in sorted(folder.iterdir()) if entry not in read]
    kept = [
        entry.name + ("/" if entry.is_dir() else "")
        for entry in left
        if not entry.name.startswith((".", "_")) and not ABOUT.fullmatch(entry.name.lower()) and entry not in folders
    ]
    return [f"not read: {_listed(kept)}"] if kept else []


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED:,} more" if len(names) > LISTED else ""
    return shown(", ".join(names[:LISTED]), 300) + more
