"""An engine without a model: known step times, scripted tokens."""
