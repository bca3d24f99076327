"""From marked Python functions to machine code, kept on disk. Nothing here knows what an expert is."""
