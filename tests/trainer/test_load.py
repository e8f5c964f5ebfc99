"""The policy is reproducible and complete; the critic starts at V = 0 or from a checkpoint, and is never random."""

import pytest
import torch
from families import FAMILIES, VOCABULARY, tiny_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from vapo.models.load import (
    critic_from_policy,
    is_checkpointed,
    load_critic,
    load_policy,
    stop_token_ids,
    tiny_policy,
    value_head,
    with_pad_token,
)
from vapo.models.output_head import plain_head
from vapo.tasks.running_total import RunningTotal

IDS = torch.tensor([[5, 9, 3, 20, 7]])
PLAIN = {"attention": "sdpa", "gradient_checkpointing": False}


@pytest.fixture(scope="module")
def tokenizer():
    return RunningTotal().tokenizer


@pytest.fixture
def folder(tmp_path, tokenizer):
    """A policy's folder, as an earlier run leaves it."""

    def write(family="llama", **changes):
        policy = tiny_model(family, **changes)
        policy.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        return policy, tmp_path

    return write


@pytest.fixture(autouse=True)
def untouched_generator():
    """Nothing that loads or builds a model advances the global generator."""
    state = torch.get_rng_state()
    yield
    assert torch.equal(state, torch.get_rng_state())


def load(model, **changes):
    """A policy for a task that has no tokenizer of its own."""
    return load_policy(str(model), object(), seed=0, **PLAIN | changes)


def assert_same_weights(model, other):
    torch.testing.assert_close(dict(model.state_dict()), dict(other.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_tiny_is_the_same_for_the_same_seed_and_has_the_tasks_tokenizer(attention):
    task = RunningTotal()
    policy, tokenizer = load_policy("tiny", task, seed=3, attention=attention, gradient_checkpointing=False)
    assert tokenizer is task.tokenizer
    assert policy.config._attn_implementation == attention
    assert_same_weights(policy, tiny_policy(tokenizer, 3))
    assert not torch.equal(policy.lm_head.weight, tiny_policy(tokenizer, 4).lm_head.weight)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_gives_the_policy_back_in_float32(family, tied, folder, tokenizer):
    saved, path = folder(family, tie_word_embeddings=tied)
    policy, loaded = load(path, attention="eager")
    assert policy.config._attn_implementation == "eager"
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    # What it exports loads with plain transformers.
    policy.save_pretrained(path / "export")
    for model in (policy, AutoModelForCausalLM.from_pretrained(path / "export", attn_implementation="eager")):
        torch.testing.assert_close(model(IDS).logits, saved(IDS).logits, atol=1e-5, rtol=1e-5)
    assert loaded("5 +2 =").input_ids == tokenizer("5 +2 =").input_ids
    assert loaded.pad_token_id == tokenizer.pad_token_id


def test_a_bfloat16_checkpoint_becomes_a_float32_master_copy(folder):
    policy, path = folder()
    policy.bfloat16().save_pretrained(path)
    loaded, _ = load(path)
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded.lm_head.weight, policy.lm_head.weight.float())


def test_no_dropout_even_in_training_mode(folder):
    _, path = folder("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    policy, _ = load(path)
    critic = critic_from_policy(policy)
    torch.nn.init.ones_(value_head(critic).weight)
    for model in (policy.train(), critic.train().base_model):
        first, again = (model(input_ids=IDS, use_cache=False)[0] for _ in range(2))
        assert torch.equal(first, again)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_recomputes_layers_and_changes_no_gradient(family, folder):
    _, path = folder(family)
    calls, gradients = {False: [], True: []}, {}
    for checkpointing, seen in calls.items():
        policy, _ = load(path, attention="eager", gradient_checkpointing=checkpointing)
        critic = critic_from_policy(policy)
        torch.nn.init.ones_(value_head(critic).weight)
        for model in (policy, critic):
            assert model.training == is_checkpointed(model) == checkpointing
            first_norm = next(module for module in model.modules() if "Norm" in type(module).__name__)
            first_norm.register_forward_hook(lambda module, *_, seen=seen: seen.append(module))
            model(input_ids=IDS, use_cache=False).logits.square().mean().backward()
        gradients[checkpointing] = [each.grad for model in (policy, critic) for each in model.parameters()]
    torch.testing.assert_close(gradients[True], gradients[False])
    assert len(calls[True]) == 2 * len(calls[False]) == 4


def test_what_is_no_complete_model_is_refused_in_one_sentence(folder, tokenizer):
    policy, path = folder()
    (path / "empty").mkdir()
    AutoConfig.for_model("llama").save_pretrained(path / "weightless")
    tiny_model("llama", vocab_size=20).save_pretrained(path / "small")
    tokenizer.save_pretrained(path / "small")
    weights = policy.state_dict()
    del weights["model.layers.1.mlp.up_proj.weight"]
    policy.save_pretrained(path / "lacking", state_dict=weights)
    for source, changes, message in (
        (path / "empty", {}, r"a model's folder must hold a config.json; got .*empty$"),
        (path / "weightless", {}, r"a model must be a folder or a hub id that loads; got '.*weightless': .+"),
        (path / "small", {}, "must embed all 21 tokens of its tokenizer; got 20 embeddings"),
        (path / "lacking", {}, r"LlamaForCausalLM; .* lacks \['model.layers.1.mlp.up_proj.weight'\]"),
        (path, {"attention": "flash"}, "a model must be a folder or a hub id that loads; .*attn_implementation"),
        ("tiny", {}, "model must be a hub id or a folder where the task brings no tokenizer; got 'tiny'"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            load(source, **changes)
        assert "\n" not in str(error.value)


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_of_sequence():
    tokenizer = RunningTotal().tokenizer
    tokenizer.pad_token = None
    assert with_pad_token(tokenizer).pad_token_id == tokenizer.eos_token_id
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="must have a pad or an end-of-sequence token; got neither"):
        with_pad_token(tokenizer)


@pytest.mark.parametrize("family", FAMILIES)
def test_new_critic_says_zero_everywhere_and_owns_a_copy_of_the_policys_backbone(family):
    policy = tiny_model(family, "eager")
    critic = critic_from_policy(policy)
    assert critic.config._attn_implementation == "eager"
    assert_same_weights(critic.base_model, policy.base_model)
    assert torch.equal(critic(input_ids=IDS, use_cache=False).logits, torch.zeros(1, 5, 1))
    with torch.no_grad():
        policy.get_input_embeddings().weight.zero_()
    assert critic.get_input_embeddings().weight.any()


def scorer(loader, family="llama", num_labels=1):
    config = tiny_model(family, num_labels=num_labels).config
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return loader.from_config(config).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_critic_survives_its_checkpoint(family, tmp_path):
    critic = scorer(AutoModelForTokenClassification, family)
    torch.nn.init.constant_(value_head(critic).bias, 0.5)
    critic.save_pretrained(tmp_path)
    loaded = load_critic(tmp_path, attention="eager", gradient_checkpointing=False)
    assert_same_weights(loaded, critic)
    assert loaded.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reward_model_becomes_a_critic_whose_last_value_is_its_reward(family, tmp_path):
    reward_model = scorer(AutoModelForSequenceClassification, family)
    reward_model.save_pretrained(tmp_path)
    critic = load_critic(tmp_path, attention="eager", gradient_checkpointing=True)
    values = critic(input_ids=IDS, use_cache=False).logits[0, :, 0]
    torch.testing.assert_close(values[-1:], reward_model(IDS).logits[0], atol=1e-5, rtol=1e-5)
    assert value_head(critic).bias.tolist() == [0]
    assert critic.training


def test_of_an_earlier_run_the_trained_critic_comes_before_the_pretrained_one(tmp_path):
    critic = scorer(AutoModelForTokenClassification)
    for name, bias in (("pretrained_critic", 1.0), ("critic", 2.0)):
        torch.nn.init.constant_(critic.score.bias, bias)
        critic.save_pretrained(tmp_path / name)
        assert load_critic(tmp_path, **PLAIN).score.bias.item() == bias


def test_what_is_no_critic_is_refused(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "policy")
    scorer(AutoModelForTokenClassification, num_labels=2).save_pretrained(tmp_path / "labels")
    critic = scorer(AutoModelForTokenClassification)
    weights = critic.state_dict()
    del weights["score.weight"]
    critic.save_pretrained(tmp_path / "headless", state_dict=weights)
    for name, message in (
        ("", r"a model's folder must hold a config.json; got "),
        ("policy", "classifier with 1 label; got LlamaForCausalLM with 2 in"),
        ("labels", "classifier with 1 label; got LlamaForTokenClassification with 2 in"),
        ("headless", r"must hold all weights of LlamaForTokenClassification; .*\['score.weight'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            load_critic(tmp_path / name, **PLAIN)
    with pytest.raises(ValueError, match="a family with a token-classification head in transformers; got 'olmo2'"):
        critic_from_policy(tiny_model("olmo2"))


def test_stop_tokens_are_those_of_the_model_the_tokenizer_and_the_caller(tokenizer):
    policy = tiny_model("llama")
    assert stop_token_ids(policy, tokenizer) == (tokenizer.eos_token_id,)
    policy.generation_config.eos_token_id = [7, tokenizer.eos_token_id]
    hash_id = tokenizer.convert_tokens_to_ids("#")
    assert stop_token_ids(policy, tokenizer, ["#"]) == tuple(sorted((7, tokenizer.eos_token_id, hash_id)))
    for text in ("# 5", "word"):
        with pytest.raises(ValueError, match=f"a stop string must be one token of the tokenizer; got '{text}'"):
            stop_token_ids(policy, tokenizer, [text])
    policy.generation_config.eos_token_id = None
    endless = RunningTotal().tokenizer
    endless.eos_token = None
    with pytest.raises(ValueError, match="must have an end-of-sequence or a stop token; got none"):
        stop_token_ids(policy, endless)


@pytest.mark.parametrize(
    ("family", "changes", "is_plain"),
    [
        ("qwen3", {"tie_word_embeddings": True}, True),
        ("llama", {"tie_word_embeddings": False}, True),
        ("gpt2", {}, True),
        ("phi", {}, True),
        ("gemma2", {}, False),
        ("gemma2", {"final_logit_softcapping": 30.0, "initializer_range": 0.001}, False),
        ("gemma2", {"final_logit_softcapping": None}, True),
        ("cohere", {}, False),
        ("granite", {"logits_scaling": 8.0}, False),
        ("granite", {"logits_scaling": 1.0}, True),
    ],
)
def test_a_head_is_plain_where_the_logits_are_its_output(family, changes, is_plain):
    policy = tiny_model(family, **changes)
    before = policy(input_ids=IDS, use_cache=False)
    for _ in range(2):
        head = plain_head(policy)
        assert head is (policy.get_output_embeddings() if is_plain else None)
    assert torch.equal(policy(input_ids=IDS, use_cache=False).logits, before.logits)
    hidden = policy.base_model(input_ids=IDS, use_cache=False).last_hidden_state
    of_head = torch.nn.functional.linear(hidden, *policy.get_output_embeddings().parameters())
    # Where the answer is yes, this is what the fused loss relies on.
    assert not is_plain or torch.allclose(of_head, before.logits, atol=1e-5)
    assert family != "phi" or head.bias is not None


class Adapted(torch.nn.Linear):
    """A head with an adapter beside its matrix, as LoRA makes it."""

    def forward(self, hidden):
        return super().forward(hidden) + hidden[..., :1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_head_with_an_adapter_or_scaled_states_is_not_plain(when):
    policy, scaling = tiny_model("llama"), tiny_model("llama")
    if when == "after":
        assert plain_head(policy) is not None
    policy.set_output_embeddings(Adapted(32, VOCABULARY, bias=False, device="meta"))
    scaling.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] / 2,))
    assert plain_head(policy) is plain_head(scaling) is None


@pytest.mark.parametrize("breaks", [False, True])
def test_the_probe_of_a_head_leaves_the_attention_as_it_was(monkeypatch, breaks):
    policy, seen = tiny_model("llama"), []

    def implement(attention):
        policy.config._attn_implementation_internal = attention

    def forward(self, **arguments):
        seen.append(self.config._attn_implementation)
        if breaks:
            raise RuntimeError("no")
        return whole_forward(self, **arguments)

    whole_forward = type(policy).forward
    # What neither runs here nor takes float32.
    implement("flash_attention_2")
    monkeypatch.setattr(policy, "set_attn_implementation", implement)
    monkeypatch.setattr(type(policy), "forward", forward)
    if breaks:
        with pytest.raises(RuntimeError, match="no"):
            plain_head(policy)
    else:
        assert plain_head(policy) is policy.lm_head
    assert seen == ["sdpa"]
    assert policy.config._attn_implementation == "flash_attention_2"
    assert not policy.lm_head._forward_hooks and not policy.base_model._forward_hooks
