"""Presets: one TOML file each, every value with its source. Adding one is a file here and its name below."""

#: SpecMD's own, which its Table 2 repeats with Least-Stale in place of their eviction, as NAME+ls.
SPECMD = ("specmd-baseline", "specmd-1", "specmd-2", "specmd-3", "specmd-4", "specmd-5")
PAPERS = ("cache-prior-paper", "eliseev", "hobbit", "smoe", "moe-infinity", "fiddler")
#: Engines, of which docs/evidence.md has measured runs.
ENGINES = ("llama.cpp", "bigmoeonedge", "imp", "warp", "colibri")
NAMES = (*SPECMD, *PAPERS, *ENGINES)
