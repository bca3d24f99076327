"""The rules the tree lives by: imports flow one way, torch stays in tracegen, names and sizes stay human."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from ruff import find_ruff_bin

from moereplay import commands, policies
from moereplay.traces import exporters, importers, profiles
from tests.kit.every import every

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("tracegen", "traces", "policies", "simulator", "sweeps", "calibration", "results", "analysis")
PACKAGES = (*STAGES, "commands")
#: Typed values that analysis prints.
ANSWER = {f"sweeps.recommend.{name}" for name in ("answer", "engines", "runner", "search", "searched", "settings")}
#: What each package may import.
MAY_IMPORT = {
    "traces": {"traces"},
    "policies": {"policies", "traces.plugins", "traces.texts", "traces.units"},
    "results": {"results", "traces"},
    "simulator": {"simulator", "policies", "results", "traces"},
    "sweeps": {"sweeps", "simulator", "policies", "results", "traces"},
    "calibration": {"calibration", "simulator", "policies", "results", "traces"},
    "tracegen": {"tracegen", "traces"},
    "analysis": {"analysis", "results", "traces", *ANSWER},
    "commands": set(PACKAGES),
    "moereplay": set(PACKAGES),
}
#: A run of a model, or of real threads, is the reference engine driven from above, as a sweep drives it.
LIVE = (ROOT / "tracegen" / "live", ROOT / "tracegen" / "offload", ROOT / "tracegen" / "quality")
BANNED_NAMES = {"utils", "common", "helpers", "base", "misc", "v2"}
SOURCES = sorted(path for package in (*PACKAGES, "moereplay") for path in (ROOT / package).rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in SOURCES]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, which many rules look at."""
    return tuple(ast.walk(parsed(path)))


def imported(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file; ours without the name that all have in common."""
    return {short(name) for node in nodes(path) for name in named_by(node)}


def named_by(node: ast.AST) -> list[str]:
    """The modules that an import statement names."""
    if isinstance(node, ast.ImportFrom):
        if node.module == "moereplay":
            return [f"moereplay.{alias.name}" if alias.name in PACKAGES else "moereplay" for alias in node.names]
        return [node.module or "."]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def short(name: str) -> str:
    """A module's name below the one that all of ours have in common."""
    return name.removeprefix("moereplay.")


def test_imports_flow_one_way():
    wrong = []
    for path, file in zip(SOURCES, NAMES, strict=True):
        package = path.relative_to(ROOT).parts[0]
        live = any(package in path.parents for package in LIVE)
        allowed = MAY_IMPORT["sweeps" if live else package] | {package}
        ours = {name for name in imported(path) if name.split(".")[0] in (*PACKAGES, "moereplay")}
        wrong += [(file, name) for name in ours if name.split(".")[0] not in allowed and name not in allowed]
    assert wrong == []


def test_no_file_imports_itself_by_way_of_others():
    """Imports inside functions and of type checkers count: what has to be put off to work is a cycle all the same."""
    assert cycle({name: set(needed(path)) for name, path in zip(NAMES, SOURCES, strict=True)}) == []


def test_a_cycle_is_seen_wherever_it_is(tmp_path):
    for name, text in {"a": "import b", "b": "def f():\n    from c import d", "c": "from a import f"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert set(cycle({path.name: set(needed(path, tmp_path)) for path in tmp_path.iterdir()})) == {
        "a.py",
        "b.py",
        "c.py",
    }


def test_a_package_that_imports_from_a_module_of_its_own_and_is_imported_by_it_is_a_cycle(tmp_path):
    """A package's own file runs before any of its modules."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from package.one import x")
    (tmp_path / "package" / "one.py").write_text("from package.two import y")
    (tmp_path / "package" / "two.py").write_text("")
    found = {str(path.relative_to(tmp_path)): set(needed(path, tmp_path)) for path in tmp_path.rglob("*.py")}
    assert set(cycle(found)) == {"package/__init__.py", "package/one.py"}


def cycle(needs: Mapping[str, set[str]]) -> list[str]:
    """The files of a cycle, or none."""
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def needed(path: Path, root: Path = ROOT) -> Iterator[str]:
    """The files of ours that run before a file that imports runs on."""
    for node in nodes(path):
        names = named_by(node)
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            for file in files_of(short(name), root):
                if file != path:
                    yield str(file.relative_to(root))


def files_of(name: str, root: Path) -> Iterator[Path]:
    """Of a module: its own, and those of the packages that it lies in."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        stem = root.joinpath(*parts[:depth])
        yield from (file for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file())


def test_json_is_written_in_one_place_that_has_no_infinities():
    """`json.dumps` writes Infinity and NaN, which no JSON reader has to take; `traces.documents.json_text` does not."""
    for path in (path for path in SOURCES if path.relative_to(ROOT) != Path("traces/documents.py")):
        calls = [each for each in nodes(path) if isinstance(each, ast.Attribute)]
        names = {f"{each.value.id}.{each.attr}" for each in calls if isinstance(each.value, ast.Name)}
        assert not names & {"json.dump", "json.dumps"}, f"{path}: write JSON by traces.documents.json_text"


def test_names_that_only_the_type_checker_imports_are_not_used_at_run_time():
    """As `except TraceError` of a name imported under TYPE_CHECKING, which fails only when something else has."""
    assert checked_by_ruff(str(ROOT)) == []


@every(
    "use",
    ["try:\n        pass\n    except Path:\n        pass", "isinstance(1, Path)", "Path()", "x = Path | None"],
    apart=True,
)
def test_such_a_use_is_seen(use, tmp_path):
    (tmp_path / "a.py").write_text(
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from pathlib import Path\n\n\n"
        f"def f(x: 'Path') -> None:\n    {use}\n"
    )
    assert checked_by_ruff(str(tmp_path)) == ["TC004"]


def checked_by_ruff(folder: str) -> list[str]:
    """Codes of what ruff, as this project sets it up, finds of this kind in a folder."""
    command = [find_ruff_bin(), "check", "--config", str(ROOT / "pyproject.toml"), "--output-format", "json", folder]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [each["code"] for each in json.loads(found) if each["code"] == "TC004"]


def test_nothing_at_the_top_of_a_file_is_dead():
    """A name that no file mentions; those that number something are there for the others of their row."""
    users = [path for room in ("tests", "benchmarks", "contrib", "evidence") for path in (ROOT / room).rglob("*.py")]
    mentioned = {name for path in SOURCES for name in mentions(nodes(path))}
    mentioned |= {name for path in users for name in mentions(ast.walk(ast.parse(path.read_text("utf-8"))))}
    mentioned |= {
        name.upper() for name in (*importers.BUILT_IN, *importers.CATCH_ALLS, *exporters.NAMES, *profiles.NAMES)
    }  # found by the format's name
    dead = {(path.name, name) for path in SOURCES for name in defined(parsed(path))}
    assert {(file, name) for file, name in dead if name not in mentioned and not name.startswith("__")} == set()


def defined(tree: ast.Module) -> Iterator[str]:
    """Functions, classes and names that a file assigns at its top."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not numbers(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))


def numbers(value: ast.expr | None) -> bool:
    """Return True if a row of names is assigned numbers."""
    if isinstance(value, ast.Tuple):
        return all(isinstance(each, ast.Constant | ast.UnaryOp) and "'" not in ast.unparse(each) for each in value.elts)
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "range"


def mentions(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every name that is read, and every word of a short text: hooks and verbs are found by their names."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 100:
            yield from re.findall(r"\w+", node.value)


def test_torch_is_imported_by_tracegen_only():
    others = [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "tracegen"]
    heavy = {"torch", "transformers"}
    assert [path for path in others if heavy & {name.split(".")[0] for name in imported(path)}] == []


def test_files_have_one_reason_and_a_human_size():
    """A file is a chapter of at most 800 lines; no function is longer than a screen."""
    assert [path for path in SOURCES if path.stem in BANNED_NAMES] == []
    assert [(path, lines) for path in SOURCES if (lines := len(path.read_text().splitlines())) > 800] == []
    found = [(node, path) for path in SOURCES for node in functions_of(path)]
    lengths = {(path, node.name): (node.end_lineno or 0) - node.lineno + 1 for node, path in found}
    assert {where: length for where, length in lengths.items() if length > 60} == {}


def test_no_verb_takes_more_than_ten_arguments():
    """Options that belong together are a group."""
    taken = [(node.args, node.name) for path in (ROOT / "commands").glob("*.py") for node in functions_of(path)]
    assert [name for each, name in taken if len(each.args) + len(each.kwonlyargs) > 10] == []


def functions_of(path: Path) -> list[ast.FunctionDef]:
    """Return the functions and methods of a file."""
    return [node for node in nodes(path) if isinstance(node, ast.FunctionDef)]


def test_every_package_is_listed_by_name():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {".".join(path.relative_to(ROOT).parent.parts) for path in SOURCES if path.name == "__init__.py"}
    assert listed == {name if name == "moereplay" else f"moereplay.{name}" for name in found}


def test_every_folder_is_linked_into_the_package():
    links = {path.name: path.readlink() for path in (ROOT / "moereplay").iterdir() if path.is_symlink()}
    assert links == {name: Path("..", name) for name in PACKAGES}


def test_every_policy_file_is_listed_by_one_word():
    for kind, names in policies.NAMES.items():
        files = {path.stem for path in (ROOT / "policies" / kind).glob("*.py")} - {"__init__"}
        assert files == set(names)


def test_every_verb_is_a_function_of_the_file_that_lists_it():
    for name in commands.NAMES:
        body = parsed(ROOT / "commands" / f"{commands.file_of(name)}.py").body
        assert name in {node.name for node in body if isinstance(node, ast.FunctionDef)}, name


def test_helping_oneself_imports_nothing_slow():
    """`--help` answers in well under a second because of this: no verb is imported, and no library that they need."""
    slow = {"numpy", "polars", "zarr", "matplotlib", "pydantic", "simpy", "rich.table", "torch", "transformers"}
    script = "import sys, moereplay.command as command; sys.argv[1:] = ['--help']; command.main()"
    assert not imported_by(script) & (slow | set(VERB_FILES))


def test_verbs_import_the_slowest_libraries_inside():
    """These take a second and more, which `VERB --help` and a refused line must not."""
    assert not imported_by(f"import {', '.join(VERB_FILES)}") & {"torch", "transformers", "matplotlib", "scipy"}


VERB_FILES = sorted({f"moereplay.commands.{commands.file_of(name)}" for name in commands.NAMES})


def imported_by(script: str) -> set[str]:
    """Return the modules that a program has imported when it ends."""
    at_end = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    run = subprocess.run([sys.executable, "-c", at_end + script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(run.stderr.split())
