"""Chunked log-probs against the plain formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_rlhf.algorithms.log_probs import token_log_probs


def _plain(hidden: Tensor, head: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = ((hidden @ head.t()) / temperature).log_softmax(-1)
    return log_p[torch.arange(len(labels)), labels], -(log_p.exp() * log_p).sum(-1)


def _inputs(num_tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 6, generator=draw, dtype=torch.float64).to(dtype)
    head = torch.randn(11, 6, generator=draw, dtype=torch.float64).to(dtype)
    return hidden.requires_grad_(), head.requires_grad_(), torch.randint(0, 11, (num_tokens,), generator=draw)


def test_a10_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    before = logits.detach().clone()
    head = torch.eye(3, dtype=torch.float64)
    log_probs, entropy = token_log_probs(logits, head, torch.tensor([1]), temperature=0.5, entropy=True)
    log_probs.sum().backward()
    assert log_probs.item() == pytest.approx(-2.1429, abs=1e-4)
    assert entropy is not None
    assert entropy.item() == pytest.approx(0.4411, abs=1e-4)
    torch.testing.assert_close(logits.grad[0], torch.tensor([-1.7336, 1.7654, -0.0318]).double(), atol=1e-4, rtol=0)
    assert torch.equal(logits, before)
    assert torch.equal(head, torch.eye(3, dtype=torch.float64))


def test_a10_bf16_logits_give_fp32_log_probs() -> None:
    logits = torch.tensor([[10.25, 9.125, -3.5, 2.0]], dtype=torch.bfloat16).expand(4, 4)
    before = logits.clone()
    log_probs, _ = token_log_probs(logits, torch.eye(4, dtype=torch.bfloat16), torch.arange(4))
    assert log_probs.dtype is torch.float32
    torch.testing.assert_close(log_probs, torch.tensor([-0.2813, -1.4063, -14.0313, -8.5313]), atol=1e-4, rtol=0)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("chunk_size", [1, 3, 8, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_log_softmax(chunk_size: int, temperature: float) -> None:
    hidden, head, labels = _inputs(8)
    plain = _plain(hidden, head, labels, temperature)
    chunked = token_log_probs(hidden, head, labels, temperature=temperature, chunk_size=chunk_size, entropy=True)
    weights = torch.linspace(-1, 2, 8, dtype=torch.float64)
    for mine, theirs in zip(chunked, plain, strict=True):
        torch.testing.assert_close(mine, theirs)
    expected = torch.autograd.grad((weights * plain[0]).sum() + (weights.cos() * plain[1]).sum(), (hidden, head))
    got = torch.autograd.grad((weights * chunked[0]).sum() + (weights.cos() * chunked[1]).sum(), (hidden, head))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_agree_with_finite_differences(entropy: bool) -> None:
    hidden, head, labels = _inputs(5)

    def outputs(hidden: Tensor, head: Tensor) -> tuple[Tensor, ...]:
        found = token_log_probs(hidden, head, labels, temperature=1.3, chunk_size=2, entropy=entropy)
        return tuple(value for value in found if value is not None)

    assert torch.autograd.gradcheck(outputs, (hidden, head))


def test_entropy_alone_has_the_right_gradient() -> None:
    hidden, head, labels = _inputs(5)
    _, entropy = token_log_probs(hidden, head, labels, entropy=True)
    _, expected = _plain(hidden, head, labels, 1.0)
    assert entropy is not None
    for mine, theirs in zip(
        torch.autograd.grad(entropy.sum(), (hidden, head)),
        torch.autograd.grad(expected.sum(), (hidden, head)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_a_frozen_head_gets_no_gradient_and_hidden_states_do() -> None:
    hidden, head, labels = _inputs(5)
    head.requires_grad_(False)
    token_log_probs(hidden, head, labels)[0].sum().backward()
    assert hidden.grad is not None
    assert head.grad is None


def test_no_tokens_still_lead_back_to_both_inputs() -> None:
    hidden, head, labels = _inputs(0)
    log_probs, entropy = token_log_probs(hidden, head, labels, entropy=True)
    assert log_probs.shape == (0,)
    assert entropy is not None
    assert entropy.shape == (0,)
    log_probs.sum().backward()
    assert hidden.grad is not None
    assert torch.equal(head.grad, torch.zeros_like(head))


def test_bf16_inputs_lose_nothing_but_their_own_rounding() -> None:
    hidden, head, labels = _inputs(200, torch.bfloat16)
    log_probs, _ = token_log_probs(hidden, head, labels, chunk_size=1)
    log_probs.sum().backward()
    exact_hidden = hidden.detach().double().requires_grad_()
    exact_head = head.detach().double().requires_grad_()
    exact, _ = _plain(exact_hidden, exact_head, labels, 1.0)
    exact.sum().backward()
    assert hidden.grad.dtype is head.grad.dtype is torch.bfloat16
    torch.testing.assert_close(log_probs.double(), exact, atol=0.05, rtol=0)
    # the head's gradient is summed over 200 chunks in fp32: 0.0017 off; summed in bf16 it is 0.012 off
    error = (head.grad.double() - exact_head.grad).norm() / exact_head.grad.norm()
    assert float(error) < 0.004


class _LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_logits_of_a_chunk_are_the_largest_tensor_ever_made() -> None:
    hidden, head = torch.randn(96, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with _LargestTensor() as seen:
        log_probs, entropy = token_log_probs(hidden, head, torch.zeros(96).long(), chunk_size=16, entropy=True)
        assert entropy is not None
        (log_probs.sum() + entropy.sum()).backward()
    assert seen.numel == 16 * 1000


def test_under_autocast_the_product_is_bf16_and_the_rest_fp32() -> None:
    hidden, head, labels = _inputs(9, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed, _ = token_log_probs(hidden, head, labels)
    low, _ = token_log_probs(hidden.bfloat16(), head.bfloat16(), labels)
    assert mixed.dtype is torch.float32
    assert torch.equal(mixed, low)
    mixed.sum().backward()
    assert hidden.grad.dtype is torch.float32


def test_what_cannot_be_meant_is_refused() -> None:
    hidden, head, labels = _inputs(5)
    with pytest.raises(ValueError, match=r"\[T, H\].*\(5, 6\) and \(11, 5\)"):
        token_log_probs(hidden, head[:, :5], labels)
    with pytest.raises(ValueError, match=r"one label per row, \[5\], got \(4,\)"):
        token_log_probs(hidden, head, labels[:4])
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        token_log_probs(hidden, head, labels, temperature=0.0)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        token_log_probs(hidden, head, labels, chunk_size=0)


@pytest.mark.parametrize("trained", ["hidden", "head", "both"])
def test_gradients_of_gradients_are_refused(trained: str) -> None:
    hidden, head, labels = _inputs(3)
    inputs = {"hidden": [hidden], "head": [head], "both": [hidden, head]}[trained]
    for tensor in (hidden, head):
        tensor.requires_grad_(any(tensor is one for one in inputs))
    log_probs, _ = token_log_probs(hidden, head, labels, chunk_size=2)
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(log_probs.square().sum(), inputs, create_graph=True)


def test_a_second_backward_gives_the_first_ones_gradients() -> None:
    hidden, head, labels = _inputs(7)
    log_probs, entropy = token_log_probs(hidden, head, labels, chunk_size=3, entropy=True)
    assert entropy is not None
    loss = (log_probs * entropy).sum()
    first = torch.autograd.grad(loss, (hidden, head), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, head))
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)


def test_a_backward_within_autocast_has_the_precision_of_its_forward() -> None:
    hidden, head, labels = _inputs(7, torch.float32)
    log_probs, entropy = token_log_probs(hidden, head, labels, chunk_size=3, entropy=True)
    assert entropy is not None
    loss = (log_probs * entropy).sum()
    outside = torch.autograd.grad(loss, (hidden, head), retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(loss, (hidden, head))
    for one, other in zip(outside, inside, strict=True):
        assert torch.equal(one, other)
