"""Real offloading: the engine decides, threads read experts from a slow tier and compute them, a real clock runs."""
