"""Quality under policies: perplexity and tasks of lm-evaluation-harness, answered by a model under a policy set."""
