"""Search the lossless policy sets of a trace on a machine, and write the answer as a document."""
