"""Drafters: what drafts the trees, how drafters are loaded, and which drafter serves a call."""
