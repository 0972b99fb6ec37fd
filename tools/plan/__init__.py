"""How many replicas of which model hold given objectives, by simulation; see `search.Planner`."""
