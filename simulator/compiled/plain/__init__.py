"""The compiled engine's short way through worlds that ask for nothing unusual."""
