"""The corpus and tokenizer that ship with the package. See README.md here for source and licence."""
