"""The paper's figures beside the Markov model and the running server with emulated engines; see `__main__`."""
