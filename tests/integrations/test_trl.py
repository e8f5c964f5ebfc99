"""TRL 1.16 itself, on the CPU: a tiny model trains for a few steps with per-token advantages and our loss."""

import importlib
import sys

import pytest
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import vapo.integrations
from vapo.integrations.trl import VAPOTrainer
from vapo.models.load import critic_from_policy
from vapo_kernels import reference

WORDS = ("<pad>", "<eos>", *"abcdefgh")


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def policy() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(WORDS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )


def says_a(completions, **kwargs):
    return [float("a" in completion) for completion in completions]


def trainer(cls, folder, config=None, **kwargs):
    given = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "none",
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 0,
    }
    policy().save_pretrained(folder / "policy")  # TRL loads its reference model from there.
    return cls(
        model=Qwen3ForCausalLM.from_pretrained(folder / "policy"),
        reward_funcs=says_a,
        args=GRPOConfig(**{**given, **(config or {})}),
        train_dataset=Dataset.from_list([{"prompt": f"{a} {b}"} for a in "bcde" for b in "fgh"]),
        processing_class=tokenizer(),
        **kwargs,
    )


@pytest.mark.parametrize("has_critic", [False, True])
@pytest.mark.parametrize("config", [{}, {"num_iterations": 2, "beta": 0.01, "entropy_coef": 0.01}])
def test_trains_a_tiny_model(tmp_path, has_critic, config):
    critic = critic_from_policy(policy()) if has_critic else None
    if has_critic:
        torch.nn.init.normal_(critic.score.weight)
    one = trainer(VAPOTrainer, tmp_path, config, critic=critic, alpha=1.0)
    before = {name: x.clone() for name, x in one.model.named_parameters()}
    one.train()
    assert any(not torch.equal(x, before[name]) for name, x in one.model.named_parameters())
    assert all(x.isfinite().all() for x in one.model.parameters())
    steps = [line for line in one.state.log_history if "loss" in line]
    assert len(steps) == 3
    assert all({"positive_nll", "entropy", "clip_ratio/region_mean"} <= set(line) for line in steps)
    if has_critic:
        assert all(x.grad is None for x in critic.parameters())


def gathered(one):
    """A generation batch, as TRL makes it before it shuffles and splits."""
    torch.manual_seed(1)
    one.current_gradient_accumulation_steps = one.args.gradient_accumulation_steps
    one.model.train()
    return one._generate_and_score_completions([{"prompt": "b f"}] * 4 + [{"prompt": "c g"}] * 4)


def test_advantages_are_those_of_the_reference(tmp_path):
    critic = critic_from_policy(policy())
    torch.nn.init.normal_(critic.score.weight)
    one = trainer(VAPOTrainer, tmp_path, critic=critic, alpha=1.0)
    out = gathered(one)
    mask = out["completion_mask"]
    rewards = torch.zeros(mask.shape)
    for row, length in enumerate(mask.sum(1).tolist()):
        rewards[row, length - 1] = float((out["completion_ids"][row] == WORDS.index("a")).any())
    expected = reference.padded_gae(rewards, one._values(out), mask, alpha=1.0)
    torch.testing.assert_close(out["advantages"], expected.advantages)
    assert out["is_correct"].tolist() == (rewards.sum(1) > 0).tolist()
    assert out["num_correct_items_in_batch"] == (mask * out["is_correct"][:, None]).sum()
    # V(s_t) is the state before token t: for the first one, that of the whole prompt.
    row = torch.cat([out["prompt_ids"], out["completion_ids"]], 1)[:1]
    alone = critic(input_ids=row, attention_mask=torch.ones_like(row)).logits[0, :, 0]
    torch.testing.assert_close(one._values(out)[0, 0], alone[out["prompt_ids"].shape[1] - 1], rtol=1e-4, atol=1e-5)


def loss_and_gradient(one, parts):
    one.model.zero_grad()
    losses = [one._compute_loss(one.model, part) for part in parts]
    sum(losses).backward()
    return sum(losses).detach(), [x.grad.clone() for x in one.model.parameters()]


def split(out):
    return [{k: v if v.ndim == 0 else v[rows] for k, v in out.items()} for rows in (slice(0, 4), slice(4, 8))]


def test_loss_equals_trls_own_without_nll(tmp_path):
    ours, theirs = (trainer(cls, tmp_path, {"epsilon_high": 0.28}) for cls in (VAPOTrainer, GRPOTrainer))
    ours.nll_weight = 0.0
    out = gathered(ours)
    out["old_per_token_logps"] = -torch.rand(out["completion_ids"].shape) * 4
    theirs.current_gradient_accumulation_steps = 2
    theirs.model.train()
    (a, da), (b, db) = loss_and_gradient(ours, split(out)), loss_and_gradient(theirs, split(out))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for x, y in zip(da, db, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


def test_logprobs_are_of_temperature_scaled_logits(tmp_path):
    one = trainer(VAPOTrainer, tmp_path, {"temperature": 0.5})
    ids = torch.tensor([[2, 3, 4, 5]])
    logprobs = one._get_per_token_logps_and_entropies(one.model, ids, torch.ones_like(ids), 2)[0]
    logits = one.model(ids).logits[0, [1, 2]]
    scaled, plain = ((logits / t).log_softmax(-1)[[0, 1], [4, 5]] for t in (0.5, 1.0))
    # TRL's kernel sums in chunks and errs by 5e-4 here.
    torch.testing.assert_close(logprobs[0], scaled, rtol=0, atol=2e-3)
    assert (logprobs[0] - plain).abs().min() > 5e-3


def test_positive_nll_is_equation_16(tmp_path):
    one = trainer(VAPOTrainer, tmp_path, nll_weight=0.5)
    out = gathered(one)
    with_nll, _ = loss_and_gradient(one, split(out))
    one.nll_weight = 0.0
    without, _ = loss_and_gradient(one, split(out))
    ids, mask = (torch.cat([out[f"prompt_{x}"], out[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    logprobs = one._get_per_token_logps_and_entropies(one.model, ids, mask, out["completion_ids"].shape[1])[0]
    correct = out["completion_mask"].bool() & out["is_correct"][:, None]
    assert correct.any() and not correct.all()
    torch.testing.assert_close(with_nll - without, -0.5 * logprobs[correct].mean().detach(), rtol=1e-4, atol=1e-6)


def test_completion_that_no_one_scored_teaches_nothing(tmp_path):
    one = trainer(VAPOTrainer, tmp_path, alpha=1.0)
    one.reward_funcs = [lambda completions, **kwargs: [None, *says_a(completions[1:])]]
    out = gathered(one)
    assert not out["advantages"][0].any() and not out["is_correct"][0]
    assert out["advantages"].isfinite().all() and out["advantages"][1:4].any()


def test_rejects_sequence_level_ratios(tmp_path):
    with pytest.raises(ValueError, match="importance_sampling_level: expected token, got sequence"):
        trainer(VAPOTrainer, tmp_path, {"importance_sampling_level": "sequence"})


def test_changed_host_names_the_supported_version(monkeypatch):
    monkeypatch.delitem(sys.modules, "vapo.integrations.trl")
    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", lambda self, model, batch, extra: None)
    with pytest.raises(
        vapo.integrations.UnsupportedHost, match=r"supports trl 1.16.0: .*\(self, model, batch, extra\)"
    ):
        importlib.import_module("vapo.integrations.trl")
