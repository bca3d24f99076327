"""A model becomes a trace: the only folder that may import torch or transformers."""
