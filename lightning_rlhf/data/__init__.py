"""Prompts: where they come from, and which rank sees which."""
