"""Malformed input from generators with a seed: requests over every protocol, messages to the channel, and the codec."""
