"""Lines and files of each room compared with tests/project/budget.toml: `make check` fails where a room is larger.

A row may be raised in the commit that needs it, which says why in the row.
"""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def code_lines(text):
    """Return how many lines of Python source hold code: no blank line, comment or docstring."""
    tree = ast.parse(text)
    prose = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in prose
        for number, line in enumerate(text.splitlines(), 1)
    )


def measured(root=ROOT):
    """Return {room: (files, lines, code lines)} of the Python files that git tracks, and of the pages of docs/."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py", "docs/*.md"],
        cwd=root, check=True, capture_output=True, text=True,
    )  # fmt: skip
    rooms = {}
    for name in filter(None, listed.stdout.split("\0")):
        path = Path(root, name)
        if "/" not in name or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        code = code_lines(text) if name.endswith(".py") else 0
        counts = rooms.get(name.split("/")[0], (0, 0, 0))
        rooms[name.split("/")[0]] = tuple(a + b for a, b in zip(counts, (1, text.count("\n"), code), strict=True))
    return rooms


def complaints(rooms, budget):
    """Return a line for each room that is larger than its row of the budget allows, or has no row."""
    found = []
    for room, (files, lines, _) in sorted(rooms.items()):
        row = budget.get(room)
        if row is None:
            found.append(f"{room}: no row in tests/project/budget.toml; add one that says why")
        elif lines > row["lines"] or files > row["files"]:
            found.append(
                f"{room}: {lines:,} lines in {files} files; the budget is {row['lines']:,} in {row['files']}."
                " Remove what became superfluous, or raise the row and say why in it"
            )
    return found


def main():
    """Print the rooms beside their budget; exit code 1 if one is larger."""
    budget = tomllib.loads((ROOT / "tests/project/budget.toml").read_text(encoding="utf-8"))
    rooms = measured()
    print(f"{'room':<12}{'files':>6}{'lines':>9}{'code':>9}{'budget':>9}")
    for room, (files, lines, code) in sorted(rooms.items()):
        print(f"{room:<12}{files:>6}{lines:>9,}{code:>9,}{budget.get(room, {}).get('lines', 0):>9,}")
    wheel = [
        counts
        for room, counts in rooms.items()
        if room not in ("benchmarks", "contrib", "docs", "evidence", "studies", "tests")
    ]
    print(f"{'the wheel':<12}{sum(c[0] for c in wheel):>6}{sum(c[1] for c in wheel):>9,}{sum(c[2] for c in wheel):>9,}")
    found = complaints(rooms, budget)
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
