"""Kernels of fits of routing models: they draw a layer's routing, and count its misses, thousands of times."""
