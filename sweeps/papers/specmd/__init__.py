"""SpecMD, arXiv 2602.03921."""
