"""What low-rank adapters add to a weight; trainer and server compute it alike."""

import torch


def merged_weight(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """[out, in] W + scale * B A, computed in single precision at least, of the base's type.

    Args:
        base: [out, in] W.
        a: [rank, in] A.
        b: [out, rank] B.
        scale: alpha / rank: Hu et al. 2021, arXiv:2106.09685, section 4.1.
    """
    kind = torch.promote_types(base.dtype, torch.float32)
    return torch.addmm(base.to(kind), b.to(kind), a.to(kind), alpha=scale).to(base.dtype)
