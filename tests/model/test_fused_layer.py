"""The encoder layer by hand gives what transformers' gives, gradients too.

Here its kernels are plain torch, so that the layer alone is tested. tests/interpreted_kernels.py compares the real ones
with these. tests/model/test_model.py and tests/gpu run the real ones on a GPU.
"""

import collections
import importlib.util
import re
import sys
import types

import pytest
import torch
from tiny import ROOT, load_small, same_gradients, sample_features, save_network
from torch.nn.parallel import DistributedDataParallel
from torch_kernels import Kernels

from benchmarks.workload import build_network
from common.data.packing import pack
from common.model.attention import register_attention
from common.model.fused.gradients import into_buffers, keep_gradient_buffers, product
from common.model.loading import build_model, save_model, settle_attention
from common.model.precision import HALF, compile_layers, compute_in
from common.model.span import SpanModel, encoder_layers, span_loss, use_attention
from common.run import distributed
from common.run.environment import describe


@pytest.fixture
def plain_kernels(monkeypatch):
    kernels = Kernels("common.model.fused.kernels")
    monkeypatch.setitem(sys.modules, "common.model.fused.kernels", kernels)
    monkeypatch.setattr("common.model.fused.kernels", kernels, raising=False)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton" or find_spec(name))


@pytest.fixture(scope="module")
def batch():
    features, _ = sample_features(60)
    return pack(features, [1, 5, 9, 30])


@pytest.fixture(scope="module")
def other_batch():
    features, _ = sample_features(60)
    return pack(features, [2, 7, 40])


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def fused(model_type="bert", **changes):
    model = load_small(model_type, **changes)
    use_attention(model, "fused")
    return model


def loss_and_gradients(model, batch, seed=0):
    torch.manual_seed(seed)
    model.zero_grad()
    loss = span_loss(*model(batch), batch)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def vector(gradients):
    return torch.cat([grad.flatten().float() for grad in gradients.values() if grad is not None])


@pytest.mark.parametrize("model_type", ["bert", "electra", "roberta"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_it_is_the_layer(plain_kernels, batch, model_type, checkpointed):
    ours, theirs = fused(model_type), load_small(model_type)
    assert ours.attention == "fused" and all(type(one).__name__.startswith("Fused") for one in encoder_layers(ours))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    if checkpointed:
        ours.network.gradient_checkpointing_enable({"use_reentrant": False})
        ours.train()
    loss, _ = loss_and_gradients(ours, batch)
    expected, _ = loss_and_gradients(theirs, batch)
    assert loss == pytest.approx(expected, rel=1e-6)
    same_gradients(dict(ours.network.named_parameters()), dict(theirs.network.named_parameters()), 1e-5)


def test_half_precision_and_weights_that_change(plain_kernels, batch):
    """fp32 weights get half copies, anew at each pass; gradients are fp32 and near the exact ones."""
    exact, half = load_small("bert"), fused()
    compute_in(half, torch.bfloat16)
    for _ in range(2):
        gradients = [loss_and_gradients(model, batch)[1] for model in (exact, half)]
        assert all(grad.dtype == torch.float32 for grad in gradients[1].values() if grad is not None)
        exact_vector, half_vector = map(vector, gradients)
        assert 0 < (half_vector - exact_vector).norm() / exact_vector.norm() < 0.05
        with torch.no_grad():
            for model in (exact, half):
                for parameter in model.parameters():
                    parameter.mul_(1.1)


def test_half_weights_as_fsdp_gathers_them(plain_kernels, batch):
    """Weights that are half already are used as they are, and so are their gradients."""
    model = fused().to(torch.bfloat16)
    _, gradients = loss_and_gradients(model, batch)
    _, exact = loss_and_gradients(load_small("bert"), batch)
    assert all(grad.dtype == torch.bfloat16 for grad in gradients.values() if grad is not None)
    assert (vector(gradients) - vector(exact)).norm() / vector(exact).norm() < 0.05


def test_dropout_is_the_same_in_both_passes(plain_kernels, batch):
    """Gradients by dropout's mask agree with finite differences along a direction, and seeds change the mask."""
    model = fused()
    for layer in encoder_layers(model):
        layer.attention.output.dropout.p = layer.output.dropout.p = 0.2
    model.network.bert.embeddings.dropout.p = 0.2
    model.train()
    loss, gradients = loss_and_gradients(model, batch)
    assert loss_and_gradients(model, batch)[0] == loss != loss_and_gradients(model, batch, seed=1)[0]
    torch.manual_seed(5)
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    slope = sum((gradients[name] * direction[name]).sum() for name in gradients if gradients[name] is not None)
    losses, step = [], 1e-4
    for sign in (1, -2):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(direction[name], alpha=sign * step)
        losses.append(loss_and_gradients(model, batch)[0])
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(slope.item(), rel=0.02)


def test_a_padding_row_learns_nothing(plain_kernels, batch):
    model = fused()
    batch = batch.map(torch.clone)
    batch.input_ids[3] = model.network.config.pad_token_id
    _, gradients = loss_and_gradients(model, batch)
    assert not gradients["network.bert.embeddings.word_embeddings.weight"][model.network.config.pad_token_id].any()


@pytest.mark.parametrize("model_type, changes", [("distilbert", {}), ("albert", {}), ("bert", {"hidden_act": "relu"})])
def test_other_layers_take_flash(plain_kernels, model_type, changes):
    model = fused(model_type, **changes)
    assert model.attention == "flash"
    assert not any(type(module).__name__.startswith("Fused") for module in model.modules())
    compute_in(model, torch.bfloat16)
    assert model.attention == "flash"


def test_other_layers_take_sdpa_where_flash_cannot_be(plain_kernels, batch):
    model = fused("distilbert")
    compute_in(model, None)  # fp32
    assert model.attention == "sdpa"
    assert all(torch.equal(*pair) for pair in zip(model(batch), load_small("distilbert")(batch), strict=True))


@pytest.mark.parametrize("heads, attention", [(4, "flash"), (5, "sdpa")])
def test_heads_that_flash_cannot_take_are_left_to_sdpa(plain_kernels, heads, attention):
    """Of 16 and of 12 channels: flash takes multiples of 8 (a TinyBERT has heads of 26)."""
    model = fused("bert", hidden_size=64 if heads == 4 else 60, num_attention_heads=heads, hidden_act="relu")
    compute_in(model, torch.bfloat16)
    assert model.attention == attention


def test_without_triton_flash_is_taken(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name))
    assert fused().attention == "flash"


def test_what_is_fused_is_not_compiled(plain_kernels, monkeypatch, tmp_path):
    compiled = []
    compiler = lambda function, **_: compiled.append(function) or function
    monkeypatch.setattr("common.model.precision.torch.compile", compiler)
    model = fused()
    compile_layers(model)
    assert not compiled and not model.compiled
    args = types.SimpleNamespace(compile=True, model_path=str(tmp_path), model_name="", data_name="", precision="bf16")
    args.cuda_graphs = True
    data, world = types.SimpleNamespace(sets={}, features={}), types.SimpleNamespace(size=1, places=[])
    record = describe(args, "baseline", model, data, world, {})  # holds what ran
    assert not record["compile"] and record["graphs"] and record["kernels"] == ["embeddings", "layers"]
    assert record["dropout"] == {"hidden": 0.0, "attention": 0.0} and record["fallbacks"] == []
    model = fused("roberta")  # of one token type: its embeddings stay as they are
    compile_layers(model)
    record = describe(args, "baseline", model, data, world, {})
    assert len(compiled) == 1 and record["compile"] and record["kernels"] == ["layers"]


# ---------------------------------------------------------------------------------------------------------------------
# What runs instead, where the kernels do not


class Ranks:
    """The World of this process and of others, of which each replies to a gather with what `others` says."""

    device, lines = torch.device("cpu"), ()

    def __init__(self, *others):
        self.others, self.lines = list(others), []

    def gather(self, value):
        return [value, self.others.pop(0)] if self.others else [value]

    def log(self, text):
        self.lines.append(text)


def break_kernel(monkeypatch, name, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(sys.modules["common.model.fused.kernels"], name, fail, raising=False)


def test_kernels_that_run_are_kept(plain_kernels):
    model = fused()
    settle_attention(model, Ranks())
    assert model.attention == "fused" and not model.fallbacks and model.compilable
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kernel", ["embed", "attention_forward", "gelu_backward", "embed_backward"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_kernel_that_fails_is_found_at_load(plain_kernels, monkeypatch, batch, kernel, dtype):
    """The plain layers run instead, with the same weights. In bf16 flash is tried first, and fails on a CPU."""
    model, plain = fused(), load_small("bert")
    break_kernel(monkeypatch, kernel, RuntimeError("no\n  such card"))
    for one in (model, plain):
        compute_in(one, dtype)
    settle_attention(model, Ranks())
    first, second = model.fallbacks
    assert first == "attention flash instead of fused: RuntimeError: no such card"
    assert second.startswith("attention sdpa instead of flash: ") and model.attention == "sdpa"
    assert not any(type(module).__name__.startswith("Fused") for module in model.modules())
    assert all(torch.equal(*pair) for pair in zip(model(batch), plain(batch), strict=True))
    monkeypatch.setattr("common.model.precision.torch.compile", None)
    compile_layers(model)  # does nothing: the compiler makes Triton kernels too
    assert not model.compiled


def test_a_kernel_that_fails_on_another_rank_is_left_by_all(plain_kernels):
    model = fused()
    settle_attention(model, Ranks(("fused", "OutOfResources: shared memory"), ("sdpa", None)))
    assert model.attention == "sdpa" and not model.compilable
    assert model.fallbacks[0] == "attention flash instead of fused: OutOfResources: shared memory"
    model = fused()
    settle_attention(model, Ranks(("flash", None), ("sdpa", None)))  # it has no Triton
    assert model.attention == "sdpa"
    assert model.fallbacks[0] == "attention flash instead of fused: another rank has no better one"


def test_running_out_of_memory_is_no_reason_to_fall_back(plain_kernels, monkeypatch):
    break_kernel(monkeypatch, "gelu", torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError):
        settle_attention(fused(), Ranks())


def test_an_evaluation_tries_no_backward_pass(plain_kernels, monkeypatch):
    model = fused()
    break_kernel(monkeypatch, "gelu_backward", RuntimeError())
    settle_attention(model, Ranks(), training=False)
    assert model.attention == "fused"


@pytest.mark.parametrize("kernel, count", [(None, 0), ("gelu", 2)])
@pytest.mark.parametrize("padded", [False, True])
def test_each_fall_back_is_one_line(plain_kernels, monkeypatch, tmp_path, kernel, count, padded):
    save_network(tmp_path)
    if kernel:
        break_kernel(monkeypatch, kernel, RuntimeError("no"))
    if padded:
        monkeypatch.setattr("common.model.loading.packs", lambda model: False)
    args = types.SimpleNamespace(model_path=str(tmp_path), attention="fused", dropout=None, attention_dropout=0.0)
    vars(args).update(evaluate_only=None, precision="fp32", cuda_graphs=True, compile=False)
    args.checkpoint_activations, world = False, Ranks()
    model = build_model(args, world, 100)
    assert len(world.lines) == (2 if padded else count) and args.cuda_graphs == (not padded)
    assert world.lines == [f"note: {line}" for line in model.fallbacks] and model.training
    if padded:
        assert world.lines[0].startswith("note: attention padded instead of fused: bert cannot take packed windows")
        assert world.lines[1].startswith("note: no CUDA graphs: ")


def test_a_mask_is_refused(plain_kernels):
    with pytest.raises(ValueError, match="packed windows"):
        fused().network(input_ids=torch.ones(2, 8, dtype=torch.long))


def test_it_is_saved_as_what_it_was(plain_kernels, tmp_path):
    class NoTokenizer:
        def save_pretrained(self, folder):
            pass

    model = fused()
    save_model(model, model.state_dict(), NoTokenizer(), tmp_path / "model", {})
    config = (tmp_path / "model" / "config.json").read_text()
    assert "BertForQuestionAnswering" in config and "Fused" not in config


def test_gradients_are_written_where_the_last_ones_lay(plain_kernels, batch, other_batch):
    model, reference = fused(), fused()
    inner = {name: p for name, p in model.network.named_parameters() if "qa_outputs" not in name}
    loss_and_gradients(model, batch)
    keep_gradient_buffers(model)
    buffers = {name: p.grad.data_ptr() for name, p in inner.items()}
    for _ in range(2):
        model.zero_grad()
        reference.zero_grad()
        for one in (other_batch, batch):  # the second pass adds to the first
            for trained in (model, reference):
                span_loss(*trained(one), one).backward()
            assert {name: p.grad.data_ptr() for name, p in inner.items()} == buffers
            same_gradients(dict(model.network.named_parameters()), dict(reference.network.named_parameters()), 1e-6)


@pytest.mark.parametrize("shift, written", [(0, True), (2, False), (4, True)])
def test_a_product_is_not_written_where_cublas_would_be_slow(shift, written):
    """At a multiple of 16 bytes, or not at all; it is copied later, into_buffers."""
    a, b = torch.randn(7, 6), torch.randn(7, 8)
    out = torch.zeros(64)[shift : shift + 48].view(6, 8)
    assert out.data_ptr() % 16 == 4 * shift % 16
    result = product(a, b, torch.float32, out)
    torch.testing.assert_close(result, a.T @ b)
    assert (result.data_ptr() == out.data_ptr()) is written
    into_buffers([result, a], [out, torch.zeros_like(a)])
    torch.testing.assert_close(out, a.T @ b)


def test_a_bucket_leaves_with_its_layer(plain_kernels, batch, one_rank):
    """BERT-base's gradients: what completes a bucket is nearly all of it, not the first of the next layer's."""
    register_attention()
    model = SpanModel(build_network("bert-base", attn_implementation="packed"), "sdpa")
    use_attention(model, "fused")
    size = int(re.search(r'"bucket_cap_mb": (\d+)', (ROOT / "distributed_ddp.py").read_text())[1])
    replica = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb=size)
    for _ in range(2):
        model.zero_grad()
        (0 * span_loss(*replica(batch), batch)).backward()
    buckets = collections.defaultdict(list)
    for name, p in model.named_parameters():
        found = re.search(r"layer\.(\d+)\.", name)
        layer = int(found[1]) if found else -1
        if p.grad is not None and "qa_outputs" not in name:
            buckets[p.grad.untyped_storage().data_ptr()].append((layer, p.numel()))
    assert len(buckets) == 14  # twelve layers, the small embeddings, the words'
    for parameters in buckets.values():
        last = min(layer for layer, _ in parameters)  # layers' backward passes run from the last to the first
        held = sum(count for layer, count in parameters if layer == last) / sum(count for _, count in parameters)
        assert held > 0.99


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ddp_need_not_copy_them(plain_kernels, batch, other_batch, precision, one_rank):
    model, other = fused(), fused()
    for one in (model, other):
        compute_in(one, HALF.get(precision))
    replica = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    replica.register_comm_hook(model, distributed.HOOKS["rows"])
    copies = []
    for kept in (False, False, True, True):
        if kept:
            keep_gradient_buffers(model)
        model.zero_grad()
        loss = span_loss(*replica(batch), batch)
        with torch.profiler.profile() as profiler:
            loss.backward()
        copied = [event.cpu_parent for event in profiler.events() if event.key == "aten::copy_"]
        copies.append(sum(not parent or parent.key != "aten::_foreach_copy_" for parent in copied))
        loss_and_gradients(other, batch)
        same_gradients(dict(model.network.named_parameters()), dict(other.network.named_parameters()), 1e-6)
    inner = sum("qa_outputs" not in name for name, _ in model.named_parameters())
    assert copies[2] == copies[3] == copies[1] - inner
    model.zero_grad()
    with replica.no_sync():
        span_loss(*replica(other_batch), other_batch).backward()
    span_loss(*replica(batch), batch).backward()
    span_loss(*other(other_batch), other_batch).backward()  # to the first batch's
    same_gradients(dict(model.network.named_parameters()), dict(other.network.named_parameters()), 1e-6)
