"""Emulated models: a repository from step times and a policy, or from a profile, and a server of it."""
