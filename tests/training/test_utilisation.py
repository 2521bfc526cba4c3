"""What model-FLOP utilisation is told against."""

import pytest
import torch

from shardwise import kernels
from shardwise.training import utilisation
from shardwise.training.ranks import Ranks


@pytest.mark.parametrize(("native", "measured"), [(True, torch.bfloat16), (False, torch.float32)])
def test_the_peak_is_that_of_the_format_that_products_are_multiplied_in(
    native: bool, measured: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()

    def seconds(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
        seen.update({a.dtype, b.dtype, out.dtype})
        return 1e-3

    monkeypatch.setattr(kernels, "native", lambda dtype, device_type: native)
    monkeypatch.setattr(utilisation, "SECONDS", 1e-3)
    monkeypatch.setattr(utilisation, "_seconds", seconds)
    assert utilisation.measured_peak(torch.device("cpu"), torch.bfloat16, Ranks()) == pytest.approx(2 * 768**3 / 1e-3)
    assert seen == {measured}
