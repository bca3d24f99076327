"""Which experts of later layers are fetched before their gate."""
