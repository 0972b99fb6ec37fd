"""Model repositories of emulated models."""
