"""Libraries of published traces: a folder, or a data set of the Hugging Face hub, with an index of what it holds."""
