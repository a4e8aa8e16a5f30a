"""Computing in half precision from weights that stay fp32, and compiling the layers."""

import torch
import torch.nn.functional as F
from torch import nn

from common.errors import UserError
from common.model.attention import flash_takes
from common.model.fused.embeddings import FusedEmbeddings
from common.model.fused.gradients import product
from common.model.fused.layer import Fused
from common.model.span import encoder_layers


def compute_in(model, dtype):
    """Let a SpanModel compute in half precision from weights that stay fp32.

    dtype: bf16 or fp16; None changes nothing. UserError for deberta in half precision.
    Each Linear and LayerNorm casts its weights to the type of its input; the first LayerNorm, in the embeddings, casts
    what it gives. Unlike under autocast, what travels between the layers is half as wide too. FSDP's
    MixedPrecisionPolicy does the same. The head computes in fp32: bf16 would round logits to three digits.
    """
    config = model.network.config
    if model.attention == "flash" and not flash_takes(dtype, config.hidden_size // config.num_attention_heads):
        model.fall_back("sdpa", "flash needs bf16 or fp16, heads of 8, 16, … channels and torch.nn.attention.varlen")
    if dtype is not None and config.model_type == "deberta":  # its mask overflows in half precision
        raise UserError("deberta cannot compute in half precision: pass --precision fp32, or tf32 on a GPU")
    model.half = dtype
    if dtype is None:
        return
    model.network.qa_outputs.__class__ = Fp32Linear
    if model.attention == "padded":  # networks that are not ours to take apart: autocast
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = CastingLinear
        elif type(module) is nn.LayerNorm:
            module.__class__, module.output = CastingLayerNorm, dtype


class Fp32Linear(nn.Linear):
    """nn.Linear that computes in fp32, whatever the type of its input."""

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight, self.bias)


class CastingLinear(nn.Linear):
    """nn.Linear with weights in the type of its input."""

    def forward(self, x):
        return MixedProduct.apply(x, self.weight, self.bias)


class MixedProduct(torch.autograd.Function):
    """x @ weight.T + bias in the type of x; the gradients of weight and bias leave their sums in the weight's type.

    Autograd alone would round them to half first and then cast: a kernel more for each weight, and a digit less.
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        half = weight.to(x.dtype)
        ctx.save_for_backward(x, half)
        ctx.gradient_type = weight.dtype
        return F.linear(x, half, bias.to(x.dtype))

    @staticmethod
    def backward(ctx, grad):
        x, half = ctx.saved_tensors
        rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
        weight_grad = product(rows, inputs, ctx.gradient_type)
        return grad @ half, weight_grad, rows.sum(0, dtype=ctx.gradient_type)


class CastingLayerNorm(nn.LayerNorm):
    """nn.LayerNorm with weights in the type of its input and its output in `output`; its statistics are fp32."""

    def forward(self, x):
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps).to(self.output)


def compile_layers(model):
    """Compile the embeddings and each encoder layer, for any number of tokens: the layers share one graph.

    So this costs two compilations, not one a layer or a shape. Only the forward functions: what hooks do (FSDP's)
    stays outside the graph. What is fused is left as it is.
    """
    if not model.compilable:
        return
    modules = encoder_layers(model)
    if model.attention != "padded":
        modules.append(model.network.base_model.embeddings)
    for module in modules:
        if not isinstance(module, (Fused, FusedEmbeddings)):
            module.forward = torch.compile(module.forward, dynamic=True)
            model.compiled = True


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}  # --precision: the type that matrix products run in
