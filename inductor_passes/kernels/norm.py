"""Steps that follow a sum over ranks: a bias, a residual, and the norm of the total."""

from __future__ import annotations

from typing import NamedTuple

import torch

# A row is held in registers, by at most 1024 threads of 64 registers.
MAX_ROW = 16384
# Above this many bytes a rank two-shot moves less; below, its second barrier costs more than it saves.
TWO_SHOT_BYTES = 512 << 10
E4M3_MAX = 448.0
# A row of zeros has a scale too.
SMALLEST = 1e-12


def matrix(tensor: torch.Tensor) -> torch.Tensor:
    """``[..., D]`` as contiguous ``[rows, D]``."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


class Norm(NamedTuple):
    """The terms, each of which may be missing, and the norm of their total; a layer norm if ``layer``.

    ``residual`` has the shape of the sum, ``[..., D]``; ``bias``, ``weight`` and ``shift`` are ``[D]``. The result
    is of ``out_dtype``; of float8_e4m3fn each row has a scale, and result times scale is the norm.
    """

    residual: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    eps: float = 1e-5
    out_dtype: torch.dtype = torch.float32
    layer: bool = False

    @property
    def quantised(self) -> bool:
        """Return whether rows have scales."""
        return self.out_dtype == torch.float8_e4m3fn

    def rows(self) -> dict[str, torch.Tensor | None]:
        """The terms of one row, by field."""
        return {"bias": self.bias, "weight": self.weight, "shift": self.shift}

    def contiguous(self) -> Norm:
        """The terms as a kernel reads them: the residual ``[rows, D]``, every row with stride 1."""
        bias, weight, shift = (
            None if row is None else row.contiguous() for row in self.rows().values()
        )
        residual = None if self.residual is None else matrix(self.residual)
        return self._replace(residual=residual, bias=bias, weight=weight, shift=shift)

    def outputs(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Memory for the results of ``x`` ``[..., D]``: y and total like x; mean, rstd and scale ``[..., 1]``, float32.

        Mean is empty unless ``layer``, scale unless ``quantised``.
        """
        wanted = (self.layer, True, self.quantised)
        row, none = (*x.shape[:-1], 1), (0,)
        statistics = (x.new_empty(row if there else none, dtype=torch.float32) for there in wanted)
        return [x.new_empty(x.shape, dtype=self.out_dtype), x.new_empty(x.shape), *statistics]

    def of(self, summed: torch.Tensor) -> list[torch.Tensor]:
        """The results for a sum, by eager operations, in float32 where the kernel is."""
        exact = summed.float()
        for term in (self.bias, self.residual):
            exact = exact if term is None else exact + term.float()
        total = exact.to(summed.dtype)
        centred = total.float()
        mean = scale = centred.new_empty(0)
        if self.layer:
            mean = centred.mean(-1, keepdim=True)
            centred = centred - mean
        rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)
        y = centred * rstd
        y = y if self.weight is None else y * self.weight.float()
        y = y if self.shift is None else y + self.shift.float()
        if self.quantised:
            scale = y.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / E4M3_MAX
            y = y / scale
        return [y.to(self.out_dtype), total, mean, rstd, scale]
