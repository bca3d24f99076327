"""hqq, bitsandbytes and torchao as quantisers of moereplay: a file each, found by entry points."""
