"""A language model that answers in words: SmolLM2-135M from a wheel, and a shallower one distilled from it."""
