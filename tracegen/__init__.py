"""A model becomes a trace: the only folder that may import torch or transformers."""

import logging

if __name__ != "moereplay.tracegen":
    raise ImportError("import this package as moereplay.tracegen: a second copy of its modules would be loaded")

# transformers imports torchao where that is installed, and both then warn of kernels that nothing here uses
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
