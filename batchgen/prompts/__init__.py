"""From a row to token ids and back to text: templates, chat templates, tokenizers, over-long rows, stop strings."""
