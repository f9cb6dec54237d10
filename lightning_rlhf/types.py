"""The carriers that travel through one RL step: flat, padding-free, validated once.

A batch of ``B`` sequences is stored back to back: ``tokens [num_tokens]`` with ``cu_seqlens [B+1]``, per-token fields
``[num_tokens]``, per-sequence fields ``[B]`` and Python lists for text and metadata. A per-token value sits at the
index of the token that it describes, so masks, packing and sequence parallelism slice all fields alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from lightning_rlhf.metrics import Metric

Role = Literal["actor", "critic", "reference", "reward_model"]

UNTRAINED_FINISHES = ("skipped", "abort", "failed")
"""Finish reasons of rows that do not train, whatever their reward: not sampled whole, or judged by nobody."""

_Flat = TypeVar("_Flat", bound="FlatBatch")


def _per_token(*, ndim: int = 1, **kwargs: Any) -> Any:
    return field(metadata={"kind": "token", "ndim": ndim}, **kwargs)


def _per_sequence(**kwargs: Any) -> Any:
    return field(metadata={"kind": "sequence"}, **kwargs)


def _per_sequence_list(**kwargs: Any) -> Any:
    return field(metadata={"kind": "list"}, **kwargs)


@dataclass(kw_only=True)
class FlatBatch:
    """``B`` sequences back to back; subclasses add fields and say of each whether it is per token or per sequence.

    Attributes:
        tokens: ``[num_tokens]`` int64, prompt and response ids of all sequences.
        cu_seqlens: ``[B+1]`` int64, ``cu_seqlens[b]`` is where sequence ``b`` starts; the last entry is ``num_tokens``.

    Raises:
        ValueError: if a field's length or dtype does not fit ``tokens`` and ``cu_seqlens``.
    """

    tokens: Tensor = _per_token()
    cu_seqlens: Tensor

    def __post_init__(self) -> None:
        """Checks every field's length once, at construction."""
        starts = self.cu_seqlens
        if starts.ndim != 1 or starts.numel() < 1 or starts.dtype != torch.int64:
            raise ValueError(f"cu_seqlens must be int64 of shape [B+1], got {starts.dtype} {tuple(starts.shape)}.")
        if int(starts[0]) != 0 or int(starts[-1]) != self.tokens.numel() or bool((starts.diff() < 0).any()):
            raise ValueError(
                f"cu_seqlens must rise from 0 to num_tokens={self.tokens.numel()}, got {starts.tolist()[:8]}..."
                f"{int(starts[-1])}: each sequence's tokens must be counted exactly once."
            )
        for spec, value in self._fields_of_kind("token", "sequence", "list"):
            size = len(value) if isinstance(value, list) else value.shape[0]
            expected = self.num_tokens if spec.metadata["kind"] == "token" else self.num_sequences
            if size != expected or (isinstance(value, Tensor) and value.ndim != spec.metadata.get("ndim", 1)):
                shape = size if isinstance(value, list) else tuple(value.shape)
                raise ValueError(
                    f"{type(self).__name__}.{spec.name} must have shape [{expected}] "
                    f"({spec.metadata['kind']}-wise for {self.num_sequences} sequences, {self.num_tokens} tokens), "
                    f"got {shape}."
                )

    def _fields_of_kind(self, *kinds: str) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if spec.metadata.get("kind") in kinds and value is not None:
                yield spec, value

    def __len__(self) -> int:
        """Number of sequences, ``B``."""
        return self.num_sequences

    @property
    def num_sequences(self) -> int:
        """Number of sequences, ``B``."""
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens over all sequences."""
        return self.tokens.numel()

    @property
    def lengths(self) -> Tensor:
        """``[B]`` int64: tokens of each sequence, prompt and response."""
        return self.cu_seqlens.diff()

    @property
    def position_ids(self) -> Tensor:
        """``[num_tokens]`` int64: each token's index in its own sequence."""
        starts = torch.repeat_interleave(self.cu_seqlens[:-1], self.lengths)
        return torch.arange(self.num_tokens, device=self.tokens.device) - starts

    @property
    def sequence_ids(self) -> Tensor:
        """``[num_tokens]`` int64: the sequence that each token belongs to."""
        return torch.repeat_interleave(torch.arange(self.num_sequences, device=self.tokens.device), self.lengths)

    def select(self: _Flat, rows: Sequence[int] | Tensor) -> _Flat:
        """A new batch of the given sequences, in the given order.

        Args:
            rows: sequence indices; may be empty, may repeat.
        """
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.cu_seqlens.device)
        lengths = self.lengths[index]
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        shift = torch.repeat_interleave(self.cu_seqlens[:-1][index] - cu_seqlens[:-1], lengths)
        token_index = torch.arange(int(cu_seqlens[-1]), device=index.device) + shift
        changes: dict[str, Any] = {"cu_seqlens": cu_seqlens}
        for spec, value in self._fields_of_kind("token", "sequence", "list"):
            if spec.metadata["kind"] == "list":
                changes[spec.name] = [value[row] for row in index.tolist()]
            else:
                changes[spec.name] = value[token_index if spec.metadata["kind"] == "token" else index]
        return dataclasses.replace(self, **changes)

    @classmethod
    def cat(cls: type[_Flat], batches: Sequence[_Flat]) -> _Flat:
        """Joins batches along the sequence axis.

        Raises:
            ValueError: if there is no batch, a field is set in one batch and missing in another, or batches were
                sampled at different temperatures.
        """
        if not batches:
            raise ValueError(f"{cls.__name__}.cat needs at least one batch.")
        first, offset, starts = batches[0], 0, [batches[0].cu_seqlens[:1]]
        for batch in batches:
            starts.append(batch.cu_seqlens[1:] + offset)
            offset += batch.num_tokens
        changes: dict[str, Any] = {"cu_seqlens": torch.cat(starts)}
        for spec in dataclasses.fields(cls):
            values = [getattr(batch, spec.name) for batch in batches]
            if spec.metadata.get("kind") is None:
                if spec.name != "cu_seqlens" and any(value != values[0] for value in values):
                    raise ValueError(f"{cls.__name__}.cat: {spec.name} differs between the batches: {values}.")
                continue
            if any(value is None for value in values):
                if not all(value is None for value in values):
                    raise ValueError(f"{cls.__name__}.cat: {spec.name} is set in some batches and missing in others.")
                continue
            joined_lists = spec.metadata["kind"] == "list"
            changes[spec.name] = [item for value in values for item in value] if joined_lists else torch.cat(values)
        return dataclasses.replace(first, **changes)

    def to(self: _Flat, device: torch.device | str) -> _Flat:
        """A new batch with every tensor on ``device``."""
        moved = {
            spec.name: value.to(device)
            for spec in dataclasses.fields(self)
            if isinstance(value := getattr(self, spec.name), Tensor)
        }
        return dataclasses.replace(self, **moved)


@dataclass(kw_only=True)
class RolloutSequence:
    """One sampled response as a rollout engine reports it.

    Attributes:
        uid: the prompt's identity; the group of a prompt is joined by it, never by position.
        sample_index: which of the group's responses this is, from 0.
        prompt_token_ids: ids of the prompt.
        response_token_ids: ids as sampled, never re-encoded from text; EOS included.
        log_probs: natural-log probability of each response id at the sampling temperature, as sampled.
        policy_version: version of the weights that sampled it.
        finish_reason: ``stop``, ``length``, ``abort``, ``skipped`` (never sent to the engine) or ``failed`` (the
            environment of its episode did).
        prompt: the prompt's text, for rewards and tables.
        response: the response's text.
        metadata: whatever the data source said about the prompt (the answer, the task).
        response_mask: per response id, False where the policy did not sample it (observations); None: all True.
        token_versions: per response id, where one response spans several versions; None: all ``policy_version``.
    """

    uid: str
    sample_index: int
    prompt_token_ids: list[int]
    response_token_ids: list[int]
    log_probs: list[float]
    policy_version: int
    finish_reason: str
    prompt: str = ""
    response: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    response_mask: list[bool] | None = None
    token_versions: list[int] | None = None

    def __post_init__(self) -> None:
        """Refuses ids, log-probs, masks and versions of different lengths."""
        expected = len(self.response_token_ids)
        for name in ("log_probs", "response_mask", "token_versions"):
            value = getattr(self, name)
            if value is not None and len(value) != expected:
                raise ValueError(
                    f"Rollout {self.uid!r} sample {self.sample_index}: {expected} response ids but {len(value)} {name}."
                    f" Every sampled id needs its own; the rollout engine must cut both at the same place."
                )


@dataclass(kw_only=True)
class Rollouts(FlatBatch):
    """Sampled responses with their prompts, as the rollout engine reported them.

    Attributes:
        response_mask: ``[num_tokens]`` bool, True on tokens sampled by the policy (EOS included).
        rollout_log_probs: ``[num_tokens]`` fp32, nats, at the sampling temperature; 0 off the response mask.
        token_versions: ``[num_tokens]`` int64, policy version that sampled the token; -1 off the response mask.
        uids: per sequence, the prompt's identity.
        sample_indices: per sequence, its index in the group.
        finish_reasons: per sequence, ``stop``, ``length``, ``abort`` or ``skipped``.
        prompts: per sequence, prompt text.
        responses: per sequence, response text.
        metadata: per sequence, the data source's facts.
        temperature: sampling temperature, at which all log-probs are meant.
        rewards: ``[B]`` fp32, None before scoring; NaN marks a row whose reward failed.
        reward_components: per sequence, what each of several rewards gave, unweighted; None if there is one alone.
        baseline_rewards: ``[B]`` fp32, reward of the greedy rollout of the sequence's prompt, NaN where it failed; None
            if none was sampled.
    """

    response_mask: Tensor = _per_token()
    rollout_log_probs: Tensor = _per_token()
    token_versions: Tensor = _per_token()
    uids: list[str] = _per_sequence_list()
    sample_indices: list[int] = _per_sequence_list()
    finish_reasons: list[str] = _per_sequence_list()
    prompts: list[str] = _per_sequence_list()
    responses: list[str] = _per_sequence_list()
    metadata: list[dict[str, Any]] = _per_sequence_list()
    temperature: float = 1.0
    rewards: Tensor | None = _per_sequence(default=None)
    reward_components: list[dict[str, float]] | None = _per_sequence_list(default=None)
    baseline_rewards: Tensor | None = _per_sequence(default=None)

    @classmethod
    def from_sequences(cls, sequences: Sequence[RolloutSequence], *, temperature: float = 1.0) -> Rollouts:
        """Packs sampled sequences, in order.

        Raises:
            ValueError: if ``sequences`` is empty: an engine that returns nothing has failed.
        """
        if not sequences:
            raise ValueError("The rollout engine returned no sequences; expected one for every prompt and sample.")
        ids: list[int] = []
        mask: list[bool] = []
        log_probs: list[float] = []
        versions: list[int] = []
        starts = [0]
        for seq in sequences:
            prompt_length, response_length = len(seq.prompt_token_ids), len(seq.response_token_ids)
            sampled = seq.response_mask or [True] * response_length
            token_versions = seq.token_versions or [seq.policy_version] * response_length
            ids += seq.prompt_token_ids + seq.response_token_ids
            mask += [False] * prompt_length + sampled
            log_probs += [0.0] * prompt_length + [
                lp if on else 0.0 for lp, on in zip(seq.log_probs, sampled, strict=True)
            ]
            versions += [-1] * prompt_length + [v if on else -1 for v, on in zip(token_versions, sampled, strict=True)]
            starts.append(len(ids))
        return cls(
            tokens=torch.tensor(ids, dtype=torch.int64),
            cu_seqlens=torch.tensor(starts, dtype=torch.int64),
            response_mask=torch.tensor(mask, dtype=torch.bool),
            rollout_log_probs=torch.tensor(log_probs, dtype=torch.float32),
            token_versions=torch.tensor(versions, dtype=torch.int64),
            uids=[seq.uid for seq in sequences],
            sample_indices=[seq.sample_index for seq in sequences],
            finish_reasons=[seq.finish_reason for seq in sequences],
            prompts=[seq.prompt for seq in sequences],
            responses=[seq.response for seq in sequences],
            metadata=[seq.metadata for seq in sequences],
            temperature=temperature,
        )

    @property
    def response_lengths(self) -> Tensor:
        """``[B]`` int64: sampled tokens of each sequence."""
        counts = torch.zeros(self.num_sequences, dtype=torch.int64, device=self.tokens.device)
        return counts.index_add_(0, self.sequence_ids, self.response_mask.long())


@dataclass(kw_only=True)
class Experience(FlatBatch):
    """What the update reads: rollouts with advantages and the log-probs of the other policies.

    Attributes:
        response_mask: ``[num_tokens]`` bool, tokens sampled by the policy.
        loss_mask: ``[num_tokens]`` bool, the response tokens that train: rows without a reward are all False.
        rollout_log_probs: ``[num_tokens]`` fp32, as the rollout engine reported them.
        advantages: ``[num_tokens]`` fp32, 0 off the loss mask.
        uids: per sequence, the prompt's identity.
        sample_indices: per sequence, its index in the group.
        temperature: sampling temperature; the engine divides logits by it.
        old_log_probs: ``[num_tokens]`` fp32, by the trainer before the update; None on an update that is the only
            one of its rollouts, where they equal the current log-probs.
        ref_log_probs: ``[num_tokens]`` fp32, by the reference, or None.
        values: ``[num_tokens]`` fp32, by the critic before the update, or None.
        returns: ``[num_tokens]`` fp32, or None.
        loss_weights: ``[num_tokens]`` fp32, one per token, from the mini-batch's global counts; 0 off the loss mask.
        selected: ``[num_tokens]`` bool, tokens that a loss treats apart, chosen over the whole mini-batch; or None.
        routed_experts: ``[num_tokens, num_layers, experts_per_token]`` int32, experts that the actor's update sends a
            token to, -1 where its router chooses; None leaves every choice to the router.
    """

    response_mask: Tensor = _per_token()
    loss_mask: Tensor = _per_token()
    rollout_log_probs: Tensor = _per_token()
    advantages: Tensor = _per_token()
    uids: list[str] = _per_sequence_list()
    sample_indices: list[int] = _per_sequence_list()
    temperature: float = 1.0
    old_log_probs: Tensor | None = _per_token(default=None)
    ref_log_probs: Tensor | None = _per_token(default=None)
    values: Tensor | None = _per_token(default=None)
    returns: Tensor | None = _per_token(default=None)
    loss_weights: Tensor | None = _per_token(default=None)
    selected: Tensor | None = _per_token(default=None)
    routed_experts: Tensor | None = _per_token(default=None, ndim=3)


@dataclass(kw_only=True)
class PromptBatch:
    """One data-parallel rank's share of the prompts of an RL step.

    Attributes:
        uids: identity of each prompt.
        prompt_token_ids: ids of each prompt, chat template applied.
        prompts: text of each prompt, for rewards and tables.
        metadata: per prompt, the data source's facts (the answer, the task).
        rollouts: put here by the rollout callback, absent before.
    """

    uids: list[str]
    prompt_token_ids: list[list[int]]
    prompts: list[str]
    metadata: list[dict[str, Any]]
    rollouts: Rollouts | None = None

    def __post_init__(self) -> None:
        """Refuses fields of different lengths and repeated uids."""
        sizes = {name: len(getattr(self, name)) for name in ("uids", "prompt_token_ids", "prompts", "metadata")}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"PromptBatch fields must have one entry per prompt, got {sizes}.")
        if len(set(self.uids)) != len(self.uids):
            repeated = sorted({uid for uid in self.uids if self.uids.count(uid) > 1})
            raise ValueError(f"PromptBatch uids must differ within a step, repeated: {repeated[:5]}.")

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.uids)

    def to(self, device: torch.device | str) -> PromptBatch:
        """A new batch without rollouts, so that a batch which a loader keeps never holds an earlier step's."""
        return dataclasses.replace(self, rollouts=None)


@dataclass(kw_only=True)
class ModelOutputs:
    """What an engine computes for each token of a micro-batch; a loss function reads it.

    Attributes:
        log_probs: ``[num_tokens]`` fp32, log-prob of the token given those before it; 0 at a sequence's first token.
        entropy: ``[num_tokens]`` fp32, entropy of the distribution that the token was drawn from; None if not asked.
        values: ``[num_tokens]`` fp32, by a value model, at the token that is about to be drawn; None otherwise.
        routed_experts: ``[num_tokens, num_layers, experts_per_token]`` int32, experts that each token went to, -1 in
            layers without; None where the engine was not told to keep them.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    routed_experts: Tensor | None = None


@dataclass(kw_only=True)
class LossOutput:
    """A loss as per-token terms; the engine forms ``(terms * loss_weights).sum()``.

    Attributes:
        terms: ``[num_tokens]`` fp32, differentiable, unweighted, 0 off the loss mask.
        metrics: by name, each declaring its own reduction.
    """

    terms: Tensor
    metrics: dict[str, Metric] = field(default_factory=dict)
