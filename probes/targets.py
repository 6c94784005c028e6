"""What the target device does differently from the CPU on which a trace runs.

A trace uses fake CPU tensors. For a CPU run they already dispatch as real ones do. For CUDA the differences that change
saved tensors or transient memory are put in by hand: autocast's op lists, the attention backend, native dropout, the fused
RMSNorm. Sources: PyTorch's autocast_mode.h, sdp_utils.cpp, flash_api.cpp and the kernels' own allocation calls.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from probes.target import Target
from probes.workload import WorkloadError

aten = torch.ops.aten

# at::autocast's float32 list for CUDA (autocast_mode.h, AT_FORALL_FP32) by Python name.
_FLOAT32 = {
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
    "pow", "__pow__", "__rpow__", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm",
    "nuclear_norm", "cosine_similarity", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "nll_loss",
    "binary_cross_entropy_with_logits", "dist", "cdist", "renorm", "logsumexp", "norm",
}  # fmt: skip
# AT_FORALL_LOWER_PRECISION_FP, by Python name.
_LOWER = {
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "addmm", "addmv", "addr",
    "matmul", "__matmul__", "__rmatmul__", "einsum", "mm", "mv", "linear", "addbmm", "baddbmm", "bmm", "prelu", "multi_dot",
}  # fmt: skip
# AT_FORALL_FP32_SET_OPT_DTYPE: computed into float32 without a copy of the input.
_FLOAT32_DTYPE = {"prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum"}


class AttentionError(WorkloadError):
    """The chosen attention backend cannot run this model."""


def attention_backend(
    target: Target, dtype: torch.dtype, head_dim: int, head_dim_v: int, has_mask: bool, gqa: bool
) -> str:
    """The backend that PyTorch's SDPA dispatch takes on the target (sdp_utils.cpp, default priority order).

    Raises:
        AttentionError: a backend was asked for that does not take these tensors.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    flash = half and not has_mask and head_dim <= 256 and head_dim == head_dim_v and target.capability >= (8, 0)
    efficient = head_dim % 8 == 0 and not (dtype is torch.bfloat16 and target.capability < (8, 0)) and not gqa
    cudnn = half and head_dim <= 128 and head_dim % 8 == 0 and target.capability >= (8, 0)
    available = {"flash": flash, "efficient": efficient, "cudnn": cudnn, "math": True}
    if target.attention == "auto":
        return next(name for name in ("flash", "efficient", "math") if available[name])
    if not available[target.attention]:
        usable = [n for n, ok in available.items() if ok]
        raise AttentionError(
            f"--attention {target.attention} does not take {'masked ' if has_mask else ''}attention with head size {head_dim} "
            f"in {str(dtype).removeprefix('torch.')} here; usable: {', '.join(usable)}"
        )
    return target.attention


def _sdpa_cuda(
    target: Target,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):
        half = torch.get_autocast_dtype("cpu")
        query, key, value = (t.to(half) for t in (query, key, value))
    gqa = enable_gqa and query.shape[-3] != key.shape[-3]
    backend = attention_backend(target, query.dtype, query.shape[-1], value.shape[-1], attn_mask is not None, gqa)
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            # convert_boolean_attn_mask: zeros where allowed, -inf elsewhere, in the query's dtype
            attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(query.dtype)
        else:
            attn_mask = attn_mask.to(query.dtype)
    if backend == "flash":
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    bias = attn_mask
    if bias is not None:
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if backend == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, True, dropout_p, is_causal, False, scale=scale
        )[0]
    if backend == "efficient":
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]


class _FusedRmsNorm(torch.autograd.Function):
    """The fused CUDA kernel as it allocates and saves: input, weight and one float32 rstd a row. (`aten::_fused_rms_norm`
    itself falls apart into elementwise operators on meta and CPU tensors.)"""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, shape: list[int], weight: torch.Tensor | None) -> torch.Tensor:
        rows = (*input.shape[: input.dim() - len(shape)], *(1 for _ in shape))
        ctx.save_for_backward(input, weight, input.new_empty(rows, dtype=torch.float32))
        return torch.mul(input, weight) if weight is not None else torch.mul(input, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        input, weight, _ = ctx.saved_tensors
        of_input = torch.mul(gradient, input) if ctx.needs_input_grad[0] else None
        of_weight = None
        if weight is not None and ctx.needs_input_grad[2]:
            of_weight = torch.sum(gradient, list(range(gradient.dim() - weight.dim())))
        return of_input, None, of_weight


class CudaFunctions(TorchFunctionMode):
    """Makes the functions of a traced model save what they save on a CUDA device. Active in the forward pass only, which
    is enough: a trace never runs under a checkpoint."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        self._casts: dict[int, torch.Tensor] = {}
        self._captures = False

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside, a graph is made for a compiler: it finds equal casts itself, and takes RMSNorm apart."""
        self._captures = True
        try:
            yield
        finally:
            self._captures = False

    def _lower(self, value: Any, dtype: torch.dtype) -> Any:
        """at::autocast's cached_cast: casts of trainable float32 weights are kept until the autocast context ends."""
        if isinstance(value, (list, tuple)):
            return type(value)(self._lower(v, dtype) for v in value)
        if (
            not isinstance(value, torch.Tensor)
            or not value.is_floating_point()
            or value.dtype in (dtype, torch.float64)
        ):
            return value
        if self._captures or not (value.dtype is torch.float32 and value.requires_grad and value.is_leaf):
            return value.to(dtype)
        if id(value) not in self._casts:
            self._casts[id(value)] = value.to(dtype)
        return self._casts[id(value)]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        autocast = torch.is_autocast_enabled("cpu")
        if not autocast and self._casts:
            self._casts.clear()
        if name == "scaled_dot_product_attention":
            return _sdpa_cuda(self.target, *args, **kwargs)
        if name == "dropout":
            return self._dropout(func, args, kwargs)
        if name == "rms_norm":
            return self._rms_norm(func, args, kwargs, autocast)
        if autocast and name in _LOWER:
            dtype = torch.get_autocast_dtype("cpu")
            args, kwargs = self._lower(args, dtype), {k: self._lower(v, dtype) for k, v in kwargs.items()}
        elif autocast and name in _FLOAT32:
            args, kwargs = _to_float32(args), dict(zip(kwargs, _to_float32(tuple(kwargs.values())), strict=True))
        elif autocast and name in _FLOAT32_DTYPE and kwargs.get("dtype") is None and _has_half(args):
            kwargs = {**kwargs, "dtype": torch.float32}
        return func(*args, **kwargs)

    def _dropout(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def bind(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            if inplace or not training or p == 0.0:
                return func(input, p, training, inplace) if func is F.dropout else func(*args, **kwargs)
            return aten.native_dropout(input, p, True)[0]

        names = {"train": "training"}
        return bind(*args, **{names.get(k, k): v for k, v in kwargs.items()})

    def _rms_norm(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: bool) -> Any:
        def bind(
            input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
        ) -> Any:
            if autocast:
                input = input.float()
                weight = weight.float() if weight is not None else None
            if self._captures or (weight is not None and weight.dtype != input.dtype):
                return func(input, normalized_shape, weight, eps)
            result: torch.Tensor = _FusedRmsNorm.apply(input, list(normalized_shape), weight)
            return result

        return bind(*args, **kwargs)


def _has_half(values: tuple[Any, ...]) -> bool:
    return any(isinstance(v, torch.Tensor) and v.dtype in (torch.bfloat16, torch.float16) for v in values)


def _to_float32(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        v.float() if isinstance(v, torch.Tensor) and v.dtype in (torch.bfloat16, torch.float16) else v for v in values
    )


def _round(value: int, step: int) -> int:
    return -(-value // step) * step


def _cpu_convolution(args: tuple[Any, ...], output: torch.Tensor) -> int:
    """Bytes that a convolution on the CPU allocates and frees inside, as seen in the profiler's events.

    ATen's own kernels (ConvolutionMM2d.cpp, ConvolutionMM3d.cpp) unfold the input into columns, a copy for each position of the kernel; for a
    kernel of one position the input itself serves, made contiguous. oneDNN reorders input and weight into blocks of channels (an input of 3
    channels is taken as it is) and the result back; a channels-last input stays.
    """
    x, weight, stride, padding = args[0], args[1], args[3], args[4]
    backend = torch._C._select_conv_backend(*args[:9], None)
    kinds = torch._C._ConvBackend
    if backend in (kinds.Slow2d, kinds.Slow3d):
        positions = math.prod(weight.shape[2:])
        if positions == 1 and set(stride) == {1} and set(padding) == {0}:
            return 0 if x.is_contiguous() else x.numel() * x.element_size()
        return int(x.shape[0] * x.shape[1] * positions * math.prod(output.shape[2:]) * x.element_size())
    if backend == kinds.Mkldnn:
        blocked = weight.numel() * weight.element_size()
        if not x.is_contiguous():
            return 2 * blocked
        blocked += x.numel() * x.element_size() if x.shape[1] > 3 else 0
        return max(blocked, output.numel() * output.element_size())
    return 0


def cpu_scratch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> int:
    """Bytes that PyTorch's convolution and attention kernels for the CPU allocate and free inside.

    Attention (ATen's FlashAttentionKernel.cpp) works on tiles of 32, 64 or 256 queries by up to 512 keys. Forward: for each thread a tile of scores, two rows of statistics
    and the tile's output. Backward: for each thread two tiles, one row of sums, and a contiguous copy of the output's gradient where
    its layout differs from the inputs'. Tiles of half precision are also copied to that precision.
    """
    name = func._schema.name
    if func is aten.convolution.default:
        return _cpu_convolution(args, outputs)
    if "flash_attention_for_cpu" not in name:
        return 0
    backward = name.endswith("_backward")
    q, k = args[1:3] if backward else args[:2]
    length, size = int(q.shape[2]), int(q.shape[3])
    rows = min(length, 256 if length >= 768 else 64 if length >= 192 else 32)
    keys, threads = min(512, int(k.shape[2])), torch.get_num_threads()
    half = 2 if q.dtype in (torch.bfloat16, torch.float16) else 0
    if not backward:
        return threads * (4 * rows * (keys + 2 + size) + half * rows * keys)
    gradient = args[0]
    copied = not gradient.transpose(1, 2).is_contiguous()
    copy = gradient.numel() * gradient.element_size() if copied else 0
    return threads * 2 * rows * keys * (4 + half) + 4 * rows + copy


def cuda_scratch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> int:
    """Bytes that a CUDA kernel takes from the allocator and gives back before it returns.

    Flash attention's backward (flash_api.cpp, mha_bwd): a float32 accumulator of dq and the row sums, both padded to 128
    rows; the head size is padded to 32. Efficient attention's backward (attention_backward.cu): the row sums ``delta`` and,
    where its tiles do not fit the query in one pass, a float32 accumulator of dq. Its forward (kernel_forward.h): values of more than
    128 per head do not fit registers, and half-precision ones then need a float32 accumulator of the output.
    """
    name = func._schema.name
    if name.endswith("dot_product_efficient_attention"):
        value = args[2]
        wide = value.shape[-1] > 128 and value.element_size() == 2
        return 4 * args[0].shape[:-1].numel() * int(value.shape[-1]) if wide else 0
    if not name.endswith("attention_backward"):
        return 0
    q = args[1]
    batch, heads, length, size = q.shape
    rows = _round(length, 128)
    if "flash" in name:
        return 4 * batch * heads * rows * (_round(size, 32) + 1)
    if "efficient" in name:
        return 4 * batch * heads * length * (size + 1)
    return 0
