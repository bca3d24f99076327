"""The real model in the loop: its gates ask the engine and obey it, beside the same model left alone."""
