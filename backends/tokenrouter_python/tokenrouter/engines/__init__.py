"""Engines execute forward passes inside a subserver: `torch`, `emulated`, and whatever implements `base.Engine`."""
