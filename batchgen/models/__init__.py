"""The models: a config-driven decoder, its weights and their number formats."""
