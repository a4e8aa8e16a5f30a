"""What all ways are measured on: the same windows and the same network."""

import torch

from common.features import load_tokenizer, prepare, trainable_windows
from common.model import find_model, minilm_folder
from common.squad import QuestionSet, default_files, find_file

SHAPES = {  # BERT as published
    "bert-base": {},
    "bert-large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
}


def add_workload(parser):
    """The options that say what is trained on what."""
    parser.add_argument(
        "--shape", default="bert-base", help=f"{', '.join(SHAPES)}: random weights; minilm, or a model folder: its own"
    )
    parser.add_argument("--train-file", help="default: SQuAD v1.1 if fetched, else the sample")
    parser.add_argument("--tokenizer", help="model folder; default: the scripts' default model")
    parser.add_argument("--cache-dir", default="cache")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")


def load_windows(args, log=print, builds=True):
    """(QuestionSet, tokenizer, Features): windows of 384 tokens at most that share 128, cached on disk.

    builds: see common.features.prepare.
    """
    tokenizer = load_tokenizer(find_model(args.tokenizer)[0])
    questions = QuestionSet(find_file(args.train_file or default_files()[0]))
    features = prepare(questions, tokenizer, 384, 128, args.cache_dir, log, builds)
    trainable_windows(features)  # refuses a file without any
    return questions, tokenizer, features


def network_folder(shape):
    """The model folder or cached name that --shape means; None for random weights, UserError if it is not here."""
    if shape in SHAPES:
        return None
    return minilm_folder() if shape == "minilm" else find_model(shape)[0]


def load_network(shape, seed=0, **changes):
    """A question-answering network in fp32 on the CPU; shape: see --shape; changes: of its configuration.

    seed: of the weights that are not pretrained, so that every process has the same.
    """
    import transformers
    from transformers import AutoModelForQuestionAnswering, BertConfig, BertForQuestionAnswering

    torch.manual_seed(seed)
    folder = network_folder(shape)
    if folder is None:
        return BertForQuestionAnswering(BertConfig(**SHAPES[shape], **changes))
    transformers.logging.set_verbosity_error()  # it would report the new head at length
    transformers.logging.disable_progress_bar()
    return AutoModelForQuestionAnswering.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, **changes
    )
