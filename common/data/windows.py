"""Questions and contexts as windows of token ids with answer labels.

A window is [CLS] question [SEP] piece of the context [SEP]. A context longer than one window is cut into several that
share `overlap` tokens. Each context and each question is tokenised once, on all granted cores; the windows are then
assembled with numpy.
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np

from common.data.tokenizer import encode, question_limit, read_template
from common.errors import UserError

ARRAYS = {  # what one cache folder holds
    "input_ids": np.int32,  # [T] tokens of all windows, end to end
    "offsets": np.int64,  # [W + 1] where each window begins in input_ids
    "question": np.int32,  # [W] row of the question in the frame
    "context_at": np.int32,  # [W] position in the window of its first context token
    "context_tokens": np.int32,  # [W] number of context tokens in the window
    "first_token": np.int64,  # [W] where the window's context begins in char_start and char_end
    "start": np.int32,  # [W] label: position in the window; 0 ([CLS]) for no answer here, -1 for no usable label
    "end": np.int32,  # [W]
    "char_start": np.int32,  # [C] first character of each context token
    "char_end": np.int32,  # [C] one past its last character
}


@dataclass
class Features:
    """The windows of one question set; the arrays are as ARRAYS says, memory-mapped from the cache.

    token_type: the type of the context's tokens (1 for BERT, 0 for RoBERTa); the question's tokens have type 0.
    max_length: the longest window allowed, in tokens. pad_id: the id that fills unused places.
    meta: what the cache's meta.json holds: version, questions, unanswerable, windows, tokens, faults.
    """

    input_ids: np.ndarray
    offsets: np.ndarray
    question: np.ndarray
    context_at: np.ndarray
    context_tokens: np.ndarray
    first_token: np.ndarray
    start: np.ndarray
    end: np.ndarray
    char_start: np.ndarray
    char_end: np.ndarray
    token_type: int
    pad_id: int
    max_length: int
    meta: dict

    @property
    def lengths(self):
        """Tokens in each window, int64 [W]."""
        return np.diff(self.offsets)

    def characters(self, window, start, end):
        """Character spans in the context of token spans in windows.

        window, start, end: int [N]; start and end are positions in the window, both in its context.
        Returns two int [N]: first character, one past the last.
        """
        first = self.first_token[window] - self.context_at[window]
        return self.char_start[first + start], self.char_end[first + end]


def build(data, tokenizer, max_length, overlap, log=lambda text: None):
    """Tokenise `data` (SquadData) into Features (arrays in memory)."""
    frame = data.frame
    template = read_template(tokenizer)
    limit = question_limit(max_length, overlap, template.specials)
    log(f"tokenising {len(frame):,} questions of {data.path}")

    contexts = tokenize_contexts(tokenizer, frame["context"])
    question_ids, question_count = tokenize_questions(tokenizer, list(frame["question"]))
    question_first = exclusive_sum(question_count)
    too_long = np.flatnonzero(question_count > limit)
    faults = data.faults.values.tolist()
    faults += [[frame["id"][i], "long question", f"{question_count[i]} tokens, {limit} used"] for i in too_long]
    question_count = np.minimum(question_count, limit)

    question, piece_start, piece = cut_windows(
        contexts.count[contexts.paragraph], max_length - template.specials - question_count, overlap
    )
    count = question_count[question]
    context_at = len(template.prefix) + count + len(template.middle)
    first_token = contexts.first[contexts.paragraph[question]] + piece_start
    offsets = np.concatenate([[0], np.cumsum(context_at + piece + len(template.suffix))])
    segments = [
        (len(template.prefix), question_ids, question_first[question], count),
        (context_at, contexts.ids, first_token, piece),
    ]
    start, end, dropped = label_windows(frame, contexts, question, piece_start, piece, context_at)
    arrays = dict(
        input_ids=join_tokens(template, offsets, segments),
        offsets=offsets,
        question=question,
        context_at=context_at,
        context_tokens=piece,
        first_token=first_token,
        start=start,
        end=end,
        char_start=contexts.char_start,
        char_end=contexts.char_end,
    )
    arrays = {name: arrays[name].astype(kind, copy=False) for name, kind in ARRAYS.items()}
    meta = {
        "version": data.version,
        "questions": len(frame),
        "unanswerable": int(frame["is_impossible"].sum()),
        "windows": len(question),
        "tokens": int(offsets[-1]),
        "faults": faults + [[frame["id"][i], "no tokens", ""] for i in dropped],
    }
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return Features(**arrays, token_type=template.token_type, pad_id=pad_id, max_length=max_length, meta=meta)


def cut_windows(tokens, room, overlap):
    """The windows of all questions: how many each has, and which piece of the context each holds.

    tokens: int [Q], of each question's context. room: int [Q], context tokens in a full window of it.
    Returns int [W] each: the question, where the piece begins in the context, its tokens.
    """
    stride = room - overlap
    num_windows = 1 + np.maximum(0, -(-(tokens - room) // stride))
    question = np.repeat(np.arange(len(tokens)), num_windows)
    number = np.arange(len(question)) - np.repeat(exclusive_sum(num_windows), num_windows)
    piece_start = number * stride[question]
    return question, piece_start, np.minimum(room[question], tokens[question] - piece_start)


def join_tokens(template, offsets, segments):
    """The token ids of all windows end to end, int32 [T]: each part is written for all windows at once.

    segments: of the question and of the context: (position in the window, token ids, first of them for each window,
    how many). The template's own tokens stand before, between and after.
    """
    base, input_ids = offsets[:-1], np.empty(offsets[-1], np.int32)
    for position, ids, first, count in segments:
        input_ids[spread(base + position, count)] = ids[spread(first, count)]
    context_at, *_, piece = segments[1]
    own = [(0, template.prefix), (context_at - len(template.middle), template.middle)]
    for position, tokens in [*own, (context_at + piece, template.suffix)]:
        for i, token in enumerate(tokens):
            input_ids[base + position + i] = token
    return input_ids


def label_windows(frame, contexts, question, piece_start, piece, context_at):
    """The tokens of each question's first usable answer, in each window that holds all of them.

    Returns start and end, int [W]: positions in the window; 0 ([CLS]) for no answer here, -1 for no usable label. Then
    the rows of questions whose answer the tokenizer drops whole.
    """
    first, last, located = label_tokens(frame, contexts)
    usable = located & (first <= last)
    first, last = first[question] - piece_start, last[question] - piece_start
    inside = usable[question] & (first >= 0) & (last < piece)
    start = np.where(inside, context_at + first, 0)
    end = np.where(inside, context_at + last, 0)
    no_label = ~usable & ~frame["is_impossible"].to_numpy()
    start[no_label[question]] = end[no_label[question]] = -1
    return start, end, np.flatnonzero(no_label & located)


def number_distinct(items):
    """For each item the number of its value, int64 [N], and the values in the order of their first appearance.

    pandas 2 takes strings for equal that differ only after a NUL, so that its factorize cannot be used.
    """
    numbers = {}
    return np.array([numbers.setdefault(item, len(numbers)) for item in items], np.int64), list(numbers)


def exclusive_sum(counts):
    """[0, c0, c0 + c1, …], int64, as long as `counts`."""
    return np.concatenate([[0], np.cumsum(counts[:-1], dtype=np.int64)]).astype(np.int64)[: len(counts)]


def spread(starts, counts):
    """The ranges start, start + 1, …, start + count - 1 of all pairs, end to end."""
    return np.repeat(starts - exclusive_sum(counts), counts) + np.arange(counts.sum())


def in_batches(items, size=4096):
    """Slices of `items`: an Encoding object takes much more memory than the numbers we keep."""
    return (items[i : i + size] for i in range(0, len(items), size))


def tokenize_questions(tokenizer, questions):
    """Token ids of all questions end to end (int32) and the number of tokens of each (int64)."""
    ids = []
    for batch in in_batches(questions):
        encodings = encode(tokenizer, "encode_batch_fast", batch, add_special_tokens=False)
        ids += [encoding.ids for encoding in encodings]
    counts = np.array([len(one) for one in ids], np.int64)
    return np.fromiter(chain.from_iterable(ids), np.int32, counts.sum()), counts


@dataclass
class Contexts:
    """The distinct contexts of a question set, tokenised.

    paragraph: int [Q], the context of each question. texts: the contexts. ids: int32 [C], all their tokens end to end.
    char_start, char_end: int32 [C], first and past-last character of each token. count, first: int [contexts], tokens
    of each and where they begin.
    """

    paragraph: np.ndarray
    texts: list
    ids: np.ndarray
    char_start: np.ndarray
    char_end: np.ndarray
    count: np.ndarray
    first: np.ndarray


def tokenize_contexts(tokenizer, column):
    """The Contexts in a column of texts; each distinct one is tokenised once."""
    paragraph, contexts = number_distinct(column)
    ids, spans, counts = [], [], []
    for batch in in_batches(contexts):
        for encoding in encode(tokenizer, "encode_batch", batch, add_special_tokens=False):
            counts.append(len(encoding))
            ids.append(np.array(encoding.ids, np.int32))
            flat = chain.from_iterable(encoding.offsets)
            spans.append(np.fromiter(flat, np.int64, 2 * len(encoding)).reshape(-1, 2))
    counts = np.array(counts, np.int64)
    spans = np.concatenate(spans)
    shift = np.repeat(positions_in_text(contexts), counts)
    start, end = tidy_spans("\n".join(contexts), spans[:, 0] + shift, spans[:, 1] + shift)
    size = np.repeat(np.array([len(context) for context in contexts], np.int64), counts)
    start, end = np.minimum(start - shift, size), np.maximum(end - shift, 0)  # tokens of blanks may point beyond
    start, end = start.astype(np.int32), end.astype(np.int32)
    return Contexts(paragraph, contexts, np.concatenate(ids), start, end, counts, exclusive_sum(counts))


def positions_in_text(contexts):
    """Where each context begins, int64, in all of them joined by a line end each."""
    return exclusive_sum(np.array([len(context) + 1 for context in contexts], np.int64))


def tidy_spans(text, start, end):
    """Character spans of tokens without blanks at their ends and with the characters that the tokenizer dropped.

    Uncased BERT drops combining marks: 'e' + U+0301 becomes the token 'e' with a span of one character. Decoded text
    must keep the mark, so a character that belongs to no token goes to the token that it touches, the one before it if
    there are two.
    Of a token of blanks alone the start is that of the text after it and the end that of the text before, so that an
    answer that begins or ends with it has no blanks at its ends.
    text: all contexts, with blanks between them; start, end: int64 [C], positions in `text`, which never fall from one
    token to the next. Returns start, end, which never fall either.
    """
    code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    present = np.zeros(0x110000, bool)  # one look at each distinct character, then a table for all of them
    present[code_points] = True
    is_blank = np.zeros(0x110000, bool)
    for point in np.flatnonzero(present).tolist():
        is_blank[point] = chr(point).isspace()
    blank = np.append(is_blank[code_points], True)
    start, end = start.copy(), end.copy()

    def move(place, step, limit, over_blanks):
        """Move each of `place` towards its limit, over blanks only or over other characters only."""
        moving = np.flatnonzero(step * (limit - place) > 0)  # few: most tokens touch their neighbours or end at blanks
        while len(moving):
            passed = place[moving] if step > 0 else place[moving] - 1
            moving = moving[blank[passed] == over_blanks]
            place[moving] += step
            moving = moving[place[moving] != limit[moving]]

    move(start, 1, np.full_like(start, len(code_points)), over_blanks=True)
    move(end, -1, np.zeros_like(end), over_blanks=True)
    move(end, 1, np.append(start[1:], len(code_points)), over_blanks=False)
    move(start, -1, np.append(0, end[:-1]), over_blanks=False)
    return start, end


def label_tokens(frame, contexts):
    """The tokens that overlap the non-blank characters of each question's first usable answer.

    Returns first and last token, int64 [Q], counted from the context's first token (first is after last where the
    tokenizer drops the whole answer), and whether the question has a usable answer, bool [Q].
    """
    begin, finish = np.zeros((2, len(frame)), np.int64)
    located = np.zeros(len(frame), bool)
    for row, answers in enumerate(frame["answers"]):
        for text, place in answers:
            if place >= 0:
                begin[row] = place + len(text) - len(text.lstrip())
                finish[row] = place + len(text.rstrip())
                located[row] = True
                break
    # One search for all contexts: their characters are numbered on from context to context.
    text_at, paragraph = positions_in_text(contexts.texts), contexts.paragraph
    shift = np.repeat(text_at, contexts.count)
    begin, finish = begin + text_at[paragraph], finish + text_at[paragraph]
    # The first token that ends after the answer begins, and the last that starts before it ends.
    first = np.searchsorted(contexts.char_end + shift, begin, side="right")
    last = np.searchsorted(contexts.char_start + shift, finish, side="left") - 1
    origin = contexts.first[paragraph]
    return first - origin, last - origin, located


def trainable_windows(features):
    """Numbers of the windows with a label, int64 [N]; UserError if there is none to train on."""
    windows = np.flatnonzero(features.start >= 0)
    if not len(windows):
        raise UserError("no question has a usable answer: nothing to train on (`python -m tools.audit FILE` says why)")
    return windows
