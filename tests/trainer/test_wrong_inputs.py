"""Wrong inputs of each kind, and the message: what was got, what was expected, what to do. Most load no model.

What the command line refuses in a configuration is in ``tests/unit/cli/test_train_refuses.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from support.tiny import tiny_model, write_tiny_model
from support.toy import digit_reward, toy_data, toy_module, toy_trainer

from lightning_rlhf.callbacks import HFRollout, WeightSync
from lightning_rlhf.data import JSONLPrompts, ListPrompts, PromptDataModule
from lightning_rlhf.strategies import FSDP2RLStrategy, UlyssesRLStrategy


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and with files that are not what they seem."""
    root = tmp_path_factory.mktemp("inputs")
    write_tiny_model(root / "tiny", layers=1)
    (root / "empty").mkdir()
    (root / "bad.jsonl").write_text('{"prompt": "a", "answer": 1}\nnot json\n')
    (root / "nokey.jsonl").write_text('{"question": "a", "answer": 1}\n')
    (root / "blank.jsonl").write_text("\n")
    (root / "folder.ckpt").mkdir()
    state = {"state_dict": {}, "pytorch-lightning_version": "2.6.6", "epoch": 0, "global_step": 0, "loops": {}}
    torch.save(state, root / "other.ckpt")
    return root


def fit(place: Path, module: Any = None, data: Any = None, *, ckpt: str | None = None, **trainer: Any) -> None:
    """A run of the micro model with one thing wrong."""
    given = toy_module(place / "tiny", max_rl_steps=1) if module is None else module
    path = None if ckpt is None else place / ckpt
    toy_trainer(place / "run", **trainer).fit(given, toy_data() if data is None else data, ckpt_path=path)


def rewarded(place: Path, reward: Any) -> None:
    fit(place, toy_module(place / "tiny", reward=reward, max_rl_steps=1))


async def late(prompts: Any, responses: Any, metadata: Any) -> list[float]:
    return [1.0] * len(responses)


Wrong = tuple[Callable[[Path], Any], type[Exception], str]

WRONG: dict[str, Wrong] = {
    # configuration
    "optimizer by name": (
        lambda at: toy_module(at / "tiny", optimizer="adamw"),
        TypeError,
        r"optimizer must be a function that builds it from the parameters.*got 'adamw'.*partial\(torch\.optim\.AdamW",
    ),
    "optimizer built": (
        lambda at: toy_module(at / "tiny", optimizer=torch.optim.SGD([torch.zeros(1)], lr=1.0)),
        TypeError,
        r"optimizer must be a function.*got SGD",
    ),
    "schedule by name": (
        lambda at: toy_module(at / "tiny", lr_schedule="cosine"),
        TypeError,
        r"lr_schedule must be a function that builds it from the optimizer.*got 'cosine'",
    ),
    "both micro-batch limits": (
        lambda at: toy_module(at / "tiny", micro_batch_size=2, max_tokens_per_micro_batch=64),
        ValueError,
        r"Give micro_batch_size=2 or max_tokens_per_micro_batch=64, not both",
    ),
    "greedy sampling": (lambda at: HFRollout(temperature=0), ValueError, r"temperature=0 samples the same.*positive"),
    "top_p above one": (lambda at: HFRollout(top_p=2.0), ValueError, r"out of range.*top_p=2\.0 \(0 to 1\]"),
    "no rollouts": (lambda at: HFRollout(num_rollouts=0), ValueError, r"n=0 .*must be at least 1"),
    "no room for a prompt": (
        lambda at: HFRollout(max_new_tokens=64, max_model_len=64),
        ValueError,
        r"max_model_len=64 counts prompt and response.*max_new_tokens=64 leaves no token.*Raise max_model_len",
    ),
    "sync that is not": (
        lambda at: WeightSync(every="step"),  # type: ignore[arg-type]
        ValueError,
        r"every='step'\): expected 'optimizer_step', 'rollout' or a number",
    ),
    "weight sync against weight_sync=False": (
        lambda at: fit(at, rollout=HFRollout(weight_sync=False)),
        ValueError,
        r"HFRollout\(weight_sync=False\) samples from the starting weights.*leave one of the two out",
    ),
    # data
    "a list for a source": (
        lambda at: PromptDataModule(["1 + 1 ="], prompts_per_step=1),  # type: ignore[arg-type]
        TypeError,
        r"source must say where prompts come from, got list\. Use .*ListPrompts",
    ),
    "no file": (
        lambda at: JSONLPrompts(at / "none.jsonl").load(),
        FileNotFoundError,
        r"there is no file .*none\.jsonl",
    ),
    "not json": (
        lambda at: JSONLPrompts(at / "bad.jsonl").load(),
        ValueError,
        r"line 2: not valid JSON.*Mend the line",
    ),
    "another key": (
        lambda at: JSONLPrompts(at / "nokey.jsonl").load(),
        ValueError,
        r"line 1: no key 'prompt' \(the row has 'question', 'answer'\)",
    ),
    "nothing in it": (lambda at: JSONLPrompts(at / "blank.jsonl").load(), ValueError, r"holds no usable prompt"),
    "an empty prompt": (lambda at: ListPrompts(["a", ""]), ValueError, r"Prompt '1': the prompt is empty"),
    "a step too large": (
        lambda at: fit(at, data=toy_data(prompts_per_step=100)),
        ValueError,
        r"prompts_per_step=100, but there are only 12 prompts.*Give more prompts or a smaller step",
    ),
    "a prompt too long": (
        lambda at: fit(at, data=toy_data(max_prompt_tokens=3)),
        ValueError,
        r"max_prompt_tokens=3",
    ),
    "batches of something else": (
        lambda at: toy_trainer(at / "run").fit(toy_module(at / "tiny"), torch.utils.data.DataLoader([1, 2])),
        TypeError,
        r"samples responses to a PromptBatch, but the data loader gave Tensor\. Use rl\.PromptDataModule",
    ),
    # model
    "no directory": (
        lambda at: toy_module(at / "nowhere"),
        FileNotFoundError,
        r"model must be a Hugging Face directory.*no directory .*nowhere\. `lightning-rlhf prepare-model`",
    ),
    "no model in it": (lambda at: toy_module(at / "empty"), FileNotFoundError, r"empty has no config\.json\. Pass"),
    "no model at all": (lambda at: toy_module(None), TypeError, r"model must be .*, got NoneType\. Pass for example"),
    "a module that is no language model": (
        lambda at: fit(at, toy_module(torch.nn.Linear(2, 2), tokenizer=at / "tiny")),
        TypeError,
        r"model must be a directory, an id or a causal language model of transformers, got Linear",
    ),
    "a module without tokenizer": (
        lambda at: fit(at, toy_module(tiny_model(layers=1))),
        ValueError,
        r"model= is a module, so tokenizer= must be given too",
    ),
    "another LightningModule": (
        lambda at: toy_trainer(at / "run").fit(LightningModule(), toy_data()),
        Exception,
        r"training_step|OnPolicyModule such as rl\.GRPO, got LightningModule",
    ),
    # layout
    "sizes that do not fit": (
        lambda at: fit(at, strategy=UlyssesRLStrategy(sp_size=2)),
        ValueError,
        r"sp_size=2 does not fit 1 process\(es\): the sizes must multiply to devices x num_nodes",
    ),
    "a mini-batch that does not divide": (
        lambda at: fit(at, toy_module(at / "tiny", mini_batch_size=5)),
        ValueError,
        r"mini_batch_size=5 does not divide the 16 rollouts of a step.*use one of 1, 2, 4, 8, 16",
    ),
    "fork or spawn": (lambda at: toy_trainer(at, strategy="fsdp2"), ValueError, r"invalid strategy name.*'fsdp2'"),
    "half precision": (
        lambda at: fit(at, precision="bf16-true"),
        ValueError,
        r"precision='bf16-true'\) does not work.*choose '32-true' or 'bf16-mixed'",
    ),
    # reward
    "a number for a reward": (
        lambda at: rewarded(at, 1.0),
        TypeError,
        r"reward must be a function \(prompts, responses, metadata\).*got 1\.0, which cannot be called",
    ),
    "a reward of one argument": (
        lambda at: rewarded(at, lambda responses: [1.0] * len(responses)),
        TypeError,
        r"reward must be a function.*got <lambda>\(responses\): too many positional arguments\. Take all three",
    ),
    "an async reward": (lambda at: rewarded(at, late), TypeError, r"got late, which is async.*asyncio\.run"),
    "one number for all": (
        lambda at: rewarded(at, lambda p, r, m: 1.0),
        ValueError,
        r"gave a float; it must give a list with one number per response",
    ),
    "too few numbers": (
        lambda at: rewarded(at, lambda p, r, m: digit_reward(p, r, m)[:-1]),
        ValueError,
        r"gave 15 values for 16 responses; it must give one per response",
    ),
    # checkpoint
    "no checkpoint": (
        lambda at: fit(at, ckpt="none.ckpt"),
        FileNotFoundError,
        r"Checkpoint file not found: .*none\.ckpt",
    ),
    "a folder that is no checkpoint": (
        lambda at: fit(at, ckpt="folder.ckpt", strategy=FSDP2RLStrategy()),
        ValueError,
        r"folder\.ckpt is not a whole checkpoint of FSDP2RLStrategy: manifest\.json is missing.*Choose another",
    ),
    "a file for an RL strategy": (
        lambda at: fit(at, ckpt="other.ckpt", strategy=FSDP2RLStrategy()),
        ValueError,
        r"other\.ckpt is a file, as plain strategies write them; FSDP2RLStrategy reads the folders",
    ),
    "a checkpoint of another module": (
        lambda at: fit(at, ckpt="other.ckpt"),
        ValueError,
        r"has no 'lightning_rlhf' entry, so it was not saved by GRPO.*pass its directory as model=",
    ),
}

NEEDS_THE_MODEL = {
    "batches of something else", "a module that is no language model", "a mini-batch that does not divide",
    "one number for all", "too few numbers", "a checkpoint of another module",
    "no checkpoint", "a file for an RL strategy", "a folder that is no checkpoint",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRONG)
def test_the_message_says_what_to_do(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    loaded: list[Any] = []
    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: loaded.append(a) or load(*a, **k))
    wrong, kind, message = WRONG[name]
    try:
        with pytest.raises(kind, match=message):
            wrong(place)
    finally:
        if dist.is_initialized():  # an RL strategy starts one, also for a single process
            dist.destroy_process_group()
    assert not loaded or name in NEEDS_THE_MODEL


def test_there_are_thirty_of_them_and_most_load_no_model(place: Path) -> None:
    assert len(WRONG) >= 30
    assert len(NEEDS_THE_MODEL) < len(WRONG) / 4
    assert WRONG.keys() >= NEEDS_THE_MODEL
    partial(fit, place, data=toy_data())()  # a negative control: nothing wrong, nothing raised
