"""What an answer has to look like: JSON schemas, regular expressions and grammars, compiled into token masks."""
