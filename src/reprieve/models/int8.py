"""Int8 linear layers for CPUs: a quarter of float32's memory traffic, at nearly its accuracy.

Weights are symmetric, one scale per output channel. Each activation row is scaled to [-1, 1] and split into two 7-bit
parts, a coarse one and the remainder: 13 bits in all, and no saturation in AVX2's 8-bit products. Both parts go through
one integer product. Sums are integers and every row has its own scale, so a row's result does not depend on the other
rows of the batch: a block of drafted tokens gives the same logits as one token at a time.

The product is PyTorch's fbgemm kernel; docs/measured/real_pair.md compares it with others.
"""

from __future__ import annotations

import warnings
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from reprieve.errors import UnsupportedModelError

INT8 = "int8"
_ENGINES = ("fbgemm", "x86")
_STEPS = 63  # steps of a 7-bit part, on either side of 0
_ZERO_POINT = 64
_TINY = 1e-12


class Int8Linear(nn.Module):
    """A linear layer with int8 weights.

    Args:
        linear: layer to quantise; its weights are not kept.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(1).clamp_min(_TINY) / 127
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scales = nn.Parameter(scales, requires_grad=False)  # [out]; fingerprints read it
        with warnings.catch_warnings():  # quantised tensors are deprecated; the kernels are not
            warnings.simplefilter("ignore")
            quantised = torch.quantize_per_channel(
                weight, scales.double(), torch.zeros(len(scales), dtype=torch.long), 0, torch.qint8
            )
            self._packed = torch.ops.quantized.linear_prepack(quantised, None)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().float(), requires_grad=False)
        self.weight = torch.empty(weight.shape, device="meta")  # for callers that read its shape

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., in] times the weights, [..., out], float32."""
        rows = x.reshape(-1, self.in_features)
        largest = rows.abs().amax(-1, keepdim=True).clamp_min_(_TINY)
        coarse = rows / largest
        fine = (coarse * _STEPS).round_().div_(-_STEPS).add_(coarse).mul_(2 * _STEPS)
        both = _product(torch.cat([coarse, fine]), self._packed)
        out = both[: len(rows)].add_(both[len(rows) :], alpha=1 / (2 * _STEPS)).mul_(largest)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def dequantised(self) -> Tensor:
        """Return the weights as float32 [out, in], rounded as the product sees them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            weight, _ = torch.ops.quantized.linear_unpack(self._packed)
            return cast(Tensor, weight.dequantize())

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _product(activations: Tensor, packed: object) -> Tensor:
    """Return activations [rows, in] in [-1, 1], quantised to 7 bits, times packed int8 weights: [rows, out]."""
    kernel = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    return cast(Tensor, kernel(activations, 1 / _STEPS, _ZERO_POINT, packed))


def require_int8(device: torch.device | str) -> None:
    """Refuse int8 where its kernels do not run.

    Raises:
        UnsupportedModelError: a device other than the CPU, or a processor without fbgemm's kernels.
    """
    kind = torch.device(device).type
    if kind != "cpu":
        raise UnsupportedModelError(f"dtype int8 requires the CPU, got device {str(device)!r}; use bfloat16 there")
    if not set(_ENGINES) & set(torch.backends.quantized.supported_engines):
        raise UnsupportedModelError("dtype int8 requires fbgemm's kernels (x86-64 with AVX2); use float32 here")


def quantise(model: PreTrainedModel) -> PreTrainedModel:
    """Replace every `nn.Linear` of a float32 model in place; embeddings and norms stay float32.

    Raises:
        UnsupportedModelError: weights outside of `nn.Linear` and embeddings (GPT-2's Conv1D, fused experts), or a
            model that is quantised already.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise UnsupportedModelError(f"dtype int8 requires unquantised weights; {_name(model)} is quantised already")
    known: set[int] = set()
    linears: list[tuple[nn.Module, str, nn.Linear]] = []
    for module in model.modules():
        if type(module) is nn.Linear or isinstance(module, nn.Embedding):
            known |= {id(parameter) for parameter in module.parameters(recurse=False)}
        linears += [(module, name, child) for name, child in module.named_children() if type(child) is nn.Linear]
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and id(parameter) not in known:
            raise UnsupportedModelError(
                f"dtype int8 requires a model whose weights are all in nn.Linear layers; {_name(model)} has {name}, "
                f"shape {tuple(parameter.shape)}, outside of them"
            )
    if not linears:
        raise UnsupportedModelError(f"dtype int8 requires nn.Linear layers; {_name(model)} has none")
    replaced: dict[int, Int8Linear] = {}
    for parent, name, linear in linears:
        if id(linear) not in replaced:
            replaced[id(linear)] = Int8Linear(linear)
        setattr(parent, name, replaced[id(linear)])
    return model


def is_int8(model: nn.Module) -> bool:
    """Return True if `quantise` made this model."""
    return any(isinstance(module, Int8Linear) for module in model.modules())


def num_weights(model: nn.Module) -> int:
    """Return the number of weights of a model, int8 ones included."""
    packed = sum(module.weight.numel() for module in model.modules() if isinstance(module, Int8Linear))
    return packed + sum(parameter.numel() for parameter in model.parameters())


def dtype_name(model: PreTrainedModel) -> str:
    """Return the name of a model's precision: int8, or its floating-point dtype."""
    return INT8 if is_int8(model) else str(model.dtype).removeprefix("torch.")


def output_weights(model: PreTrainedModel) -> Tensor:
    """Return the output embedding [V, D]; dequantised where the model is int8."""
    head = model.get_output_embeddings()
    return head.dequantised() if isinstance(head, Int8Linear) else cast(Tensor, head.weight)


def _name(model: PreTrainedModel) -> str:
    return repr(model.config.name_or_path or type(model).__name__)
