"""verl 0.9.1 itself, on the CPU: its advantages, its loss, its config and its workers, with these ops inside."""

import inspect
import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from unittest.mock import MagicMock

import numpy as np
import pytest
import ray
import torch
import verl.trainer.ppo.core_algos as core_algos
import verl.trainer.ppo.ray_trainer as ray_trainer
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.single_controller.base.decorator import MAGIC_ATTR
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import device, tensordict_utils
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.losses import ppo_loss

import vapo.integrations
import vapo.integrations.verl as plugin
from vapo_kernels import length_adaptive_lambda, reference

# verl's own, as its registry still holds it.
verl_gae = core_algos.ADV_ESTIMATOR_REGISTRY["gae"]
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 0], [1, 0, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0]])


def rollout(mask=MASK) -> DataProto:
    """Values everywhere, a reward on each row's last sampled token: what verl's `_compute_advantage` hands over."""
    torch.manual_seed(1)
    rewards = torch.zeros(mask.shape)
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1)
    rewards[torch.arange(len(mask)), last] = torch.tensor([1.0, 0.0, 1.0, -1.0])
    batch = {"token_level_rewards": rewards, "values": torch.randn(mask.shape), "response_mask": mask}
    return DataProto(batch=TensorDict(batch, batch_size=len(mask)))


def config(**vapo):
    root = OmegaConf.create({"algorithm": {"lam": 0.9}, **({"vapo": vapo} if vapo else {})})
    OmegaConf.set_struct(root, True)
    return root.algorithm


@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_advantages_equal_verls_at_equal_lambda(lam):
    data = rollout()
    expected = verl_gae(*(data.batch[name] for name in ("token_level_rewards", "values", "response_mask")), 0.99, lam)
    for algorithm in (config(), config(lam_policy=lam, lam_critic=lam)):
        for compute in (
            ray_trainer.compute_advantage,
            partial(compute_advantage_for_multi_trajectories, batch_keys=[]),
        ):
            out = compute(rollout(), adv_estimator="gae", gamma=0.99, lam=lam, config=algorithm).batch
            for name, x in zip(("advantages", "returns"), expected, strict=True):
                torch.testing.assert_close(out[name][MASK.bool()], x[MASK.bool()], rtol=1e-5, atol=2e-6)
                assert not out[name][~MASK.bool()].any()


def test_vapo_node_gives_each_response_its_lambda():
    data = rollout().batch
    out = ray_trainer.compute_advantage(rollout(), "gae", lam=0.3, config=config(alpha=0.5, whiten_advantages=False))
    expected = reference.padded_gae(data["token_level_rewards"], data["values"], MASK, alpha=0.5)
    torch.testing.assert_close(out.batch["advantages"], expected.advantages)
    torch.testing.assert_close(out.batch["returns"], expected.returns)
    by_hand = reference.padded_gae(
        data["token_level_rewards"], data["values"], MASK, lam_policy=length_adaptive_lambda(MASK.sum(1), alpha=0.5)
    )
    torch.testing.assert_close(out.batch["advantages"], by_hand.advantages)


def test_masked_is_never_read():
    clean = ray_trainer.compute_advantage(rollout(), "gae", config=config(alpha=1.0)).batch
    for poison in (torch.nan, torch.inf, 1e30):
        data = rollout()
        data.batch["values"][~MASK.bool()] = poison
        out = ray_trainer.compute_advantage(data, "gae", config=config(alpha=1.0)).batch
        for name in ("advantages", "returns"):
            assert torch.equal(out[name], clean[name])
    # Where there is no vapo node the promise is the same.
    clean = ray_trainer.compute_advantage(rollout(), "gae", lam=0.9, config=config()).batch
    data = rollout()
    data.batch["values"][~MASK.bool()] = torch.nan
    data.batch["token_level_rewards"][~MASK.bool()] = torch.nan
    out = ray_trainer.compute_advantage(data, "gae", lam=0.9, config=config()).batch
    assert torch.equal(out["advantages"], clean["advantages"])


def test_reward_on_a_tools_output_counts_on_the_last_sampled_token():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    data = DataProto(
        batch=TensorDict(
            {"token_level_rewards": rewards, "values": torch.zeros(2, 3), "response_mask": mask}, batch_size=2
        )
    )
    returns = ray_trainer.compute_advantage(data, "gae", config=config(alpha=1.0)).batch["returns"]
    assert returns.tolist() == [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    # verl's own loses it.
    assert verl_gae(rewards, torch.zeros(2, 3), mask, 1.0, 1.0)[1][0].tolist() == [0.0, 0.0, 0.0]


def test_other_estimators_are_left_alone():
    data = rollout()
    data.non_tensor_batch["uid"] = np.array(["a", "a", "b", "b"], dtype=object)
    out = ray_trainer.compute_advantage(data, "grpo", config=config(alpha=1.0)).batch
    expected = core_algos.compute_grpo_outcome_advantage(
        rollout().batch["token_level_rewards"], MASK, data.non_tensor_batch["uid"]
    )
    assert torch.equal(out["advantages"], expected[0])


def test_rejects_unknown_settings():
    with pytest.raises(ValueError, match=r"vapo: expected keys among alpha, .*, got \{'lambda': 1"):
        ray_trainer.compute_advantage(rollout(), "gae", config=config(**{"lambda": 1}))


def test_critic_warmup_of_51_is_50_steps():
    def updates_actor(step):
        trainer = MagicMock()
        trainer.config.trainer.critic_warmup, trainer.global_steps = 51, step
        trainer.replay_buffer.sample.return_value = (MagicMock(), {})
        PPOTrainer._step_once(trainer, {}, {}, 1)
        return trainer._update_actor.called

    assert [step for step in range(1, 54) if not updates_actor(step)] == list(range(1, 51))


def actor_config(loss_mode="vapo", **kwargs) -> FSDPActorConfig:
    given = {
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "ppo_micro_batch_size_per_gpu": 1,
        "rollout_n": 1,
        "policy_loss": PolicyLossConfig(loss_mode=loss_mode),
    }
    return FSDPActorConfig(**{**given, **kwargs})


PROMPTS, RESPONSES = (2, 1, 3, 2), (6, 5, 4, 2)


def jagged(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def step_data(is_weights=False) -> tuple[TensorDict, list[torch.Tensor]]:
    """A mini-batch as verl's workers get it, and per row the log-probs of prompt and response; holes and padding."""
    torch.manual_seed(2)
    fields = {
        name: [] for name in ("prompts", "responses", "response_mask", "old_log_probs", "advantages", "rm_scores")
    }
    logprobs = []
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        mask = torch.ones(response, dtype=torch.int64)
        mask[1 : 1 + row] = 0
        mask[-1] = row != 2
        now = -torch.rand(prompt + response)
        logprobs.append(now)
        fields["prompts"].append(torch.arange(prompt))
        fields["responses"].append(torch.arange(response))
        fields["response_mask"].append(mask)
        # Log-probs sit one place earlier than the token that they belong to.
        fields["old_log_probs"].append(now[prompt - 1 : -1] + 0.8 * torch.randn(response))
        fields["advantages"].append(torch.randn(response))
        score = torch.zeros(response)
        score[-1] = (1.0, -1.0, 1.0, 0.0)[row]
        fields["rm_scores"].append(score)
        if is_weights:
            fields.setdefault("rollout_is_weights", []).append(torch.rand(response))
    data = TensorDict({name: jagged(rows) for name, rows in fields.items()}, batch_size=len(PROMPTS))
    num_tokens = int(data["response_mask"].values().sum())
    settings = plugin.Settings()
    num_correct = int(plugin.correct_tokens(data, settings).sum())
    tensordict_utils.assign_non_tensor(
        data, dp_size=1, batch_num_tokens=num_tokens, global_batch_size=len(PROMPTS), num_correct_tokens=num_correct
    )
    return data, logprobs


def run(loss, data, logprobs, rows=None, **output):
    """The loss of some rows and the gradient of every row's log-probs."""
    rows = list(range(len(logprobs))) if rows is None else rows
    leaves = [logprobs[row].clone().requires_grad_() for row in rows]
    value, metrics = loss(
        model_output={"log_probs": jagged(leaves), **output}, data=tensordict_utils.index_select_tensor_dict(data, rows)
    )
    value.backward()
    return value.detach(), [leaf.grad for leaf in leaves], metrics


def assert_same(actual, expected):
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(actual[1], expected[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("is_weights", [False, True])
def test_loss_equals_verls_own(mode, is_weights):
    data, logprobs = step_data(is_weights)
    ours = run(partial(ppo_loss, actor_config(loss_agg_mode=mode)), data, logprobs)
    theirs = run(partial(ppo_loss, actor_config("vanilla", loss_agg_mode=mode)), data, logprobs)
    assert_same(ours, theirs)
    for name in ("actor/pg_loss", "actor/pg_clipfrac"):
        assert ours[2][name].aggregate() == pytest.approx(theirs[2][name].aggregate(), rel=1e-5)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_micro_batches_add_up(mode):
    data, logprobs = step_data()
    loss = partial(plugin.loss_with_positive_nll, actor_config(loss_agg_mode=mode), settings=plugin.Settings())
    whole = run(loss, data, logprobs)
    parts = [run(loss, data, logprobs, rows) for rows in ([0], [1, 2], [3])]
    assert_same((sum(part[0] for part in parts), [g for part in parts for g in part[1]]), whole)
    for name in ("actor/pg_loss", "actor/nll_loss", "actor/nll_tokens"):
        total = sum(part[2][name].aggregate() for part in parts)
        assert total == pytest.approx(whole[2][name].aggregate(), rel=1e-5)


def test_positive_nll_is_equation_16():
    data, logprobs = step_data()
    settings = plugin.Settings(nll_weight=0.25)
    with_nll = run(partial(plugin.loss_with_positive_nll, actor_config(), settings=settings), data, logprobs)
    without = run(partial(ppo_loss, actor_config()), data, logprobs)
    correct = [(0, data["response_mask"].unbind()[0].bool()), (2, data["response_mask"].unbind()[2].bool())]
    num_correct = sum(int(mask.sum()) for _, mask in correct)
    nll = -sum(logprobs[row][PROMPTS[row] - 1 : -1][mask].sum() for row, mask in correct) / num_correct
    torch.testing.assert_close(with_nll[0], without[0] + 0.25 * nll)
    for row, (mine, theirs) in enumerate(zip(with_nll[1], without[1], strict=True)):
        expected = torch.zeros_like(mine)
        for at, mask in correct:
            if at == row:
                expected[PROMPTS[row] - 1 : -1] = -0.25 / num_correct * mask
        torch.testing.assert_close(mine - theirs, expected, rtol=1e-4, atol=1e-7)
    assert with_nll[2]["actor/nll_loss"].aggregate() == pytest.approx(nll.item(), rel=1e-5)


def test_ranks_average_to_the_global_loss():
    data, logprobs = step_data()
    loss = partial(plugin.loss_with_positive_nll, actor_config(), settings=plugin.Settings())
    whole = run(loss, data, logprobs)
    tensordict_utils.assign_non_tensor(data, dp_size=2)
    ranks = [run(loss, data, logprobs, rows) for rows in ([0, 1], [2, 3])]
    assert_same((sum(r[0] for r in ranks) / 2, [g / 2 for r in ranks for g in r[1]]), whole)


def test_entropy_and_kl_stay_verls():
    data, logprobs = step_data()
    torch.manual_seed(3)
    data["ref_log_prob"] = jagged([x[p - 1 : -1] - 0.1 for x, p in zip(logprobs, PROMPTS, strict=True)])
    entropy = jagged([torch.rand_like(x) for x in logprobs])
    given = {"entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1}
    ours = run(partial(ppo_loss, actor_config(**given)), data, logprobs, entropy=entropy)
    theirs = run(partial(ppo_loss, actor_config("vanilla", **given)), data, logprobs, entropy=entropy)
    assert_same(ours, theirs)


def test_no_correct_response_means_no_nll():
    data, logprobs = step_data()
    data["rm_scores"] = jagged([torch.full_like(x, -1.0) for x in data["rm_scores"].unbind()])
    tensordict_utils.assign_non_tensor(data, num_correct_tokens=0)
    with_nll = run(partial(plugin.loss_with_positive_nll, actor_config(), settings=plugin.Settings()), data, logprobs)
    assert_same(with_nll, run(partial(ppo_loss, actor_config()), data, logprobs))


def test_loss_rejects_bad_input():
    data, logprobs = step_data()
    with pytest.raises(ValueError, match="expected token-mean or seq-mean-token-mean, got 'token-sum'"):
        run(partial(ppo_loss, actor_config(loss_agg_mode="token-sum")), data, logprobs)
    loss = partial(plugin.loss_with_positive_nll, actor_config(), settings=plugin.Settings())
    with pytest.raises(ValueError, match="expected rm_scores, which say who was correct"):
        run(loss, data.exclude("rm_scores"), logprobs)
    with pytest.raises(ValueError, match="expected num_correct_tokens"):
        run(loss, data.exclude("num_correct_tokens"), logprobs)


class Engine:
    """The part of verl's engines that the plugin touches."""

    def train_batch(self, data, loss_function):
        return data["num_correct_tokens"], loss_function


class Actor:
    engine = None

    def set_loss_fn(self, loss_fn):
        self.loss_fn = loss_fn


def worker(root, loss=ppo_loss):
    """A real worker past its `init_model`, without a model."""
    worker = object.__new__(ActorRolloutRefWorker)
    worker.config, worker.role = root.actor_rollout_ref, "actor"
    worker.actor = Actor()
    worker.actor.engine = Engine()
    worker.loss_fn = partial(loss, config=actor_config())
    return worker


def root_config(**vapo):
    root = {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "vapo"}}}, "vapo": vapo}
    return OmegaConf.create(root if vapo else {**root, "vapo": None})


def test_actor_gets_the_loss_and_the_count():
    one = worker(root_config(nll_weight=0.3))
    plugin.add_positive_nll(one)
    assert one.actor.loss_fn.func is plugin.loss_with_positive_nll
    assert one.actor.loss_fn.keywords["settings"].nll_weight == 0.3
    data, _ = step_data()
    count, loss = one.actor.engine.train_batch(data.exclude("num_correct_tokens"), loss_function="loss")
    assert (count, loss) == (int(plugin.correct_tokens(data, plugin.Settings()).sum()), "loss")
    with pytest.raises(ValueError, match=r"expected a vapo node in the config, such as \+vapo.alpha=0.05, got none"):
        plugin.add_positive_nll(worker(root_config()))
    with pytest.raises(ValueError, match="expected an actor that trains with verl's ppo_loss"):
        plugin.add_positive_nll(worker(root_config(alpha=0.05), loss=plugin.policy_loss))


@pytest.fixture
def cluster():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_ray_worker_has_the_plugin_and_its_settings(cluster):
    def look(config):
        import sys

        from verl.trainer.ppo.core_algos import compute_gae_advantage_return

        settings = sys.modules["vapo.integrations.verl"].settings_near(config)
        return compute_gae_advantage_return.__module__, settings.alpha

    config = root_config(alpha=0.5).actor_rollout_ref
    assert ray.get(ray.remote(look).remote(config)) == ("vapo.integrations.verl", 0.5)


def test_worker_method_keeps_verls_dispatch():
    assert hasattr(ActorRolloutRefWorker.init_model, MAGIC_ATTR)
    assert list(inspect.signature(ActorRolloutRefWorker.init_model).parameters) == ["self"]


def test_recipe_composes(recipe_overrides):
    from hydra import compose, initialize_config_module
    from verl.trainer.ppo.utils import need_critic
    from verl.utils.config import omega_conf_to_dataclass

    with initialize_config_module("verl.trainer.config", version_base=None):
        root = compose("ppo_trainer", overrides=recipe_overrides)
    assert plugin.settings_near(root.algorithm) == plugin.settings_near(root.actor_rollout_ref) == plugin.Settings()
    assert need_critic(root)
    actor = omega_conf_to_dataclass(root.actor_rollout_ref.actor)
    assert actor.policy_loss.loss_mode == plugin.LOSS_MODE
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.loss_agg_mode) == (0.2, 0.28, "token-mean")
    assert root.trainer.critic_warmup == 51  # 50 critic-only steps


@pytest.mark.parametrize("policy, active", [("auto", True), ("none", False)])
def test_fresh_process_discovers_the_plugin(policy, active, tmp_path):
    program = (
        "import verl, sys; from verl.trainer.ppo import core_algos\n"
        "print(core_algos.compute_gae_advantage_return.__module__, 'vapo' in core_algos.POLICY_LOSS_REGISTRY)\n"
        "from vapo.integrations.verl import check; check()"
    )
    env = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": policy}
    done = subprocess.run([sys.executable, "-c", program], env=env, cwd=tmp_path, capture_output=True, text=True)
    if active:
        assert done.stdout.split()[-2:] == ["vapo.integrations.verl", "True"]
        assert done.returncode == 0, done.stderr
        assert "vapo: replaced verl.trainer.ppo.core_algos.compute_gae_advantage_return" in done.stderr
    else:
        assert done.stdout.split()[-2:] == ["verl.trainer.ppo.core_algos", "False"]
        assert "RuntimeError: expected verl to load vapo.integrations.verl in its workers" in done.stderr


def test_check_notices_what_was_replaced_again(monkeypatch):
    plugin.check()
    monkeypatch.setattr(core_algos, "compute_gae_advantage_return", verl_gae)
    with pytest.raises(RuntimeError, match="compute_gae_advantage_return to be vapo's"):
        plugin.check()


def test_changed_host_names_the_supported_version(monkeypatch):
    monkeypatch.setattr(core_algos, "compute_gae_advantage_return", lambda rewards, values: None)
    monkeypatch.setattr(plugin, "_replaced", {})
    with pytest.raises(vapo.integrations.UnsupportedHost, match=r"supports verl 0.9.1: .*, got \(rewards, values\)"):
        plugin.activate()
    monkeypatch.delattr(core_algos, "compute_gae_advantage_return")
    with pytest.raises(vapo.integrations.UnsupportedHost, match=r"has no attribute .*verl==0.9.1"):
        plugin.activate()


class CPUEngine(FSDPEngine):
    """verl's FSDP engine with its own micro-batching and loss accounting; only the model is a table of log-probs."""

    def __init__(self, table):
        self.table, self.optimizer = table, torch.optim.SGD([table], lr=0.0)
        self.engine_config, self.scaler, self.ulysses_sequence_parallel_size = None, None, 1

    def get_data_parallel_group(self):
        return None

    def get_data_parallel_size(self):
        return 1

    def is_mp_src_rank_with_outputs(self):
        return True

    def _gradient_sync_context(self, is_last_micro_batch):
        return nullcontext()

    def optimizer_step(self):
        return 0.0

    def forward_step(self, micro_batch, loss_function, forward_only):
        rows = micro_batch["input_ids"].unbind()
        log_probs = jagged([self.table[row] for row in rows])
        loss, metrics = loss_function(model_output={"log_probs": log_probs}, data=micro_batch, dp_group=None)
        return loss, {"model_output": {}, "loss": loss.detach().item(), "metrics": metrics}


@pytest.fixture
def one_rank(tmp_path, monkeypatch):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    for module in (transformer_impl, device):
        monkeypatch.setattr(module, "get_device_id", lambda: "cpu")
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_engine_micro_batches_add_up_to_equations_3_and_16(one_rank, micro_batch_size):
    data, logprobs = step_data()
    lengths = [len(x) for x in logprobs]
    data["input_ids"] = jagged(torch.arange(sum(lengths)).split(lengths))
    data["loss_mask"] = data["response_mask"]
    given = tensordict_utils.get_tensordict(
        dict(data.exclude("dp_size", "batch_num_tokens", "global_batch_size", "num_correct_tokens").items()),
        {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": micro_batch_size, "global_batch_size": 4},
    )
    table = torch.cat(logprobs).requires_grad_()
    one = worker(root_config(nll_weight=0.3))
    one.actor.engine = CPUEngine(table)
    plugin.add_positive_nll(one)
    out = one.actor.engine.train_batch(given, loss_function=one.actor.loss_fn)

    packed = {name: data[name].values() for name in ("old_log_probs", "advantages", "response_mask")}
    ends = torch.tensor(lengths).cumsum(0).tolist()
    at = torch.cat([torch.arange(e - r - 1, e - 1) for e, r in zip(ends, RESPONSES, strict=True)])
    leaf = table.detach().requires_grad_()
    expected = reference.logprob_policy_loss(
        leaf[at],
        packed["old_log_probs"],
        packed["advantages"],
        packed["response_mask"].bool(),
        is_correct=torch.tensor([True, False, True, False]).repeat_interleave(torch.tensor(RESPONSES)),
        dual_clip=3.0,
        nll_weight=0.3,
    )
    expected.loss.backward()
    assert sum(out["loss"]) == pytest.approx(expected.loss.item(), rel=1e-5)
    torch.testing.assert_close(table.grad, leaf.grad, rtol=1e-5, atol=1e-7)
