"""Text from a trained model: prompts in, completions out; scores; pictures of a canvas settling."""
