from __future__ import annotations

from itertools import islice

import pytest
import torch

from lightning_rlhf.data import EncodedPrompt, Prompt, PromptDataLoader, PromptDataset, PromptSampler, collate_prompts


def loader(num_prompts: int = 10, *, prefix: str = "p", in_step: object = None, **kwargs: object) -> PromptDataLoader:
    prompts = [
        EncodedPrompt(prompt=Prompt(uid=f"{prefix}{i}", prompt=f"text {i}", metadata={"answer": i}), token_ids=[i, i])
        for i in range(num_prompts)
    ]
    sampler = PromptSampler(num_prompts, **{"prompts_per_step": 4, **kwargs})
    return PromptDataLoader(PromptDataset(prompts), sampler, in_step=in_step)


def uids(batches: object) -> list[list[str]]:
    return [batch.uids for batch in batches]


def test_batches_hold_what_the_source_said() -> None:
    first = next(iter(loader(shuffle=False, num_replicas=2, rank=1)))
    assert first.uids == ["p2", "p3"]
    assert first.prompt_token_ids == [[2, 2], [3, 3]]
    assert first.prompts == ["text 2", "text 3"]
    assert first.metadata == [{"answer": 2}, {"answer": 3}]
    assert first.rollouts is None


def test_a_reward_that_writes_into_metadata_does_not_change_the_data() -> None:
    prompt = EncodedPrompt(prompt=Prompt(uid="a", prompt="x", metadata={"answer": 1}), token_ids=[1])
    collate_prompts([prompt]).metadata[0]["answer"] = 2
    assert prompt.prompt.metadata == {"answer": 1}


def test_passes_go_on_and_the_position_counts_global_prompts() -> None:
    data = loader(num_replicas=2, rank=0)
    assert len(data) == 2
    first, second = uids(data), uids(data)
    order = [[f"p{i}" for i in data.sampler.order(epoch)] for epoch in (0, 1)]
    assert first == [order[0][0:2], order[0][4:6]]
    assert second == [order[1][0:2], order[1][4:6]]
    state = data.state_dict()
    assert (state["prompts_consumed"], state["epoch"], state["prompts_in_epoch"]) == (16, 1, 8)


def test_restoring_the_state_continues_also_on_another_number_of_ranks() -> None:
    whole = [uid for batch in islice(loader(), 2) for uid in batch.uids]
    data = loader()
    next(iter(data))
    rest = []
    for rank in (0, 1):
        other = loader(num_replicas=2, rank=rank)
        other.load_state_dict(data.state_dict())
        rest += next(iter(other)).uids
    assert rest == whole[4:]


def test_a_step_that_is_not_done_is_not_consumed() -> None:
    busy = False
    data = loader(in_step=lambda: busy)
    batches = iter(data)
    next(batches)
    second = next(batches).uids
    busy = True
    state = data.state_dict()
    assert state["prompts_consumed"] == 4
    other = loader()
    other.load_state_dict(state)
    assert next(iter(other)).uids == second
    busy = False
    assert data.state_dict()["prompts_consumed"] == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "with seed=0, but now seed is 1"),
        ({"shuffle": False}, "with shuffle=True, but now shuffle is False"),
        ({"num_prompts": 9}, "with num_prompts=10, but now num_prompts is 9"),
        ({"prefix": "q"}, "with fingerprint='"),
    ],
)
def test_a_position_in_other_data_is_refused(change: dict[str, object], message: str) -> None:
    state = loader().state_dict()
    with pytest.raises(ValueError, match=message):
        loader(**change).load_state_dict(state)


def test_iterating_leaves_the_global_random_numbers_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    list(loader())
    assert torch.equal(torch.rand(3), expected)
