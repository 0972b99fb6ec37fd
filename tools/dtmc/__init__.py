"""Tunes delayed batching: the exact Markov model of arXiv 2610.12242, section 3, its search and its application.

profile    the deployment profile, shared with the profiler and the simulator
network    a profile on the time grid; hand-off delays as stations
dynamics, scatter    the rules of one transition, on arrays of states
codec, chain, stationary, solve    every reachable state, the sparse chain, its long run, the measures
sampling, race, search    random walks, the race between threshold vectors, the best one
sweep      throughput along each threshold, and its plot
cli        command line; `apply` has tools.build_repository write the result
"""
