"""What a replay reports: counters, the files they are stored in, and their readers. Nothing here runs an engine."""
