"""Results become answers: reads result files and traces, never runs an engine."""
