"""Which resident copy is evicted."""
