"""Live runs: the engine decides at the gates of the real model, with an optional baseline run."""
