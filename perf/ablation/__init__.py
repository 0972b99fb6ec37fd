"""What each design decision brings; see `perf.ablation.__main__`."""
