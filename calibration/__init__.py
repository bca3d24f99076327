"""Fit platforms to runs that engines logged, and compare predictions made with them with the measurements.

A folder of evidence holds `cells.csv` (one row per run), `models.csv`, per-token logs and routing. `fitting.py` fits a
platform to some of its runs, `evidence.py` predicts all of them.
"""

if __name__ != "moereplay.calibration":
    raise ImportError("import this package as moereplay.calibration: a second copy of its modules would be loaded")
