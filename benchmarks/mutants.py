"""Plants random one-token mutants in a copy of the tree, one by one, and says what share the tests of each room find.

Rooms are drawn by their lines, and a place in a room evenly: a comparison, an arithmetic operator, a number, `and`,
`or`, `not`, two arguments, what is returned, how a loop goes on. The tests that name the mutant's module run first,
then the others of its room, in plain Python, until one fails or the time is up.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import signal
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.faults import FAILED, PASSED, ROOT, copied, tested

ROOMS = ("analysis", "calibration", "commands", "policies", "results", "simulator", "sweeps", "tracegen", "traces")
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
COMPARISONS |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "//", "**": "*", "<<": ">>", ">>": "<<"}
ARITHMETIC |= {"&": "|", "|": "&", "^": "&"}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
LAST_FAILED = ".pytest_cache/v/cache/lastfailed"
SHARE = 0.25  #: of the cases of each search, as in `make test`
Place = tuple[int, int]  #: line and column, as in ast


class Mutant(NamedTuple):
    """Characters of a file that other ones replace."""

    file: str
    start: int
    stop: int
    new: str

    @property
    def room(self) -> str:
        """The folder at the top."""
        return self.file.partition("/")[0]

    def planted(self, text: str) -> str:
        """Return a file's text with the mutant."""
        return text[: self.start] + self.new + text[self.stop :]

    def shown(self, text: str) -> str:
        """Return the lines that it changes, before and after."""
        first = text.rfind("\n", 0, self.start) + 1
        last = text.find("\n", self.stop)
        before, after = text[first:last], text[first : self.start] + self.new + text[self.stop : last]
        marked = [f"{sign} {line}" for sign, part in (("-", before), ("+", after)) for line in part.split("\n")]
        return "\n".join([f"{self.file}:{text.count(chr(10), 0, first) + 1}", *marked])


def mutants(file: str, text: str) -> list[Mutant]:
    """Return the mutants of a file."""
    lines = text.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]

    def at(place: Place) -> int:
        """Return the position of a place; ast counts columns in bytes of UTF-8."""
        line, column = place
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found = []
    for node in _run(ast.parse(text)):
        for first, last, old, new in _changes(node):
            start, stop = at(first), at(last)
            if old is not None:
                match = re.compile(r"\s+".join(map(re.escape, old.split()))).search(text, start, stop)
                if match is None:  # a comment stands between
                    continue
                start, stop = match.span()
            found.append(Mutant(file, start, stop, new))
    return found


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that are run: no annotation, nothing for type checkers alone, no text."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns") or isinstance(node, ast.JoinedStr):
            continue
        if isinstance(node, ast.If) and name == "body" and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _run(child)


def _changes(node: ast.AST) -> Iterator[tuple[Place, Place, str | None, str]]:
    """Yield where to look, the old token there, None for all of it, and the new one."""
    match node:
        case ast.Compare():
            operands = [node.left, *node.comparators]
            for left, sign, right in zip(operands, node.ops, operands[1:], strict=False):
                old = _sign(ast.Compare(ast.Constant(0), [sign], [ast.Constant(0)]))
                yield _end(left), _begin(right), old, COMPARISONS[old]
        case ast.BinOp():
            old = _sign(ast.BinOp(ast.Constant(0), node.op, ast.Constant(0)))
            if old in ARITHMETIC:
                yield _end(node.left), _begin(node.right), old, ARITHMETIC[old]
        case ast.AugAssign():
            old = _sign(ast.BinOp(ast.Constant(0), node.op, ast.Constant(0)))
            if old in ARITHMETIC:
                yield _end(node.target), _begin(node.value), f"{old}=", f"{ARITHMETIC[old]}="
        case ast.BoolOp():
            old = "and" if isinstance(node.op, ast.And) else "or"
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield _end(left), _begin(right), old, {"and": "or", "or": "and"}[old]
        case ast.UnaryOp(op=ast.Not()):
            yield _begin(node), _begin(node.operand), "not", ""
        case ast.Constant(value=bool()):
            yield _begin(node), _end(node), None, str(not node.value)
        case ast.Constant(value=int() as number):
            yield from ((_begin(node), _end(node), None, f"{number + by}") for by in (1, -1))
        case ast.Name(id=name) if name in NAMES:
            yield _begin(node), _end(node), None, NAMES[name]
        case ast.Break() | ast.Continue():
            yield _begin(node), _end(node), None, "break" if isinstance(node, ast.Continue) else "continue"
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield _begin(value), _end(value), None, "None"
        case ast.Call(args=[ast.Name() as first, ast.Name() as second, *_]) if first.id != second.id:
            yield _begin(first), _end(second), None, f"{second.id}, {first.id}"


def _sign(node: ast.expr) -> str:
    """Return the operator of an expression over two digits."""
    return ast.unparse(node)[1:-1].strip()


def _begin(node: ast.expr | ast.stmt) -> Place:
    return node.lineno, node.col_offset


def _end(node: ast.expr | ast.stmt) -> Place:
    return node.end_lineno or 0, node.end_col_offset or 0


def drawn(tree: Path, count: int, seed: int, rooms: Sequence[str] = ROOMS) -> list[Mutant]:
    """Return mutants whose rooms are drawn by lines."""
    dice, lines = Random(seed), dict[str, int]()
    places = dict[str, list[Mutant]]()
    for room in rooms:
        texts = {file: (tree / file).read_text("utf-8") for file in _files(tree, room)}
        lines[room] = sum(text.count("\n") for text in texts.values())
        places[room] = [each for file, text in texts.items() for each in mutants(file, text)]
    return [dice.choice(places[room]) for room in dice.choices(rooms, list(lines.values()), k=count)]


def part_of(chosen: Sequence[Mutant], part: str) -> Sequence[Mutant]:
    """Return every n-th of them from the k-th on, for a part K/N: several processes or sessions share a draw."""
    first, _, of = part.partition("/")
    return chosen[int(first) - 1 :: int(of)]


def concerning(tree: Path, mutant: Mutant) -> list[str]:
    """Return the test files that name the mutant's module, and those of its room; fewest imports away first."""
    imports = _imports(tree)
    away, reached = {mutant.file: 0}, [mutant.file]
    for target in reached:
        for file, named in imports.items():
            if target in named and file not in away:
                away[file] = away[target] + 1
                reached.append(file)
    tests = [file for file in imports if Path(file).name.startswith("test_")]
    room = f"tests/{mutant.room}/"
    chosen = [file for file in tests if file.startswith(room) or away.get(file) == 1]
    return sorted(chosen, key=lambda file: (away.get(file, len(imports)), not file.startswith(room), file))


def _files(tree: Path, *folders: str) -> list[str]:
    return sorted(path.relative_to(tree).as_posix() for folder in folders for path in (tree / folder).rglob("*.py"))


@cache
def _imports(tree: Path) -> dict[str, set[str]]:
    """Return the files that each file imports; a mutant changes no import."""
    return {file: _imported(tree, file) for file in _files(tree, *ROOMS, "moereplay", "tests")}


def _imported(tree: Path, file: str) -> set[str]:
    """Return the files of ours that a file imports anywhere in it."""
    names = set[str]()
    for node in ast.walk(ast.parse((tree / file).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    stems = [name.removeprefix("moereplay.").replace(".", "/") for name in names]
    return {f"{stem}{ending}" for stem in stems for ending in (".py", "/__init__.py")}


class Verdict(NamedTuple):
    """How a mutant ended: `found by TEST`, `survived`, or `not found in N seconds of CPU time`."""

    mutant: Mutant
    ending: str
    test: str = ""  #: that failed


def verdicts(copy: Path, chosen: Sequence[Mutant], seconds: int) -> Iterator[Verdict]:
    """Yield how each mutant ended; again, where the test that found it fails without it too."""
    failing, waiting = set[str](), list(chosen)
    while waiting:
        ended = list[Verdict]()
        for mutant in waiting:
            ended.append(verdict(copy, mutant, seconds, failing))
            yield ended[-1]
        wrong = failing_in(copy, {each.test for each in ended if each.test})
        failing |= wrong
        waiting = [each.mutant for each in ended if each.test in wrong]


def verdict(copy: Path, mutant: Mutant, seconds: int, failing: set[str]) -> Verdict:
    """Run tests on a mutant, but those of `failing`, until one fails."""
    path, last = copy / mutant.file, copy / LAST_FAILED
    right, tests = path.read_text("utf-8"), concerning(copy, mutant)
    last.unlink(missing_ok=True)
    path.write_text(mutant.planted(right), "utf-8")
    try:
        left_out = (f"--deselect={test}" for test in sorted(failing))
        code = tested(copy, "-x", *tests, *left_out, "--timeout=600", seconds=seconds, share=SHARE)
    finally:
        path.write_text(right, "utf-8")
    if code == PASSED:
        return Verdict(mutant, "survived")
    if code == -signal.SIGXCPU:
        return Verdict(mutant, f"not found in {seconds} seconds of CPU time")
    if code != FAILED:
        collected = tested(copy, "--collect-only", *tests) == PASSED
        return Verdict(mutant, f"{'found' if collected else 'not tested'}: pytest ended with {code}")
    (test,) = json.loads(last.read_text())
    return Verdict(mutant, f"found by {test}", test)


def failing_in(copy: Path, tests: set[str]) -> set[str]:
    """Return which of the tests fail in a copy as it is."""
    (copy / LAST_FAILED).unlink(missing_ok=True)
    if not tests or tested(copy, *sorted(tests), "--timeout=600", share=SHARE) == PASSED:
        return set()
    return set(json.loads((copy / LAST_FAILED).read_text()))


def table(ended: Sequence[Verdict]) -> list[str]:
    """Return a line for each room, and one for all: drawn, found, survived, out of time."""
    lines = [f"{'room':<12}{'drawn':>6}{'found':>6}{'survived':>9}{'out of time':>12}"]
    rooms = sorted({each.mutant.room for each in ended})
    for name in (*rooms, "all"):
        of_room = [each.ending for each in ended if name in (each.mutant.room, "all")]
        counts = [sum(ending.startswith(word) for ending in of_room) for word in ("found", "survived", "not")]
        lines.append(f"{name:<12}{len(of_room):>6}{counts[0]:>6}{counts[1]:>9}{counts[2]:>12}")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Print how each mutant ended, those that no test found with their lines, and the share by room."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout whose code and tests are used")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", default=",".join(ROOMS), help="several separated by commas")
    parser.add_argument("--seconds", type=int, default=100, help="of CPU time for the tests of a mutant")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th mutant of the draw from the K-th on")
    asked = parser.parse_args(arguments)
    ended = dict[Mutant, Verdict]()
    with TemporaryDirectory() as folder:
        copy = Path(folder)
        copied(asked.tree, copy)
        chosen = part_of(drawn(copy, asked.count, asked.seed, asked.rooms.split(",")), asked.part)
        for each in verdicts(copy, chosen, asked.seconds):
            ended[each.mutant] = each
            print(
                each.mutant.shown((copy / each.mutant.file).read_text("utf-8")), each.ending, "", sep="\n", flush=True
            )
    print(*table([*ended.values()]), sep="\n")


if __name__ == "__main__":
    main()
