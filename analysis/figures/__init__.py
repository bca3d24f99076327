"""Figures from results: charts as values (`chart.py`), their pictures and files (`panels.py`), and the `catalogue`."""
