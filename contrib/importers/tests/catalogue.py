"""A sample of every format of this package; `python -m contrib.importers.tests.catalogue` writes `samples/`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from contrib.importers.tests import loggers, public, research
from tests.kit.importer_contract import rewrite

SAMPLES = Path(__file__).with_name("samples")
ALL = [replace(sample, folder=SAMPLES) for sample in (*research.ALL, *loggers.ALL, *public.ALL)]

if __name__ == "__main__":
    rewrite(SAMPLES, ALL)
