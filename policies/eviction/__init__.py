"""Which resident expert leaves."""
