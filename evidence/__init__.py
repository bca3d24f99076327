"""Runs that other people measured, compared with predictions: `python -m evidence FOLDER`. Not in the wheel."""
