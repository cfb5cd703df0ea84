"""A pair in a few equations, to try step policies on: cycles as events, load, acceptance and cost as traces in time."""
