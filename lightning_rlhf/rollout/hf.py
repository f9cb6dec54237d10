"""The reference rollout engine: a Hugging Face model sampled step by step, for tests and for comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.contracts.rollout import RolloutEngine, SamplingConfig, request_seed
from lightning_rlhf.rollout.gate import SamplingGate
from lightning_rlhf.rollout.model_directory import ModelDirectory, weight_names_of
from lightning_rlhf.rollout.responses import (
    RolloutCounters,
    SampledResponse,
    check_scored,
    length_at_stop,
    response_budget,
    to_sequence,
)
from lightning_rlhf.types import PromptBatch, Rollouts, RolloutSequence


class HFReferenceEngine(RolloutEngine):
    """Samples from its own copy of a Hugging Face causal language model, one group of a prompt at a time.

    Clear and exact rather than fast: a prompt is read once, its ``n`` samples grow side by side, each from a generator
    of its own seed, so that a sample depends on nothing but (base seed, rl_step, uid, sample index) and the weights.

    Args:
        model: directory (or cached name) with config and tokenizer; its weights are not read, a push brings them.
        dtype: of weights and compute; log-probs are fp32.
        max_model_len: limit on prompt and response together.
        device: where it runs.

    Attributes:
        counters: prompts skipped and samples dropped so far.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        max_model_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.directory = ModelDirectory.read(model)
        self.max_model_len = max_model_len
        self.counters = RolloutCounters()
        self._device = torch.device(device)
        self._dtype = dtype
        self._gate = SamplingGate()
        self._resets = 0
        with torch.random.fork_rng():  # the initialisation that a push replaces must not move the trainer's RNG
            network = AutoModelForCausalLM.from_config(self.directory.config, dtype=dtype)
        self._names = weight_names_of(network)
        self._model: Any = network.to(self._device).eval().requires_grad_(False)

    @property
    @override
    def compute_dtype(self) -> torch.dtype:
        """As asked for."""
        return self._dtype

    @torch.no_grad()
    def generate(self, prompts: PromptBatch, sampling: SamplingConfig, *, rl_step: int) -> Rollouts:
        """Draws ``sampling.n`` responses for each prompt; see `RolloutEngine.generate`.

        Raises:
            ValueError: for a guide, which this engine does not know.
        """
        if sampling.guide is not None:
            raise ValueError("The Hugging Face reference engine samples without a guide; use vLLM for guided decoding.")
        sequences: list[RolloutSequence] = []
        with self._gate.requests(self.weight_version) as version:
            for index, prompt in enumerate(prompts.prompt_token_ids):
                budget = response_budget(
                    len(prompt), max_model_len=self.max_model_len, max_new_tokens=sampling.max_new_tokens
                )
                seeds = [
                    request_seed(sampling.seed, rl_step=rl_step, uid=prompts.uids[index], sample_index=sample)
                    for sample in range(sampling.n)
                ]
                responses: Sequence[SampledResponse | None] = [None] * sampling.n
                if budget:
                    responses = self._sample_group(prompt, sampling, seeds=seeds, budget=budget)
                else:
                    self.counters.skipped_prompts += 1
                sequences += [
                    to_sequence(
                        prompts,
                        index,
                        sample_index=sample,
                        response=response,
                        policy_version=version,
                        vocab_size=self.directory.vocab_size,
                        decode=self.directory.decode,
                        counters=self.counters,
                    )
                    for sample, response in enumerate(responses)
                ]
        return Rollouts.from_sequences(sequences, temperature=sampling.temperature or 1.0)

    def _sample_group(
        self, prompt: Sequence[int], sampling: SamplingConfig, *, seeds: Sequence[int], budget: int
    ) -> list[SampledResponse]:
        """The samples of one prompt; those that are open have equal lengths, so that nothing needs padding."""
        ends = self.directory.end_token_ids | set(sampling.stop_token_ids)
        generators = [torch.Generator(self._device).manual_seed(seed) for seed in seeds]
        responses = [
            SampledResponse(token_ids=[], log_probs=[], finish_reason="length", token_versions=[]) for _ in seeds
        ]
        open_rows, cache, resets = list(range(len(seeds))), None, self._resets
        for _ in range(budget):
            if not self._gate.goes_on():
                for row in open_rows:
                    responses[row].finish_reason = "abort"
                break
            if cache is None or resets != self._resets:
                cache, resets = None, self._resets
                inputs = [[*prompt, *responses[row].token_ids] for row in open_rows]
            else:
                inputs = [responses[row].token_ids[-1:] for row in open_rows]
            with self._gate.step():
                output = self._model(
                    torch.tensor(inputs, device=self._device), past_key_values=cache, use_cache=True, logits_to_keep=1
                )
                version = self._version_in_use()
            cache = output.past_key_values
            scores = sampling_log_probs(output.logits[:, -1], sampling)
            going = []
            for place, row in enumerate(open_rows):
                token = _draw(scores[place], generators[row], greedy=sampling.temperature == 0)
                response = responses[row]
                response.token_ids.append(token)
                response.log_probs.append(float(scores[place, token]))
                response.token_versions.append(version)
                length = length_at_stop(
                    response.token_ids, decode=self.directory.decode, stop=sampling.stop, stop_token_ids=ends
                )
                if length is None:
                    going.append(place)
                else:
                    response.finish_reason = "stop"
            if not going:
                break
            if len(going) < len(open_rows):
                cache.batch_select_indices(torch.tensor(going, device=self._device))
            open_rows = [open_rows[place] for place in going]
        return responses

    def _version_in_use(self) -> int:
        if self.weight_version is None:
            raise RuntimeError("The weights became invalid while requests waited: a push failed. Abort them first.")
        return self.weight_version

    @torch.no_grad()
    def score(self, token_ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        """Log-prob of each id given those before it; see `RolloutEngine.score`.

        Raises:
            ValueError: if a sequence is empty or longer than ``max_model_len``, or the temperature is not above 0.
        """
        check_scored(token_ids, longest=self.max_model_len, temperature=temperature)
        rows: list[list[float]] = []
        with self._gate.requests(self.weight_version):
            for ids in token_ids:
                inputs = torch.tensor([list(ids)], device=self._device)
                logits = self._model(inputs).logits[0, :-1].float() / temperature
                chosen = torch.log_softmax(logits, -1).gather(-1, inputs[0, 1:, None]).squeeze(-1)
                rows.append([0.0, *chosen.tolist()])
        return rows

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies a whole push in place; a push that fails leaves the engine without a version.

        Raises:
            ValueError: naming tensors that are unknown, of another shape, repeated or missing.
            RuntimeError: if the weights are asleep.
        """
        if "weights" in self._gate.asleep:
            raise RuntimeError("The engine's weights are asleep; wake_up(['weights']) before a push.")
        own = self._model.state_dict(keep_vars=True)
        complete = False
        try:
            in_files = {}
            for name, tensor in self._names.check(named_tensors):
                if name not in own:
                    in_files[name] = tensor.to(self._device, copy=True)
                elif own[name].data_ptr() != tensor.data_ptr():  # else it has been written there
                    own[name].copy_(tensor)
            if in_files:
                self._join(in_files, own)
            complete = True
        finally:
            if not complete:
                self.weight_version = None

    @override
    def weight_destinations(self) -> dict[str, Tensor]:
        """All of the model; what a push brings in the form of files goes elsewhere first."""
        if "weights" in self._gate.asleep:
            return {}
        return {name: tensor for name, tensor in self._model.state_dict().items() if name in self._names.shapes}

    def _join(self, in_files: dict[str, Tensor], own: dict[str, Tensor]) -> None:
        """Fills tensors that transformers makes of several ones of a file, by its own loader."""
        others = {name: tensor for name, tensor in own.items() if name in self._names.stored}
        loaded = type(self._model).from_pretrained(
            None, config=self._model.config, state_dict={**others, **in_files}, dtype=self._model.dtype
        )
        for name, tensor in loaded.state_dict().items():
            if name not in others:
                own[name].copy_(tensor)

    def read_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Copies of the named tensors; this engine holds all of them."""
        own = self._model.state_dict()
        return {name: own[name].detach().clone() for name in names if name in own}

    def reset_prefix_cache(self) -> None:
        """Has requests that wait in a pause compute their keys and values again; no others are kept."""
        self._resets += 1

    def abort(self) -> None:
        """Ends the requests in flight at the next token; those not begun give empty ``abort`` rows."""
        self._gate.abort()

    def pause(self) -> None:
        """Stops sampling between two tokens."""
        self._gate.pause()

    def resume(self) -> None:
        """Goes on."""
        self._gate.resume()

    def sleep(self, level: int = 1) -> None:
        """Level 1 keeps the weights where they are; level 2 frees the parameters, keeps the buffers."""
        self._gate.sleep(level)
        if level == 2:
            self.weight_version = None
            for parameter in self._model.parameters():
                parameter.untyped_storage().resize_(0)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes the memory again; the values come with the push."""
        if "weights" in self._gate.wake_up(tags):
            for parameter in self._model.parameters():
                parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())

    def release_kv_cache(self) -> None:
        """Nothing to release: there is no cache between two calls."""

    def shutdown(self) -> None:
        """Drops the model."""
        self._model = None
        self.weight_version = None


def sampling_log_probs(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Log-probs that a token is drawn from: temperature, then min-p, top-k and top-p, then renormalised.

    The order and the rules at the borders are vLLM's, and so is greedy sampling (temperature 0), whose log-probs are
    those at temperature 1.

    Args:
        logits: ``[rows, vocabulary]``.
        sampling: how responses are drawn.

    Returns:
        ``[rows, vocabulary]`` fp32, minus infinity for what cannot be drawn.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        return torch.log_softmax(logits, -1)
    logits = logits / sampling.temperature
    if sampling.min_p > 0:
        probs = torch.softmax(logits, -1)
        logits = logits.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), float("-inf"))
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest_kept = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    if sampling.top_p < 1:
        ascending, order = logits.sort(dim=-1)
        outside = torch.softmax(ascending, -1).cumsum(-1) <= 1 - sampling.top_p
        outside[:, -1] = False
        logits = logits.masked_fill(outside.scatter(-1, order, outside), float("-inf"))
    return torch.log_softmax(logits, -1)


def _draw(log_probs: Tensor, generator: torch.Generator, *, greedy: bool) -> int:
    if greedy:
        return int(log_probs.argmax())
    return int(torch.multinomial(log_probs.exp(), 1, generator=generator))
