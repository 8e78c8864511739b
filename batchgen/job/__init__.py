"""The job file: its models, how it is loaded and checked, and its fingerprint."""
