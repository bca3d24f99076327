"""Thousands of replays: jobs in batches, run by supervised workers here or on a cluster, kept as parts."""
