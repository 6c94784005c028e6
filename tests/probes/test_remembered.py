"""Results on meta tensors that are made again from their layout: the same as the operator's, and only where that is certain."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from probes import traced
from probes.recorder import Recorder
from probes.remembered import Remembered
from probes.target import Target
from probes.workload import from_request

ATEN = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Calls:
    """An operator that counts its calls."""

    def __init__(self, func: Any) -> None:
        self.func, self.count = func, 0
        self._schema = func._schema

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.func(*args, **kwargs)


def layout(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device, t.storage_offset(), t.untyped_storage().nbytes()


REMEMBERED = [
    (ATEN.mul.Tensor, (meta(2, 3), meta(3, dtype=torch.bfloat16))),
    (ATEN.mul.Tensor, (meta(4, 3).t(), meta(4, 3).t())),
    (ATEN.add.Tensor, (meta(2, 1, 3), meta(5, 1))),
    (ATEN.addmm.default, (meta(4), meta(2, 3), meta(3, 4))),
    (ATEN.sum.dim_IntList, (meta(2, 3), [1], True)),
    (ATEN.native_layer_norm.default, (meta(2, 3), [3], None, None, 1e-5)),
    (ATEN.gt.Scalar, (meta(2), 1)),
]


@pytest.mark.parametrize(("func", "args"), REMEMBERED, ids=lambda v: str(v) if callable(v) else "")
def test_a_result_is_made_again_without_the_operator(func: Any, args: tuple[Any, ...]) -> None:
    remembered, counted = Remembered(), Calls(func)
    first, again = remembered(counted, args, {}), remembered(counted, args, {})
    assert counted.count == 1
    assert type(first) is type(again)
    pairs = list(zip(first, again, strict=True)) if isinstance(first, tuple) else [(first, again)]
    for one, other in pairs:
        assert layout(one) == layout(other)
        assert one.untyped_storage()._cdata != other.untyped_storage()._cdata


CALLED = [
    (ATEN.view.default, (meta(2, 3), [6])),
    (ATEN.mul_.Tensor, (meta(2), meta(2))),
    (ATEN.mul.Tensor, (torch.ones(2), torch.ones(2))),
    (ATEN.mul.Tensor, (meta(2), meta())),
    (ATEN.mul.Tensor, (meta(2, dtype=torch.complex64).conj(), meta(2, dtype=torch.complex64))),
    (ATEN.expand.default, (meta(1, 3), [2, 3])),
    (ATEN.empty_like.default, (meta(2),), {"dtype": torch.float16}),
]


@pytest.mark.parametrize("call", CALLED, ids=lambda c: str(c[0]))
def test_what_may_depend_on_more_than_layouts_is_called_every_time(call: tuple[Any, ...]) -> None:
    func, args, kwargs = (*call, {})[:3]
    remembered, counted = Remembered(), Calls(func)
    for _ in range(3):
        remembered(counted, args, kwargs)
    assert counted.count == 3


def test_inputs_that_give_other_results_are_told_apart() -> None:
    remembered = Remembered()
    x = meta(2, 3, dtype=torch.int64)
    results = [remembered(ATEN.mul.Tensor, (x, value), {}).dtype for value in (1, 1.0, True, 1)]
    assert results == [torch.int64, torch.float32, torch.int64, torch.int64]
    strides = [remembered(ATEN.neg.default, (t,), {}).stride() for t in (meta(3, 3), meta(3, 3).t(), meta(3, 3))]
    assert strides == [(3, 1), (1, 3), (3, 1)]


@pytest.mark.parametrize(
    "request_",
    [{"model": "sd3", "resolution": "256x256"}, {"model": "sd1x", "resolution": "256x256", "adapter": "full"}],
)
def test_a_trace_is_the_same_with_and_without(request_: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    workload, target = from_request(request_), Target("cuda", (8, 9), "auto")
    saved: list[int] = []
    original = Remembered.__call__

    def counting(self: Remembered, *args: Any) -> Any:
        saved.append(len(self._known))
        return original(self, *args)

    monkeypatch.setattr(Remembered, "__call__", counting)
    fast = traced.trace(workload, target)
    assert len(saved) > 4 * max(saved)
    before = Recorder.__init__

    def plain(self: Recorder, *args: Any, **options: Any) -> None:
        before(self, *args, **options)
        self._remembered = None

    monkeypatch.setattr(Recorder, "__init__", plain)
    slow = traced.trace(workload, target)
    assert fast.tape.digest() == slow.tape.digest()
    assert fast.tape.calls == slow.tape.calls
