"""Sizes of a model from its own files: `config.json`, headers of safetensors and GGUF files, a folder or the hub."""
