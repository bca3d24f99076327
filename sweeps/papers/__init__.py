"""Figures and tables of papers, as data: a TOML file per paper, read and replayed by `figures`."""
