"""What an offline job knows beforehand: which prompts begin alike. Their prefix tree, groups, order and counts."""
