"""Predictions for every window, over all ranks, and their score.

A run on many ranks needs only `world.gather` here: every rank's value, on every rank.
"""

from dataclasses import dataclass

import numpy as np
import torch

from common.data.packing import pack, prefetch
from common.data.plan import evaluation_chunks
from common.model.span import pad_logits, window_losses
from common.scoring import metrics
from common.scoring.answers import Answers, best_spans, decide

LARGE = 1e9  # in place of an infinite logit


@torch.no_grad()
def predict(model, features, limits, world, after_pass=None):
    """Run `model` over all windows and search the best spans of each on the device; all ranks take part.

    limits: has eval_tokens (of a pass), max_answer_tokens and n_best (spans of a window), as the arguments do. Whole
    chunks are dealt to the ranks. Every rank makes the same number of passes, and calls after_pass(tokens of all ranks)
    after each. Returns arrays over all windows in order, the same on every rank: loss [W] (nan without a label),
    null [W, 2], and the spans: start_logit, end_logit (-inf where there are fewer), start, end, each [W, n_best].
    """
    model.eval()
    device, lengths = world.device, features.lengths  # once: the property computes them anew each time
    chunks = evaluation_chunks(lengths, max(limits.eval_tokens, features.max_length))
    passes = -(-len(chunks) // world.size)
    mine = [chunks[i] if i < len(chunks) else [] for i in range(world.rank, passes * world.size, world.size)]
    batches = ([pack(features, windows)] for windows in mine)
    context_at = torch.from_numpy(np.array(features.context_at)).to(device)
    context_end = context_at + torch.from_numpy(np.array(features.context_tokens)).to(device)
    results = []
    for windows, (batch,) in zip(mine, prefetch(batches, device), strict=True):
        batch = batch.to(device)
        results.append(search_batch(model, batch, context_at, context_end, limits))  # on the device: nothing waits
        if after_pass:
            after_pass(int(lengths[windows].sum()) * world.size if len(windows) else 0)
    outputs = {name: torch.cat([result[name] for result in results]).cpu().numpy() for name in results[0]}
    keep = outputs["window"] >= 0
    parts = world.gather({name: array[keep] for name, array in outputs.items()})
    outputs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(outputs.pop("window"))
    model.train()
    return {name: array[order] for name, array in outputs.items()}


def search_batch(model, batch, context_at, context_end, limits):
    """What `predict` returns, of one PackedBatch, as tensors on its device; also window, the windows' numbers.

    context_at, context_end: int32 [W], first context token of each window and one past its last.
    """
    start_logits, end_logits = model(batch)
    loss = window_losses(start_logits, end_logits, batch)
    start_logits = pad_logits(start_logits, batch.cu_seqlens, batch.longest)
    end_logits = pad_logits(end_logits, batch.cu_seqlens, batch.longest)
    real, window = batch.window >= 0, batch.window.clamp(min=0)
    begin = torch.where(real, context_at[window], 0)
    finish = torch.where(real, context_end[window], 0)
    longest, n_best = limits.max_answer_tokens, limits.n_best
    start, end, exists = best_spans(start_logits, end_logits, begin, finish, longest, n_best)
    return {
        "window": batch.window,
        "loss": torch.where(batch.weight > 0, loss, torch.nan),
        "null": torch.stack([start_logits[:, 0], end_logits[:, 0]], dim=1),
        "start_logit": torch.where(exists, start_logits.gather(1, start), -torch.inf),
        "end_logit": torch.where(exists, end_logits.gather(1, end), -torch.inf),
        "start": start.int(),  # half of what the ranks would exchange
        "end": end.int(),
    }


def find_answers(outputs, features, frame):
    """The Answers in the outputs of `predict` to the questions of `frame`."""
    exists = np.isfinite(outputs["start_logit"])
    window = np.broadcast_to(np.arange(len(exists))[:, None], exists.shape)[exists]
    first, past = np.zeros((2, *exists.shape), np.int64)
    first[exists], past[exists] = features.characters(window, outputs["start"][exists], outputs["end"][exists])
    null = np.nan_to_num(outputs["null"], nan=0.0, posinf=LARGE, neginf=-LARGE)  # a broken model's: no JSON
    spans = outputs["start_logit"], outputs["end_logit"], first, past
    return Answers(list(frame["id"]), list(frame["context"]), np.array(features.question), null, *spans)


def gold_texts(frame):
    """{id: the texts of all gold answers}, in the order of the data."""
    return {key: [text for text, _ in golds] for key, golds in zip(frame["id"], frame["answers"], strict=True)}


def official(gold, predictions, version, odds=None, scores=None):
    """The official figures under one set of names for both versions: exact and f1, and what 2.0 adds."""
    figures = metrics.evaluate(gold, predictions, version, na_probs=odds, scores=scores)
    if "exact_match" in figures:
        figures["exact"] = figures.pop("exact_match")
    return figures


def empty_score(data):
    """(exact, F1) of answering nothing to every question of `data` (SquadData): what a useful model must beat."""
    gold = gold_texts(data.frame)
    figures = official(gold, dict.fromkeys(gold, ""), data.version)
    return figures["exact"], figures["f1"]


def score_texts(gold, texts, version, world):
    """{id: (exact, F1)} of {id: text}. Each rank scores its share; all ranks take part and get all scores."""
    ids = list(gold)
    mine = [metrics.score_answer(texts[key], gold[key], version) for key in ids[world.rank :: world.size]]
    scores = np.zeros((len(ids), 2))
    for rank, part in enumerate(world.gather(np.array(mine).reshape(-1, 2))):
        scores[rank :: world.size] = part
    return dict(zip(ids, scores.tolist(), strict=True))


@dataclass
class Evaluation:
    """What evaluating one question set gave.

    figures: exact, f1 (per cent), dev_loss, empty (predictions without text), questions, threshold; where some
    questions are unanswerable also the official HasAns_* and NoAns_* figures, and optimistic_f1 and
    optimistic_threshold: the best that a threshold tuned on these very questions could do.
    predictions: {id: text}. answers: all Answers. gold: {id: texts}. scores: {id: (exact, F1)} of the best texts.
    """

    figures: dict
    predictions: dict
    answers: Answers
    gold: dict
    scores: dict

    def __str__(self):
        figures = self.figures
        text = f"EM {figures['exact']:.2f}, F1 {figures['f1']:.2f}"
        if figures["dev_loss"] is not None:
            text += f", loss {figures['dev_loss']:.4f}"
        text += f", {figures['empty']} of {figures['questions']} answers empty"
        if "HasAns_f1" in figures and "NoAns_f1" in figures:
            text += f" (F1 with answer {figures['HasAns_f1']:.2f}, without {figures['NoAns_f1']:.2f})"
        if "optimistic_f1" in figures:
            text += f"; threshold {figures['threshold']:.3f}"
            text += f" (the best for these very questions, optimistic: F1 {figures['optimistic_f1']:.2f}"
            text += f" at {figures['optimistic_threshold']:.3f})"
        return text


def evaluate(model, features, data, limits, world, threshold, after_pass=None):
    """Predict, pool and score the questions of `data` (SquadData); all ranks take part and get the same Evaluation.

    limits, after_pass: see `predict`. threshold: of the null odds; None for a model trained on v1.1, which never
    abstains.
    """
    outputs = predict(model, features, limits, world, after_pass)
    answers, gold, rule = find_answers(outputs, features, data.frame), gold_texts(data.frame), data.version
    texts, predictions = decide(answers.best, None), decide(answers.best, threshold)
    scores = score_texts(gold, texts, rule, world)
    abstained = [key for key in gold if predictions[key] != texts[key]]
    decided = scores | {key: metrics.score_answer("", gold[key], rule) for key in abstained}
    loss = outputs["loss"][np.array(features.start) >= 0]
    figures = official(gold, predictions, rule, scores=decided)
    figures |= {
        "dev_loss": float(loss.mean()) if len(loss) else None,
        "empty": sum(not text for text in predictions.values()),
        "questions": len(gold),
        "threshold": threshold,
    }
    if threshold is not None and not all(gold.values()):
        odds = {key: odds for key, (_, odds) in answers.best.items()}
        tuned = official(gold, texts, rule, odds, scores)
        figures |= {"optimistic_f1": tuned["best_f1"], "optimistic_threshold": tuned["best_f1_thresh"]}
    return Evaluation(figures, predictions, answers, gold, scores)
