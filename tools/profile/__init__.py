"""A deployment's profile from the metrics of a running server."""
