"""Who wrote each token: recorded from a running server, replayed by emulated engines."""
