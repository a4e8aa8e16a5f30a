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
from common.scoring.answers import best_spans, decide, pool


@torch.no_grad()
def predict(model, features, limits, world, after_pass=None):
    """Run `model` over all windows and search the best spans of each on the device; all ranks take part.

    limits: has eval_tokens (of a pass), max_answer_tokens and n_best (spans of a window), as the arguments do. Whole
    chunks are dealt to the ranks. Every rank makes the same number of passes, and calls after_pass(tokens of all ranks)
    after each. Returns arrays over all windows in order, the same on every rank: loss [W] (nan without a label),
    null [W, 2], and the spans: score, start_logit, end_logit, start, end, each [W, n_best].
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
    score, start, end = best_spans(start_logits, end_logits, begin, finish, longest, n_best)
    return {
        "window": batch.window,
        "loss": torch.where(batch.weight > 0, loss, torch.nan),
        "null": torch.stack([start_logits[:, 0], end_logits[:, 0]], dim=1),
        "score": score,
        "start_logit": start_logits.gather(1, start),
        "end_logit": end_logits.gather(1, end),
        "start": start,
        "end": end,
    }


def find_answers(outputs, features, frame, can_abstain, n_best):
    """What `pool` returns, for the outputs of `predict` on the windows of `frame`."""
    spans = {name: outputs[name] for name in ("score", "start_logit", "end_logit")}
    exists = np.isfinite(outputs["score"])
    window = np.broadcast_to(np.arange(len(exists))[:, None], exists.shape)[exists]
    for name in ("first", "past"):
        spans[name] = np.zeros(exists.shape, np.int64)
    spans["first"][exists], spans["past"][exists] = features.characters(
        window, outputs["start"][exists], outputs["end"][exists]
    )
    return pool(
        list(frame["id"]),
        list(frame["context"]),
        np.array(features.question),
        outputs["null"],
        spans,
        can_abstain,
        n_best,
    )


def gold_texts(frame):
    """{id: the texts of all gold answers}, in the order of the data."""
    return {key: [text for text, _ in golds] for key, golds in zip(frame["id"], frame["answers"], strict=True)}


def official(gold, predictions, version, odds=None):
    """The official figures under one set of names for both versions: exact and f1, and what 2.0 adds."""
    figures = metrics.evaluate(gold, predictions, version, na_probs=odds)
    if "exact_match" in figures:
        figures["exact"] = figures.pop("exact_match")
    return figures


def empty_score(data):
    """(exact, F1) of answering nothing to every question of `data` (SquadData): what a useful model must beat."""
    gold = gold_texts(data.frame)
    figures = official(gold, dict.fromkeys(gold, ""), data.version)
    return figures["exact"], figures["f1"]


@dataclass
class Evaluation:
    """What evaluating one question set gave.

    figures: exact, f1 (per cent), dev_loss, empty (predictions without text), questions, threshold; where some
    questions are unanswerable also the official HasAns_* and NoAns_* figures, and optimistic_f1 and
    optimistic_threshold: the best that a threshold tuned on these very questions could do.
    predictions: {id: text}. found: see pool. gold: {id: texts}.
    """

    figures: dict
    predictions: dict
    found: dict
    gold: dict

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
    frame, gold = data.frame, gold_texts(data.frame)
    found = find_answers(outputs, features, frame, threshold is not None, limits.n_best)
    predictions = decide(found, threshold)
    loss = outputs["loss"][np.array(features.start) >= 0]
    figures = official(gold, predictions, data.version)
    figures |= {
        "dev_loss": float(loss.mean()) if len(loss) else None,
        "empty": sum(not text for text in predictions.values()),
        "questions": len(gold),
        "threshold": threshold,
    }
    if threshold is not None and not all(gold.values()):
        odds = {key: answer["null_odds"] for key, answer in found.items()}
        tuned = official(gold, decide(found, None), data.version, odds)
        figures |= {"optimistic_f1": tuned["best_f1"], "optimistic_threshold": tuned["best_f1_thresh"]}
    return Evaluation(figures, predictions, found, gold)
