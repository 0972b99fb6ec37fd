"""Model repositories from one YAML file: `python -m tools.build_repository`."""
