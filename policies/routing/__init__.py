"""Which experts a token uses."""
