"""What a person sees of a running job: progress, counters, the report at the end."""
