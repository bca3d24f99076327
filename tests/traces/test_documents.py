"""Documents say what the program does: tables equal the code."""

import re
from functools import partial
from importlib import import_module
from pathlib import Path

from moereplay.calibration.columns import FILES
from moereplay.calibration.columns import markdown as columns
from moereplay.policies import NAMES, catalogue
from moereplay.policies.grammar import is_added, parse
from moereplay.policies.table import explain, markdown, rows
from moereplay.results import counters
from moereplay.simulator import cards
from moereplay.traces.exporters import contract as exporters
from moereplay.traces.importers import plug_ins
from moereplay.traces.importers import registry as importers
from moereplay.traces.profiles import contract as profiles

ROOT = Path(__file__).resolve().parents[2]


def between(page: str, mark: str) -> str:
    """The text that a generated table occupies."""
    return (ROOT / page).read_text().split(f"<!-- {mark}:")[1].split("-->\n", 1)[1].split("<!-- end -->")[0].strip()


#: Page -> the tables in it, by name, and the code that writes them.
TABLES = {
    "docs/logs.md": {file: partial(columns, file) for file in FILES},
    "docs/policies-table.md": {"policies": markdown},
    "docs/cards.md": {"cards": cards.markdown},
    "docs/trace-format.md": {
        "importers": partial(importers.markdown, (*importers.BUILT_IN, *importers.CATCH_ALLS)),
        "profiles": profiles.markdown,
    },
    "contrib/importers/README.md": {"importers": lambda: importers.markdown(plug_ins.contributed())},
    "docs/export.md": {"exporters": exporters.markdown},
    "docs/semantics.md": {"counters": counters.markdown},
}


def test_the_tables_of_pages_are_those_that_the_code_writes():
    for page, tables in TABLES.items():
        for mark, table in tables.items():
            assert between(page, mark) == table(), f"{page}: run `make tables`"


def test_the_list_of_policies_has_everything_that_may_be_set():
    """Each row names every parameter with its default, and what the trace must have."""
    told = {(row["kind"], row["policy"]): row for row in rows()}
    for policy in catalogue():
        row = told.pop((policy.kind, policy.name))
        added = {each.name for each in policy.params if is_added(each)}
        settings = [cell.split(" (")[0] for cell in row["parameters"].split("), ") if cell]
        settings = [setting for setting in settings if setting.partition("=")[0] not in added]
        assert ":".join([policy.name, *settings]) == parse(policy.kind, policy.name).text(full=True)
        assert set(row["needs"].split(", ")) - {"ids"} == parse(policy.kind, policy.name).needs
    assert told == {}


def test_a_policy_is_explained_with_its_notes_and_ranges():
    for policy in catalogue():
        text = "\n".join(f"{heading} {said}" for heading, said in explain(policy))
        assert (import_module(f"moereplay.policies.{policy.kind}.{policy.name}").__doc__ or "?").splitlines()[0] in text
        assert all(f"{param.name} {param.allowed}" in text for param in policy.params)
        assert policy.source in text and policy.summary in text


def test_the_page_on_policies_groups_such_as_there_are():
    """docs/policies-table.md, which is written by a command, is the whole list."""
    for kind in NAMES:
        page = (ROOT / "docs" / "policies.md").read_text()
        row = re.search(rf"^\| {kind} \|.*\|(.*)\|$", page, re.MULTILINE)
        assert row and set(re.findall(r"`(\w+)`", row[1])) <= set(NAMES[kind])
