"""Finds, prepares, starts and stops a `tritonserver` that serves a model repository with our backend."""
