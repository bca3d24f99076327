"""A model becomes a trace: the only folder that may import torch or transformers."""

import logging

# transformers imports torchao where that is installed, and both then warn of kernels that nothing here uses
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
