"""What is in a SQuAD file and how well it can be learnt from: counts, faults, windows and the label oracle.

    python -m tools.audit FILE [--model M] [--json]

The label oracle is the official score of answering each question with the text of its own labelled tokens: what is
missing from 100 is lost to the labels before any training.
"""

import json

import numpy as np

from common import errors
from common.data.squad import FAULTS, fault_counts, fault_frame, read_squad
from common.data.tokenizer import load_tokenizer, question_limit
from common.data.windows import build
from common.model.finding import find_model, load_config, positions
from common.scoring.evaluation import gold_texts, official


def oracle_predictions(features, frame):
    """({id: text of the question's own label}, ids of answerable questions without a labelled window)."""
    labelled = np.flatnonzero(features.start > 0)
    first, past = features.characters(labelled, features.start[labelled], features.end[labelled])
    texts = [""] * len(frame)
    contexts = list(frame["context"])
    # Backwards, so that of several windows which hold the answer the first one stays.
    for window, begin, finish in zip(labelled[::-1].tolist(), first[::-1].tolist(), past[::-1].tolist(), strict=True):
        row = int(features.question[window])
        texts[row] = contexts[row][begin:finish]
    has_label = np.zeros(len(frame), bool)
    has_label[features.question[labelled]] = True
    answerable = ~frame["is_impossible"].to_numpy()
    return dict(zip(frame["id"], texts, strict=True)), list(frame["id"][answerable & ~has_label])


def audit(data, tokenizer, max_length, overlap):
    """The figures of one SquadData as a dict; see the table that `main` prints for their meaning."""
    frame = data.frame
    features = build(data, tokenizer, max_length, overlap)
    lengths = features.lengths
    predictions, unlabelled = oracle_predictions(features, frame)
    oracle = official(gold_texts(frame), predictions, data.version)
    faults = fault_frame(features.meta["faults"])
    counts = fault_counts(faults)
    percentiles = {f"length_p{p}": int(np.percentile(lengths, p)) for p in (0, 25, 50, 75, 95, 100)}
    return {
        "file": data.path,
        "version": data.version,
        # Sets, not pandas' own counts: pandas 2 mixes strings up that hold NUL.
        "articles": len(set(frame["title"])),
        "contexts": len(set(frame["context"])),
        "questions": len(frame),
        "unanswerable": int(frame["is_impossible"].sum()),
        "answers_per_question": float(frame["answers"].map(len).mean()),
        "misaligned": counts.get("misaligned", 0),
        "repaired": sum(counts.get(kind, 0) for kind in ("misaligned", "surrogate", "long question", "contradiction")),
        "unusable": counts.get("unusable", 0),
        "faults": counts,
        "fault_ids": {kind: list(dict.fromkeys(faults["id"][faults["fault"] == kind])) for kind in counts},
        "windows": len(lengths),
        "tokens": int(lengths.sum()),
        **percentiles,
        "length_mean": float(lengths.mean()),
        "padding_waste": 1 - float(lengths.mean()) / max_length,
        "unlabelled": len(unlabelled),
        "unlabelled_ids": unlabelled,
        "oracle_exact": oracle["exact"],
        "oracle_f1": oracle["f1"],
        "max_length": max_length,
        "overlap": overlap,
    }


ROWS = [  # label, key, how it is printed
    ("questions", "questions", "{:,}"),
    ("  of them unanswerable", "unanswerable", "{:,}"),
    ("articles", "articles", "{:,}"),
    ("distinct contexts", "contexts", "{:,}"),
    ("gold answers a question", "answers_per_question", "{:.2f}"),
    ("answers not where answer_start says", "misaligned", "{:,}"),
    ("repaired faults", "repaired", "{:,}"),
    ("answers that cannot be used", "unusable", "{:,}"),
    ("windows", "windows", "{:,}"),
    ("tokens in all windows", "tokens", "{:,}"),
    ("tokens a window: mean", "length_mean", "{:.1f}"),
    ("  least", "length_p0", "{}"),
    ("  quarter", "length_p25", "{}"),
    ("  median", "length_p50", "{}"),
    ("  three quarters", "length_p75", "{}"),
    ("  95 of 100", "length_p95", "{}"),
    ("  most", "length_p100", "{}"),
    ("waste if padded to the full window", "padding_waste", "{:.1%}"),
    ("answerable, but no window is labelled", "unlabelled", "{:,}"),
    ("label oracle: exact match", "oracle_exact", "{:.3f}"),
    ("label oracle: F1", "oracle_f1", "{:.3f}"),
]


def table(figures):
    """The figures as text, with the ids of faulty questions (the first twenty of each kind)."""
    lines = [f"{figures['file']}: SQuAD {figures['version']}, windows of {figures['max_length']} tokens"]
    lines[0] += f", overlap {figures['overlap']}"
    lines += [f"  {label:<40}{form.format(figures[key]):>14}" for label, key, form in ROWS]
    listed = {f"{kind} ({FAULTS[kind]})": ids for kind, ids in figures["fault_ids"].items()}
    if figures["unlabelled_ids"]:
        listed["no labelled window"] = figures["unlabelled_ids"]
    for kind, ids in listed.items():
        shown = ", ".join(repr(one) for one in ids[:20])
        lines.append(f"  {kind}: {shown}" + (f" and {len(ids) - 20} more (--json lists all)" if len(ids) > 20 else ""))
    return "\n".join(lines)


def main():
    parser = errors.Parser(prog="python -m tools.audit", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("file", metavar="FILE", help="SQuAD JSON, v1.1 or v2.0, plain or .gz")
    parser.add_argument("--model", help="whose tokenizer; default: bert-base-uncased if it is here, else MiniLM")
    parser.add_argument("--max-length", type=int, default=384, help="tokens in a window, at most (default: 384)")
    parser.add_argument("--overlap", type=int, default=128, help="tokens that neighbours share (default: 128)")
    parser.add_argument("--json", action="store_true", help="print JSON, with all ids of faulty questions")
    args = parser.parse_args()
    data = read_squad(args.file)
    path, _ = find_model(args.model)
    question_limit(args.max_length, args.overlap, 4, positions(load_config(path)))
    figures = audit(data, load_tokenizer(path), args.max_length, args.overlap)
    print(json.dumps(figures, indent=2) if args.json else table(figures))


if __name__ == "__main__":
    errors.run(main)
