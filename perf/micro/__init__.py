"""What single parts cost: hand-offs, routers, emulated steps, the torch engine, the threshold search."""
