"""Record GGUF files by running llama.cpp in a separate process; no torch is needed."""
