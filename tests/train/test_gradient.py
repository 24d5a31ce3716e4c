"""Gradient and metrics of a very uneven batch, however it is split, against plain double precision."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.memory_plan import HEAD_CHUNK_BYTES
from rollmill.tasks.train.samples import Samples, read_samples

Gradient = dict[str, torch.Tensor]
Metrics = dict[tuple[str, str, str], float]

N_ROWS, VOCABULARY = 24, 4096
SHIFT_NATS = 4.0 - math.log(VOCABULARY)
"""Brings the sampler's log-probabilities near those of a new model, so that ratios are about 1, within bounds and outside."""

UPDATES: dict[str, object] = {"epochs": 2, "updates_per_step": 2, "lr": 1.0, "warmup_steps": 0}
OBJECTIVES: dict[str, dict[str, object]] = {
    "token": {},
    "sequence": {"normalization": "sequence"},
    "fixed_length": {"normalization": "fixed_length", "normalization_tokens": 90},
    "gspo": {"loss": "gspo", "normalization": "sequence", "clip_low": 0.05, "clip_high": 0.05},
    "epochs": UPDATES,
}
"""Settings of the objective by name; the first is the default."""
BALANCED: dict[str, dict[str, object]] = {"balanced": {"router_aux_loss_coef": 0.3}}
DECAYS: dict[str, dict[str, object]] = {
    f"decay_{on}": {**UPDATES, "weight_decay": 0.2, "weight_decay_on": on} for on in ("all", "matrices")
}
"""Settings with a weight decay that halves the decayed parameters before the last gradient."""
EPS = 1.0
"""With so large an epsilon AdamW does not blow up rounding."""

WAYS = st.fixed_dictionaries(
    {
        "layout": st.sampled_from(["padded", "varlen"]),
        "micro_batch_tokens": st.sampled_from([120, 300, 700, 10_000]),
        "head_chunk_bytes": st.sampled_from([1 << 20, 512 << 20]),
        "gradient_checkpointing": st.booleans(),
    }
)


@dataclass(frozen=True)
class Case:
    """One way to train the batch.

    Attributes:
        way: settings that must not matter, and the size of the logits in memory.
        order: of the rows; where a batch makes several updates it decides to which a row belongs, and stays.
    """

    objective: str
    way: dict[str, object]
    order: list[int] = field(default_factory=lambda: list(range(N_ROWS)))
    model: str = "own"
    annotated: bool = False
    rank_by_rank: bool = False

    def job(self, models: dict[str, Path]) -> dict[str, object]:
        return {
            "model": str(models[self.model]),
            "order": self.order,
            "annotated": self.annotated,
            "rank_by_rank": self.rank_by_rank,
            "head_chunk_bytes": self.way.get("head_chunk_bytes", HEAD_CHUNK_BYTES),
            "config": (OBJECTIVES | DECAYS | BALANCED)[self.objective]
            | {name: self.way[name] for name in self.way.keys() - {"head_chunk_bytes"}},
        }


CHUNKED = {"zero_stage": 3, "layout": "padded", "micro_batch_tokens": 10_000, "head_chunk_bytes": 1 << 20}
TOKENS_OF_A_CHUNK = (1 << 20) // (4 * VOCABULARY)
WRONG = Case("token", {"layout": "padded", "micro_batch_tokens": 700}, rank_by_rank=True)


def cases_of(n_ranks: int, n_drawn: int) -> list[Case]:
    """Those that are drawn, ZeRO stages and objectives in turn, and some that are always there."""
    cases: list[Case] = []

    @settings(max_examples=n_drawn, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(WAYS, st.permutations(range(N_ROWS)))
    def draw(way: dict[str, object], order: list[int]) -> None:
        objective = list(OBJECTIVES)[len(cases) % len(OBJECTIVES)]
        kept = list(range(N_ROWS)) if objective == "epochs" else order
        cases.append(Case(objective, {"zero_stage": len(cases) % 4, **way}, kept))

    draw()
    chunked = [Case("token", CHUNKED), Case("token", CHUNKED, model="tied")]
    balanced = [Case("balanced", {"micro_batch_tokens": 300}, model="experts", annotated=n_ranks == 2)]
    half = {"dtype": "bfloat16", "gradient_checkpointing": True}
    halved = [Case("token", {"zero_stage": stage, **half}) for stage in (1, 2, 3)] if n_ranks == 2 else []
    stages = range(4) if n_ranks < 4 else ()
    decayed = [Case(name, {"zero_stage": stage}) for stage in stages for name in DECAYS]
    wrong = [WRONG] if n_ranks == 4 else []
    return [*cases, *chunked, *balanced, *decayed, Case("token", {}, annotated=True), *halved, *wrong]


@dataclass
class Naive:
    """A step, one segment of one row at a time, in double precision, the loss written out as in the papers.

    Attributes:
        gradient: of the last update.
        balance: tokens and load-balancing loss of each row of the last update that has an advantage.
        seen: values of the trained tokens by metric, with the environment of each, and whether its row has an advantage.
    """

    model: Path
    samples: Samples
    config: TrainConfig
    seen: dict[str, list[tuple[str, bool, float]]] = field(default_factory=lambda: defaultdict(list))
    gradient: Gradient = field(default_factory=dict)
    balance: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        policy = AutoModelForCausalLM.from_pretrained(
            self.model, dtype=torch.float64, experts_implementation="eager"
        )
        config, samples = self.config, self.samples
        kept = [
            each for each in policy.parameters() if each.dim() == 1 and config.weight_decay_on == "matrices"
        ]
        decayed = [each for each in policy.parameters() if all(each is not other for other in kept)]
        groups = [
            {"params": kept, "weight_decay": 0.0},
            {"params": decayed, "weight_decay": config.weight_decay},
        ]
        optimizer = torch.optim.AdamW(groups, lr=config.lr, eps=EPS)
        for number, part in enumerate(config.epochs * samples.split(config.updates_per_step)):
            optimizer.zero_grad()
            self.balance = []
            loss = average([self._row(policy, row, number) for row in part], config)
            if self.balance:
                n_tokens = sum(n for n, _ in self.balance)
                loss = (
                    loss + config.router_aux_loss_coef * sum(n * each for n, each in self.balance) / n_tokens
                )
            loss.backward()
            self.gradient = {name: each.grad.clone() for name, each in policy.named_parameters()}
            optimizer.step()

    def _row(self, policy: Any, row: int, number: int) -> torch.Tensor:
        """[T] loss of a row's trained tokens."""
        samples, advantage = self.samples, self._advantages(row)
        has_advantage = bool(advantage.any())
        trained = samples.loss_masks[row].nonzero()[0]
        every, log_p = self._segments(policy, row)
        sampler = torch.tensor(samples.logprobs[row][trained], dtype=torch.float64)
        found = log_p - sampler
        ratio = torch.exp(found)
        if self.config.loss.name == "gspo":
            # Each token has its own advantage: the paper's equation 13.
            ratio = torch.exp(found.mean()).detach() * torch.exp(found - found.detach())
        bounded = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high) * advantage
        loss = -torch.minimum(ratio * advantage, bounded)
        values = {
            "loss": loss,
            "advantage": advantage,
            "ratio": ratio,
            "entropy_nats": -(every.exp() * every).sum(1),
            "kl_nats": torch.exp(found) - 1 - found,
            "kl_sampler_nats": torch.exp(found) - 1 - found,
            "clip_fraction": (bounded < ratio * advantage).double(),
        } | ({} if number else {"mismatch_nats": found.abs()})
        for name, tokens in values.items():
            self.seen[name] += [(samples.envs[row], has_advantage, each) for each in tokens.tolist()]
        return loss

    def _advantages(self, row: int) -> torch.Tensor:
        """[T] advantages of a row's trained tokens."""
        assert self.samples.token_advantages is not None
        own = self.samples.token_advantages[row]
        n = int(self.samples.loss_masks[row].sum())
        return torch.tensor(own if len(own) else [self.samples.advantages[row]] * n, dtype=torch.float64)

    def _segments(self, policy: Any, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of a row's trained tokens, [T, vocabulary] and [T]: each segment's whole sequence by itself."""
        samples, parts, routers = self.samples, [], []
        wants = {"output_router_logits": True} if self.config.router_aux_loss_coef else {}
        sequences: list[list[int]] = []
        segments = samples.row_segments(row)
        ends = [*(each.start for each in segments[1:]), len(samples.token_ids[row])]
        for segment, end in zip(segments, ends, strict=True):
            inherited = sequences[segment.parent][: segment.prefix_tokens] if segment.parent >= 0 else []
            sequences.append([*inherited, *range(segment.start, end)])
            ids = samples.token_ids[row][sequences[-1]].astype("int64")
            output = policy(input_ids=torch.tensor(ids[None]), **wants)
            every = torch.log_softmax(output.logits[0] / float(samples.temperatures[row]), dim=-1)
            own = range(segment.prefix_tokens, len(ids))
            chosen = [at for at in own if samples.loss_masks[row][sequences[-1][at]]]
            before = [at - 1 for at in chosen]
            parts.append((every[before], every[before, ids[chosen]]))
            routers.append([each[segment.prefix_tokens :] for each in output.router_logits] if wants else [])
        if wants and self._advantages(row).any():
            settings = policy.config
            # A row's tokens count once, whichever segments they are context of.
            layers = tuple(torch.cat(each) for each in zip(*routers, strict=True))
            loss = load_balancing_loss_func(layers, settings.num_experts, settings.num_experts_per_tok)
            self.balance.append((len(samples.token_ids[row]), loss))
        found, log_p = zip(*parts, strict=True)
        return torch.cat(found), torch.cat(log_p)

    def metrics(self, *, annotated: bool) -> Metrics:
        """What the trainer reports of the tokens: those of rows with an advantage, or of all when they are annotated."""
        return dict(self._metrics(annotated=annotated))

    def _metrics(self, *, annotated: bool) -> Iterator[tuple[tuple[str, str, str], float]]:
        for env in (*sorted(set(self.samples.envs)), "all"):
            of_env = {
                name: [each for each in seen if env in (each[0], "all")] for name, seen in self.seen.items()
            }
            for name, seen in of_env.items():
                values = np.array([value for _, has_advantage, value in seen if has_advantage or annotated])
                stats = {"mean": values.mean()}
                if name != "clip_fraction":
                    stats |= {"std": values.std(), "min": values.min(), "max": values.max()}
                yield from (((f"train/{name}", env, stat), value) for stat, value in stats.items())
            n_skipped = 0 if annotated else sum(not has_advantage for _, has_advantage, _ in of_env["loss"])
            yield ("train/skipped_tokens", env, "value"), n_skipped
            yield ("train/trained_tokens", env, "value"), len(of_env["loss"]) - n_skipped
        rows = self.samples.split(1)[0]
        computed = [row for row in rows if annotated or self._advantages(row).any()]
        n_written = sum(map(len, (each for row in computed for each in self.samples.sequences(row))))
        n_tokens = sum(len(self.samples.token_ids[row]) for row in computed)
        yield ("train/computed_share", "all", "mean"), n_tokens / n_written
        n_without = sum(not self._advantages(row).any() for row in rows)
        yield ("train/skipped_rows", "all", "value"), 0 if annotated else n_without * self.config.epochs


def branch(batches: Any, row: Any) -> tuple[Any, ...]:
    """Further segments of a row: rewritten in the middle, sampled again after a prefix of that, and one that inherits nothing."""
    half = (row.n_prompt + row.n_completion) // 2
    return (batches.branch(0, half, 3, 4), batches.branch(1, half + 4, 0, 5), batches.branch(-1, 0, 4, 2))


def advantages_of(row: Any, number: int) -> tuple[float, ...]:
    """Advantages of a row's sampled tokens, all 0 for every second row that has them."""
    n = int(row.loss_mask().sum())
    return (0.0,) * n if number % 4 == 3 else tuple(np.random.default_rng(number).normal(size=n).tolist())


def average(rows: list[torch.Tensor], config: TrainConfig) -> torch.Tensor:
    if config.normalization == "token":
        return torch.cat(rows).mean()
    if config.normalization == "sequence":
        return torch.stack([row.mean() for row in rows]).mean()
    return torch.stack([row.sum() / config.normalization_tokens for row in rows]).mean()


def distance(one: Gradient, other: Gradient) -> float:
    """Largest norm of a tensor's difference, to the norm of the tensor."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in other)


def apart(one: Gradient, other: Gradient) -> float:
    """Norm of the whole difference, to the norm of the whole."""
    flat = [torch.cat([each[name].flatten().double() for name in sorted(other)]) for each in (one, other)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
EXPERTS = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {
    "dense": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(**SIZES, **EXPERTS),
}


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.service
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("kind", "n_drawn"),
    [
        ("dense", 2),
        pytest.param("dense", 40, marks=pytest.mark.long),
        pytest.param("tied", 20, marks=pytest.mark.long),
        pytest.param("experts", 20, marks=pytest.mark.long),
    ],
)
def test_gradient_and_metrics_do_not_depend_on_how_a_batch_is_split(
    kind: str,
    n_drawn: int,
    batches: Any,
    run_ranks: Callable[[str, int, dict[str, object]], None],
    tmp_path: Path,
) -> None:
    chosen = {"own": kind, "tied": "tied", "experts": "experts"}
    models = {name: tmp_path / name for name in chosen}
    for name, folder in models.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(MODELS[chosen[name]]).save_pretrained(folder)
    rows = [
        each._replace(advantage=0.0) if row % 3 == 1 else each
        for row, each in enumerate(batches.uneven_rows(N_ROWS))
    ]
    rows = [
        each._replace(branches=branch(batches, each)) if row % 4 == 0 else each
        for row, each in enumerate(rows)
    ]
    rows = [
        each._replace(token_advantages=advantages_of(each, row)) if row % 6 in (3, 4) else each
        for row, each in enumerate(rows)
    ]
    batches.write_step(tmp_path, 0, rows)
    stored = read_samples(str(tmp_path), 0)[1]
    samples = replace(stored, logprobs=[each + SHIFT_NATS for each in stored.logprobs])
    naive: dict[tuple[str, str], Naive] = {}
    first: dict[tuple[str, str], Gradient] = {}

    for n_ranks in (1, 2, 4):
        cases, output = cases_of(n_ranks, n_drawn), tmp_path / f"ranks{n_ranks}"
        output.mkdir()
        job = {"folder": str(tmp_path), "output": str(output), "shift_nats": SHIFT_NATS, "eps": EPS}
        run_ranks("gradient_ranks.py", n_ranks, job | {"cases": [each.job(models) for each in cases]})
        facts = json.loads((output / "facts.json").read_text())
        for number, (case, found) in enumerate(zip(cases, facts, strict=True)):
            key, way = (case.model, case.objective), f"{n_ranks} ranks: {case}"
            gradient = load_file(output / f"{number}.safetensors")
            if key not in naive:
                settings = TrainConfig.model_validate((OBJECTIVES | DECAYS | BALANCED)[case.objective])
                naive[key] = Naive(models[case.model], samples, settings)
            expected = naive[key]
            if case.rank_by_rank:
                assert distance(gradient, expected.gradient) > 1e-2, way
            elif "dtype" in case.way:
                assert apart(gradient, expected.gradient) < 0.05, way
            else:
                assert distance(gradient, expected.gradient) < 1e-5, way
                # Rounding of float32: 1.3e-6 with experts on one CPU.
                assert apart(gradient, first.setdefault(key, gradient)) < 3e-6, way
                values = {tuple(each[:3]): each[3] for each in found["metrics"]}
                wanted = expected.metrics(annotated=case.annotated)
                if n_ranks > 1 or case.way.get("layout") == "padded":
                    # With padding and on ranks without rows other tokens are computed too.
                    del wanted["train/computed_share", "all", "mean"]
                assert {name: values[name] for name in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-6), (
                    way
                )
            if case.way is CHUNKED:
                n_chunks = {-(-each // TOKENS_OF_A_CHUNK) for each in found["most_trained"]}
                assert max(n_chunks) > 1, way
                assert len(n_chunks) > 1 or n_ranks < 4, way
