"""Tools of the tests, some of which other projects can run."""
