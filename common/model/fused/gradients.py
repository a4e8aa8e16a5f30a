"""Weight gradients that are written where DistributedDataParallel wants them, its buckets, without a copy."""

import torch


def product(a, b, dtype, out=None):
    """a.T @ b in `dtype`, written into `out` if there is one and the product can leave in its type.

    The sums of half-precision products are fp32 inside, and may leave as such. `out` is not used if it begins at no
    multiple of 16 bytes, where cuBLAS would take a kernel half as fast. DDP's first bucket begins with the head's bias
    of 8 bytes, so this happens.
    """
    if out is not None and out.data_ptr() % 16:
        out = None
    if dtype == a.dtype:
        return torch.mm(a.t(), b, out=out)
    if a.is_cuda:
        return torch.mm(a.t(), b, out_dtype=dtype, out=out)
    return torch.mm(a.t(), b).to(dtype)


def into_buffers(gradients, buffers):
    """The gradients in the buffers, copied by one kernel where they are not there yet; as they are without buffers.

    What returns are new tensors of that memory: autograd makes a tensor the parameter's gradient as it is only if
    nobody else holds it.
    """
    if buffers is None:
        return gradients
    rest = [(buffer, one) for buffer, one in zip(buffers, gradients, strict=True) if one is not buffer]
    torch._foreach_copy_([buffer for buffer, _ in rest], [one for _, one in rest])
    return [buffer.detach() for buffer in buffers]


class WritesGradients:
    """A module that can write the gradients of self.weights() into given tensors; see `keep_gradient_buffers`."""

    gradient_buffers = None

    def free_buffers(self, weights):
        """The tensors for this pass's gradients; None if there are gradients already, to which autograd will add."""
        if self.gradient_buffers is None or any(weight.grad is not None for weight in weights):
            return None
        return self.gradient_buffers


def keep_gradient_buffers(model):
    """Let the fused modules write gradients, from now on, into the tensors that hold them now.

    Call it after a backward pass of DistributedDataParallel with gradient_as_bucket_view: those tensors are its
    buckets, and it need not copy each gradient into them. Each forward pass must then be followed by its backward pass
    before the next one's, since both would write into the same tensors.
    """
    for module in model.modules():
        if isinstance(module, WritesGradients):
            gradients = [weight.grad for weight in module.weights()]
            module.gradient_buffers = None if any(one is None for one in gradients) else gradients
