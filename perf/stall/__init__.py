"""How long running responses stand still while something else happens: the prober, and attacks to run beside it."""
