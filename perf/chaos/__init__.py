"""Chaos: a deployment serves known answers while its processes are killed and stopped, and clients misbehave."""
