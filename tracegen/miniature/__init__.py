"""The bundled miniature: a trained MoE with OLMoE-1B-7B's routing topology, small enough to commit."""
