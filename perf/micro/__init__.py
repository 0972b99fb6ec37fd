"""What single parts cost: hand-offs, routers, emulated steps, the threshold search; and the machine they ran on."""
