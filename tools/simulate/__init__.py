"""Discrete-event simulation of a deployment with the production scheduler; see `run.simulate`."""
