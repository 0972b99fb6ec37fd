"""Demo models: a small and a large language model, trained from scratch on one synthetic reasoning task."""
