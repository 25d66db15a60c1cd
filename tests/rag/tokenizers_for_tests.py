"""A byte-level tokenizer without merges, with control tokens and a chat template of one's choice."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('No system role') }}"
    "{% elif m['role'] == 'user' %}[U]{{ m['content'] }}"
    "{% else %}[A]{{ m['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[A]{% endif %}"
)
WITH_CLOCK = "Today is {{ strftime_now('%d %b %Y') }}.\n" + CHATML
THINKING = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
)


def byte_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are bytes, then the markers. "<think>" is added without being marked special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "</s>"])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=template, clean_up_tokenization_spaces=False,
    )  # fmt: skip
