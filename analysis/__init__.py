"""Tables, figures and statistics from result files and traces; never runs an engine."""
