"""The contract between producers and consumers of routing traces; knows nothing of policies, engines or torch."""
