"""The tokenizer of a small language: one token for each word."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token for each word; words are separated by spaces.

    Args:
        words: All different; the padding and the end-of-sequence token are put before them.

    Example:
        >>> word_tokenizer(["yes", "no"])("no yes <eos>").input_ids
        [3, 2, 1]
    """
    vocabulary = {word: number for number, word in enumerate((PAD, EOS, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)
