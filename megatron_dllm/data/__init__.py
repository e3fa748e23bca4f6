"""Sources of examples, tokenizers, chat templates, order and packing of rows."""
