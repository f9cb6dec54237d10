"""What ``lightning-rlhf doctor`` tries, each in a process of its own.

``python -m lightning_rlhf.cli.doctor_tries NAME`` runs one. A try prints one line about what it did and ends with
status 0, or ends with an error. It may crash, hang or fill the memory: the process that waits for it does not.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PROMPTS = ("1 2 3", "4 5 6", "7 8 9", "2 4 6")


class TryError(RuntimeError):
    """A try that ran to its end and found that it does not work."""


def smoke_step() -> str:
    """One GRPO step of a tiny model through the Trainer: sampling, rewards, update, weight push, on this machine."""
    metrics = _step(weight_sync="naive")
    return (
        f"one GRPO step on {_device()}: {metrics['rollout/num_tokens']:.0f} tokens, loss {metrics['actor/loss']:.3g}, "
        f"gradient norm {metrics['actor/grad_norm']:.3g}"
    )


def parity_of(strategy: str, layout: dict[str, int]) -> str:
    """Trains a fixed batch through a layout, and compares every number with one process."""
    from lightning_rlhf.parity.run import run_parity

    report = run_parity(strategy=strategy, layout=layout)
    sizes = ", ".join(f"{axis}={size}" for axis, size in layout.items())
    if report.first_divergence is not None:
        raise TryError(f"{sizes}: differs from one process, first in {report.first_divergence}")
    return f"{sizes} equals one process on {report.device_type}"


def vllm_generates() -> str:
    """vLLM samples from a tiny model, with the weights that it is given."""
    from lightning_rlhf.contracts.rollout import SamplingConfig
    from lightning_rlhf.rollout.vllm import VLLMEngine
    from lightning_rlhf.types import PromptBatch

    with tempfile.TemporaryDirectory(prefix="lightning_rlhf_doctor_") as folder:
        model = _write_model(Path(folder))
        engine = VLLMEngine(model, max_model_len=64, max_num_seqs=8, kv_cache_bytes=64 * 2**20)
        try:
            engine.load_weights(iter(_tiny_model().named_parameters()))
            engine.weight_version = 0
            batch = PromptBatch(
                uids=["a", "b"], prompt_token_ids=[[5, 6, 7], [8, 9]], prompts=["", ""], metadata=[{}, {}]
            )
            rollouts = engine.generate(batch, SamplingConfig(n=2, max_new_tokens=4), rl_step=0)
        finally:
            engine.shutdown()
    return f"{len(rollouts)} responses, {int(rollouts.response_mask.sum())} tokens on {_device()}"


def checkpoint_engine(name: str) -> str:
    """Carries three tensors from a sender to a receiver and compares them."""
    from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry

    importlib.import_module("lightning_rlhf.weights")
    if name == "disk":
        with tempfile.TemporaryDirectory(prefix="lightning_rlhf_doctor_") as folder:
            return _carry(CheckpointEngineRegistry.new(name, folder=folder), name)
    return _carry(CheckpointEngineRegistry.new(name), name)


def _carry(sender: Any, name: str) -> str:
    sent = {
        "first": torch.arange(1000, dtype=torch.float32),
        "second": torch.full((3, 5), 0.5, dtype=torch.bfloat16),
        "third": torch.tensor(7.0),
    }
    sent = {key: value.to(_device()) for key, value in sent.items()}
    received = _carry_remote(sender, name, sent) if sender.remote else _carry_here(sender, sent)
    if received.keys() != sent.keys():
        raise TryError(f"sent {sorted(sent)}, received {sorted(received)}")
    for key, value in sent.items():
        if received[key].dtype != value.dtype or not torch.equal(received[key].cpu(), value.cpu()):
            raise TryError(f"tensor {key!r} arrived changed")
    return f"{len(sent)} tensors carried {'between two engines' if sender.remote else 'within the process'}"


def _carry_here(engine: Any, sent: dict[str, Tensor]) -> dict[str, Tensor]:
    engine.prepare()
    engine.init_process_group(engine.build_topology(trainer_world_size=1, receiver_ids=["here"]))
    engine.send_weights(iter(sent.items()))
    received = {name: tensor.clone() for name, tensor in engine.receive_weights()}
    engine.finalize()
    return received


def _carry_remote(sender: Any, name: str, sent: dict[str, Tensor]) -> dict[str, Tensor]:
    """The receiver is a second engine on a thread; both sides block until they have met."""
    from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry, Invitation

    received: dict[str, Tensor] = {}
    failure: list[BaseException] = []
    sender.prepare()
    topology = sender.build_topology(trainer_world_size=1, receiver_ids=["doctor"])
    invitation = Invitation.from_json(sender.invitation("doctor").to_json())
    receiver = CheckpointEngineRegistry.new(name, **invitation.settings)

    def receive() -> None:
        try:
            receiver.join(invitation)
            received.update((key, tensor.clone()) for key, tensor in receiver.receive_weights())
            receiver.finalize()
        except BaseException as error:  # noqa: BLE001 (raised below, on the thread that can say so)
            failure.append(error)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    sender.init_process_group(topology)
    sender.send_weights(iter(sent.items()))
    sender.finalize()
    thread.join()
    receiver.close()
    sender.close()
    if failure:
        raise failure[0]
    return received


def _distinct_characters(_prompts: list[str], responses: list[str], _metadata: list[dict[str, Any]]) -> list[float]:
    """A reward that differs from response to response."""
    return [float(len(set(response))) for response in responses]


def _step(*, weight_sync: str) -> dict[str, float]:
    import lightning.pytorch as pl

    from lightning_rlhf.callbacks import HFRollout, WeightSync
    from lightning_rlhf.data import ListPrompts, PromptDataModule
    from lightning_rlhf.modules import GRPO

    with tempfile.TemporaryDirectory(prefix="lightning_rlhf_doctor_") as folder:
        model = _write_model(Path(folder))
        module = GRPO(
            model=str(model),
            reward=_distinct_characters,
            optimizer=partial(torch.optim.AdamW, lr=1e-3),
            max_rl_steps=1,
        )
        rollout = HFRollout(num_rollouts=4, max_new_tokens=8, max_model_len=64)
        trainer = pl.Trainer(
            strategy="auto",
            devices=1,
            max_epochs=1,
            callbacks=[rollout, WeightSync(engine=weight_sync)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, PromptDataModule(ListPrompts(list(PROMPTS)), prompts_per_step=4))
        rollout.shutdown()
    if module.policy_version != 1 or module.last_metrics.get("sync/version") != 1.0:
        raise TryError(f"the step ended with policy version {module.policy_version} and {module.last_metrics}")
    return module.last_metrics


def _tiny_model() -> Any:
    """A decoder of 100,000 parameters; its head size is the smallest that vLLM's CPU kernels take."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def _write_model(folder: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(chr(code) for code in range(33, 126))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    model = folder / "model"
    _tiny_model().save_pretrained(model)
    fast.save_pretrained(model)
    return model


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


TRIES: dict[str, Callable[[], str]] = {
    "smoke": smoke_step,
    "backend:fsdp2": partial(parity_of, "fsdp2_rl", {"dp_shard": 2}),
    "backend:ulysses": partial(parity_of, "ulysses_rl", {"sp": 2}),
    "backend:megatron": partial(parity_of, "megatron_rl", {"tp": 2}),
    "rollout:vllm": vllm_generates,
}
"""By name; ``weights:<name>`` tries any checkpoint engine."""


@contextlib.contextmanager
def _stdout_kept_for_the_result() -> Iterator[None]:
    """What libraries print goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr if isinstance(sys.stderr, io.TextIOBase) else io.StringIO()):
        yield


def main(name: str) -> int:
    """Runs one try and prints its line."""
    kind, _, rest = name.partition(":")
    work = partial(checkpoint_engine, rest) if kind == "weights" else TRIES[name]
    with _stdout_kept_for_the_result():
        line = work()
    print(f"doctor: {line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
