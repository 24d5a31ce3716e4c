"""Trains a model of 58M parameters by GRPO, and stores its weights in bfloat16 after each step at each learning rate.

`python -m benchmarks.changes.trajectory FOLDER` writes FOLDER/LR/NUMBER.bin, the bytes of all weights in the order of the
trainer's stream, for as many steps as STEPS and the state before them, and FOLDER/tensors.json, their layout. The policy samples its
own rows: a prompt of random tokens, and completions whose reward is the share of tokens from the lower half of the vocabulary.
Engine, loss and optimizer are the product's. As it trains in bfloat16, the optimizer has weights and moments in single precision, and what is
sent are these weights rounded; only gradients are computed in single precision too, since this CPU has no bfloat16. The moments come
from WARM_UP steps at a larger rate.
"""

import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks.trainer.work import GROUP_SIZE, SIZES, advantages
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.sync.links.link import as_bytes
from rollmill.tasks.train.batch_training import UpdateLoop
from rollmill.tasks.train.checkpoints.hf_layout import weight_layers
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.deepspeed_engine import Engine
from rollmill.tasks.train.objective.objective import Objective
from rollmill.tasks.train.samples import Samples
from rollmill.tasks.train.service.ranks import join_ranks
from rollmill.tasks.train.weight_stream import WeightStream

RATES, STEPS = ("1e-06", "1e-05"), 3
WARM_UP_RATE, WARM_UP, SETTLING = 1e-4, 6, 2
N_GROUPS, N_PROMPT, N_COMPLETION = 4, 24, 8


def sample(model: PreTrainedModel, random: np.random.Generator) -> Samples:
    """Rows that the policy samples now, with their advantages."""
    vocabulary = model.config.vocab_size
    prompts = random.integers(0, vocabulary, (N_GROUPS, N_PROMPT)).repeat(GROUP_SIZE, axis=0)
    ids, found = torch.from_numpy(prompts), list[torch.Tensor]()
    with torch.no_grad():
        for _ in range(N_COMPLETION):
            logprobs = model(input_ids=ids).logits[:, -1].float().log_softmax(-1)
            chosen = torch.multinomial(logprobs.exp(), 1)
            found.append(logprobs.gather(1, chosen))
            ids = torch.cat([ids, chosen], 1)
    completions = ids[:, N_PROMPT:].numpy()
    rewards = (completions < vocabulary // 2).mean(axis=1) + random.normal(0, 1e-3, len(completions))
    print(f"reward {rewards.mean():.3f}", flush=True)
    mask = np.arange(N_PROMPT + N_COMPLETION) >= N_PROMPT
    logprobs = np.full(ids.shape, np.nan, np.float32)
    logprobs[:, mask] = torch.cat(found, 1).numpy()
    return Samples(
        trajectory_ids=[str(number) for number in range(len(completions))],
        envs=["benchmark"] * len(completions),
        temperatures=np.ones(len(completions), np.float32),
        advantages=advantages(rewards),
        token_ids=list(ids.numpy()),
        loss_masks=[mask] * len(completions),
        logprobs=list(logprobs),
    )


def store(model: PreTrainedModel, stream: WeightStream, path: Path) -> None:
    """Write the bytes of all weights of a model, with those between tensors as zeros."""
    last = stream.tensors[-1]
    weights = np.zeros(last.offset + last.size_bytes, np.uint8)
    for piece in stream.pieces(model):
        data = as_bytes(piece.data).numpy()
        weights[piece.offset : piece.offset + len(data)] = data
    weights.tofile(path)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SIZES["58M"], tie_word_embeddings=False)).save_pretrained(folder / "model")
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {**rank, "MASTER_PORT": str(free_port())}
    shared = {"dtype": "float32", "warmup_steps": 0, "gradient_checkpointing": False}
    config = TrainConfig.model_validate({**shared, "lr": WARM_UP_RATE})
    engine = Engine.load(config, str(folder / "model"), join_ranks(60.0).device)
    # The engine's model computes packed sequences.
    sampler = Qwen2ForCausalLM.from_pretrained(folder / "model")
    sent = Qwen2ForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    stream = WeightStream(sent, weight_layers(sent), 0, 1)
    (folder / "tensors.json").write_bytes(msgspec.json.encode(stream.tensors))
    random = np.random.default_rng(0)

    def train(rate: float, steps: int) -> None:
        config = TrainConfig.model_validate({**shared, "lr": rate})
        for _ in range(steps):
            sampler.load_state_dict(engine.model.state_dict())
            rows = sample(sampler, random)
            training = UpdateLoop(config, engine, rows, 0, Objective(config))
            training.run()
            assert not training.reason, training.reason

    train(WARM_UP_RATE, WARM_UP)
    for rate in RATES:
        train(float(rate), SETTLING)
        (folder / rate).mkdir()
        for number in range(STEPS + 1):
            if number:
                train(float(rate), 1)
            sent.load_state_dict(engine.model.state_dict())
            store(sent, stream, folder / rate / f"{number}.bin")


if __name__ == "__main__":
    main()
