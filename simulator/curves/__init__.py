"""Misses at every capacity from one pass over a trace's demand: stack distances (Mattson et al. 1970), Numba-compiled.

`curve` counts; `curve.py` explains what is exact. `lru` and `belady` are the two kernels over `stream`'s arrays;
`rest` replays the capacities at which a machine's times decide; `rows` writes Parquet. `stream` counts the most
hits at one capacity.
"""
