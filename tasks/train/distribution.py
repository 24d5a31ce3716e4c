"""Log-probabilities and entropies of tokens from logits, with the least memory that has exact gradients."""

from typing import Any

import torch


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, *, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] log-probabilities of the targets, with a gradient, and [N] entropies; in nats.

    Args:
        logits: [N, V]; the softmax is in at least single precision, of logits divided by the temperature.
        targets: [N] token ids.
        temperatures: [N].
        entropy_gradient: True for entropies with a gradient.
    """
    logprobs, entropies = _TokenLogprobs.apply(logits, targets, temperatures)  # type: ignore[no-untyped-call]  # torch gives `apply` no type
    return logprobs, entropies if entropy_gradient else entropies.detach()


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the probabilities p = softmax(x / T) for the backward pass, and nothing else of size [N, V].

    With the entropy H = -sum_k p_k log p_k, and y the target,

        d log p_y / dx_j = ((j = y) - p_j) / T
        d H / dx_j = -p_j (log p_j + H) / T
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        precise = logits if logits.dtype == torch.float64 else logits.float()
        divisors = temperatures.to(precise.dtype).unsqueeze(1)
        log_p = torch.log_softmax(precise / divisors, dim=1)
        logprobs = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
        p = log_p.exp()
        entropies = -torch.linalg.vecdot(p, log_p.clamp_(min=torch.finfo(p.dtype).min))
        ctx.save_for_backward(p, targets, divisors, entropies)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropies: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None]:
        p, targets, divisors, entropies = ctx.saved_tensors
        total: torch.Tensor | None = None
        if grad_logprobs is not None:
            upstream = grad_logprobs.unsqueeze(1) / divisors
            total = p * -upstream
            total.scatter_add_(1, targets.unsqueeze(1), upstream)
        if grad_entropies is not None:
            upstream = grad_entropies.unsqueeze(1) / divisors
            part = (torch.xlogy(p, p) + p * entropies.unsqueeze(1)) * -upstream
            total = part if total is None else total + part
        return total, None, None
