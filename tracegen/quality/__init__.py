"""What policies cost a model: perplexity and tasks of lm-evaluation-harness, read by a model under policies."""
