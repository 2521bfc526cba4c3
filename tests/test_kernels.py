"""Products by the quickest kernel are the products."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import kernels


@pytest.mark.parametrize("rows", [(3,), (2, 5), (4, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_linear(monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...], dtype: torch.dtype, transposed: bool) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(*rows, 6, dtype=dtype), torch.randn(4, dtype=dtype)
    weight = torch.randn(6, 4, dtype=dtype).t() if transposed else torch.randn(4, 6, dtype=dtype)
    for least in (0, 1 << 62):  # always and never by oneDNN, where there is one
        monkeypatch.setattr(kernels, "ONEDNN_FROM", least)
        for b in (bias, None):
            found = kernels.linear(x, weight, b)
            assert found.is_contiguous()
            torch.testing.assert_close(found, F.linear(x, weight, b))
