"""Speculative hand-off beside plain routing, with emulated engines; see `perf.speculation.__main__`."""
