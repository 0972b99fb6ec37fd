"""Measurements of the real server with emulated engines, beside what the Markov model predicts."""
