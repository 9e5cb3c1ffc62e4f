"""The target: the model that generates, how it verifies trees in one forward, and how it commits paths."""
