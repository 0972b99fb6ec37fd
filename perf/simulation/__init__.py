"""Discrete-event simulation of a deployment with the production scheduler; see `simulate`."""

from perf.simulation.meter import Step
from perf.simulation.result import Latency, SimulationResult
from perf.simulation.run import simulate, throughput

__all__ = ["Latency", "SimulationResult", "Step", "simulate", "throughput"]
