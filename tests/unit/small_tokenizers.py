"""A transformers tokenizer of bytes and a few special tokens, written to a folder, and chat templates of the kinds found in use."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>")
TURN_END = SPECIALS.index("<turn|>")

HEAD = "{{ bos_token }}{% if tools %}<|turn>tools\n{{ tools | tojson }}<turn|>\n{% endif %}{% for m in messages %}<|turn>{{ m.role }}\n"
PLAIN = HEAD + "{{ m.content }}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>assistant\n{% endif %}"
TAGGED = HEAD + (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<turn|>{% endgeneration %}{% else %}{{ m.content }}<turn|>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|turn>assistant\n{% endif %}")
# The generation prompt closes an empty block that answers do not have; answers with reasoning have it with their thoughts inside.
THINKING = HEAD + (
    "{% if m.reasoning %}<|channel>thought\n{{ m.reasoning }}<channel|>{% endif %}{{ m.content }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>assistant\n<|channel>thought\n<channel|>{% endif %}")


def save_tokenizer(folder: Path, template: str | None = PLAIN, *, merges: tuple[tuple[str, str], ...] = (), eos: str | None = "<turn|>",
                   pad: str | None = "<pad>") -> str:
    """Write the tokenizer and return the folder. A token is a special, a byte, or one of the merges (in GPT-2's byte letters)."""
    words = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token=eos, pad_token=pad,
                                   additional_special_tokens=list(SPECIALS[3:]))
    fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder)
