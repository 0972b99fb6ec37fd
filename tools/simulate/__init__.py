"""Discrete-event simulation of a deployment with the production scheduler; see `simulate`."""

from tools.simulate.meter import Step
from tools.simulate.result import Latency, SimulationResult
from tools.simulate.run import simulate, throughput

__all__ = ["Latency", "SimulationResult", "Step", "simulate", "throughput"]
