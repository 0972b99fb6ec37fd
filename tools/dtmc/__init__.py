"""Tunes delayed batching: the exact Markov model of arXiv 2610.12242, section 3, its search and its application.

profile    the deployment profile, shared with the profiler and the simulator
network    a profile on the time grid; hand-off delays as stations
dynamics, scatter    the rules of one transition, on arrays of states
codec, chain, stationary, solve    every reachable state, the sparse chain, its long run, the measures
sampling, race, search    random walks, the race between threshold vectors, the best one
sweep      throughput along each threshold, and its plot
pbtxt, apply    the result as Triton queue policy in config.pbtxt
cli, progress   command line

This file names what other packages may use; it leaves plotting and Triton to those who import them.
"""

from tools.dtmc.errors import DtmcError, ProfileError, RepositoryError, ThresholdError, TooLarge
from tools.dtmc.network import Network, build_network
from tools.dtmc.profile import ModelProfile, Profile, dump_profile, load_profile, parse_profile, step_time_ms
from tools.dtmc.search import SearchResult, search, search_table
from tools.dtmc.solve import Solution, solve

__all__ = [
    "DtmcError",
    "ModelProfile",
    "Network",
    "Profile",
    "ProfileError",
    "RepositoryError",
    "SearchResult",
    "Solution",
    "ThresholdError",
    "TooLarge",
    "build_network",
    "dump_profile",
    "load_profile",
    "parse_profile",
    "search",
    "search_table",
    "solve",
    "step_time_ms",
]
