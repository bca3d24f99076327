"""The misses of a run: as measured, even if none, or as shares of its tokens' demand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moereplay.calibration.files import Line, Series
from moereplay.calibration.fitting import FAULTS, fit_faults
from moereplay.calibration.runs import MIB, Run, run_from
from moereplay.simulator.platforms import platform
from tests.kit.every import every
from tests.kit.evidence_folder import row


def run(series: Series | None = None, **said: object) -> Run:
    """A run of the made-up model, which demands 160 MiB per token where its row does not say other."""
    cells = {name: str(value) for name, value in row("a", tpot_ms=9, **said).items()}
    return run_from(Line(Path("cells.csv"), 2, cells), None, series)


def test_a_measured_zero_is_a_measurement():
    logged = Series(np.full(3, 9.0), np.zeros(3))
    assert run(logged, read_mib_per_token=8, hit_pct=50).missed_bytes.tolist() == [0, 0, 0]
    assert run(read_mib_per_token=0, hit_pct=50).missed_bytes.tolist() == [0]
    assert run(hit_pct=50).missed_bytes.tolist() == [80 * MIB]


@every("said, share", [({"policy": "none (cache off)"}, 1), ({"hit_pct": 75}, 0.25), ({"read_mib_per_token": 50}, 0.5)])
def test_misses_are_shares_of_what_the_rows_own_token_demands(said, share):
    found = run(token_demand_mib=100, **said)
    assert (found.missed_share.tolist(), found.missed_bytes.tolist()) == ([share], [share * 100 * MIB])


def test_runs_of_one_name_both_price_a_page_fault():
    """60 and 20 us per fault; their median lies between."""
    faults = np.array([1.0, 3.0]) * FAULTS
    logs = [Series(np.full(2, 9.0), np.zeros(2), compute_ms=1 + faults * ms, majflt=faults) for ms in (0.06, 0.02)]
    _, figures = fit_faults([run(log) for log in logs], platform("phone-ufs4"))
    assert (figures["fault_ns"].n, figures["fault_ns"].value) == (2, pytest.approx(40_000))
