"""Record GGUF files by running llama.cpp in a process of its own; no torch is needed."""
