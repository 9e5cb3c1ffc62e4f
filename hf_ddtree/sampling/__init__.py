"""Sampling policies: which children a node may get, and how the walk accepts them without changing the distribution."""
