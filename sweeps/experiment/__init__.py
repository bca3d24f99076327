"""Read experiment files, and expand them into configurations that are all checked before the first replay."""
