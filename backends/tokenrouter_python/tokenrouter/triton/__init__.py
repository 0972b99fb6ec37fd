"""Everything that touches `triton_python_backend_utils`; the rest of the package runs without Triton."""
