"""The fast tokenizer of a model, its errors, and how it joins a question and a context."""

import os
from contextlib import contextmanager
from dataclasses import dataclass

from common.errors import UserError, shorten


@dataclass
class Template:
    """The special tokens around a question and a context: prefix question middle context suffix."""

    prefix: list
    middle: list
    suffix: list
    token_type: int  # of the context

    @property
    def specials(self):
        return len(self.prefix) + len(self.middle) + len(self.suffix)


def load_tokenizer(name):
    """The fast tokenizer of a model name or folder, from the disk only, without truncation and padding of its own."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        words = len(tokenizer) - len(tokenizer.all_special_ids)
    except BaseException as error:
        raise tokenizer_error(error, f"{name}: no usable tokenizer there") from None
    if words <= 0:
        raise UserError(f"{name}: its tokenizer knows no words; tokenizer.json or vocab.txt is missing")
    if not tokenizer.is_fast:
        raise UserError(f"{name}: has no fast tokenizer (tokenizer.json); character positions need one")
    # Some folders ship a truncation to 128 tokens, which would cut every context in silence.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    with quiet_panics():
        encode(tokenizer, "encode", "a", "a")
    return tokenizer


def tokenizer_error(error, what):
    """The UserError for what the tokenizers library raises: bare Exceptions, and panics, which are none."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        return error
    return UserError(f"{what} ({shorten(' '.join(str(error).split()), 160)}); use another model folder")


@contextmanager
def quiet_panics():
    """Silence what Rust writes to stderr by itself before a panic arrives as an exception."""
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def encode(tokenizer, function, *arguments, **named):
    """What a function of the fast tokenizer gives; UserError where the tokenizer is unable to."""
    try:
        return getattr(tokenizer.backend_tokenizer, function)(*arguments, **named)
    except BaseException as error:  # an unknown word without an [UNK], for one
        raise tokenizer_error(error, f"{tokenizer.name_or_path}: its tokenizer fails") from None


def vocabulary_size(tokenizer):
    """The size of the vocabulary that the tokenizer's ids need: one more than the largest of them."""
    pair = encode(tokenizer, "encode", "a", "a")  # special tokens may have any ids
    return 1 + max(*tokenizer.get_vocab().values(), *pair.ids)


def read_template(tokenizer):
    """How `tokenizer` joins a question and a context, read off an example."""
    example = encode(tokenizer, "encode", "a", "a")
    sides = example.sequence_ids
    if 0 not in sides or 1 not in sides or sides[0] is not None:
        raise UserError(
            "this tokenizer does not begin a pair with a special token such as [CLS]; use a BERT-like model"
        )
    question_at, context_at = sides.index(0), sides.index(1)
    if example.type_ids[context_at] > 1:
        raise UserError("this tokenizer gives a context a token type beyond 0 and 1; use a BERT-like model")
    question_end = max(i for i, side in enumerate(sides) if side == 0) + 1
    context_end = max(i for i, side in enumerate(sides) if side == 1) + 1
    return Template(
        prefix=example.ids[:question_at],
        middle=example.ids[question_end:context_at],
        suffix=example.ids[context_end:],
        token_type=example.type_ids[context_at],
    )


def question_limit(max_length, overlap, specials, positions=None):
    """The most question tokens a window takes, so that a piece of context always fits beside them.

    A window must hold the special tokens, the overlap and at least an eighth of new context.
    positions: the longest input of the model, if it has a limit. UserError for settings that cannot work.
    """
    if positions and max_length > positions:
        raise UserError(f"--max-length {max_length} is more than the {positions} tokens that the model can take")
    if overlap < 0:
        raise UserError(f"--overlap {overlap}: must be 0 or more tokens")
    limit = min(max_length // 2, max_length - specials - overlap - max_length // 8)
    if max_length < 32 or limit < max_length // 8:
        largest = max_length - specials - 2 * (max_length // 8)
        raise UserError(
            f"--max-length {max_length} with --overlap {overlap} leaves no room for a question and new context; "
            + (f"use an overlap of at most {largest}" if max_length >= 32 else "use at least --max-length 32")
        )
    return limit
