"""The entry model: admits requests, owns their token history, relays hand-offs, turns tokens into text."""
