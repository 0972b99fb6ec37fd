"""A deployment on two hosts, shown on one machine: `python -m tools.hosts`, what `make hosts` calls."""
