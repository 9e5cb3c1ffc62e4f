"""The budget: how many nodes each round drafts and verifies."""
