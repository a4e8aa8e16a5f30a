"""What all benchmarks run on: the same windows and the same networks."""

import torch

from common.data.cache import prepare
from common.data.files import default_files, find_file
from common.data.splits import QuestionSet
from common.data.tokenizer import load_tokenizer
from common.model.finding import find_model

SHAPES = {  # BERT as published, the small default model, and one for tests
    "bert-base": {},
    "bert-large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
}


def add_workload(parser):
    """The options that say what is trained on what."""
    parser.add_argument("--shape", choices=SHAPES, default="bert-base", help="of the network; its weights are random")
    parser.add_argument("--train-file", help="default: SQuAD v1.1 if fetched, else the sample")
    parser.add_argument("--tokenizer", help="model folder; default: the scripts' default model")
    parser.add_argument("--cache-dir", default="cache")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")


def load_windows(args, log=print, builds=True):
    """(QuestionSet, tokenizer, Features): windows of 384 tokens at most that share 128, cached on disk.

    builds: see common.data.cache.prepare.
    """
    tokenizer = load_tokenizer(find_model(args.tokenizer)[0])
    questions = QuestionSet(find_file(args.train_file or default_files()[0]))
    return questions, tokenizer, prepare(questions, tokenizer, 384, 128, args.cache_dir, log, builds)


def build_network(shape, **changes):
    """A question-answering network in fp32 on the CPU, its weights the same in every process.

    shape: of SHAPES. changes: of its configuration.
    """
    from transformers import BertConfig, BertForQuestionAnswering

    torch.manual_seed(0)
    return BertForQuestionAnswering(BertConfig(**SHAPES[shape], **changes))
