"""Prices of real machines from the logs of engines, and how far predictions made with them are from what was measured.

A folder of evidence is `cells.csv`, one row per run, with `models.csv`, per-token series and routing beside it.
`fitting.py` makes a platform of some of its runs, `evidence.py` predicts all of them.
"""

if __name__ != "moereplay.calibration":
    raise ImportError("import this package as moereplay.calibration: a second copy of its modules would be loaded")
