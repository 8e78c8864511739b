"""Rows in and rows out: sources, the output folder, storage. Knows nothing of prompts, tokens or models."""
