"""VAPO on verl 0.9.1. Importing this module activates it; installing the package makes verl import it in every process.

What it puts in place, and what for:

- ``core_algos.compute_gae_advantage_return`` → `gae_advantage_return`: `padded_gae` with λ_policy by length, λ_critic;
- ``ray_trainer.compute_advantage`` → the same function, told the ``vapo`` node of the config that it is called with;
- ``policy_loss.loss_mode=vapo`` → `policy_loss`: `logprob_policy_loss` with whole-batch denominators;
- ``ActorRolloutRefWorker.init_model`` → the same method; with ``loss_mode=vapo`` the actor's loss is then
  `loss_with_positive_nll`, which knows from ``rm_scores`` who was correct (Eq. 16, 17).

Without a ``vapo`` node in the config every run is what it was: verl's λ for both, verl's whitening, no NLL.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import pkgutil
from contextvars import ContextVar
from dataclasses import dataclass, fields
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from vapo.integrations import host_attribute
from vapo.rollout.rewards import terminal_rewards
from vapo_kernels import logprob_policy_loss, masked_whiten, padded_gae

LOSS_MODE = "vapo"
COUNT_KEY = "num_correct_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The keys of the config's ``vapo`` node.

    Attributes:
        alpha: α of Eq. 15.
        lam_policy: λ of the advantages; None: Eq. 15, by each response's sampled tokens.
        lam_critic: λ of the value targets.
        whiten_advantages: Whether advantages get mean 0 and variance 1 over the batch, as verl's always do.
        nll_weight: μ of Eq. 17; needs ``loss_mode=vapo``.
        correct_above: A response is correct if its ``rm_scores`` sum to more than this.
    """

    alpha: float = 0.05
    lam_policy: float | None = None
    lam_critic: float = 1.0
    whiten_advantages: bool = True
    nll_weight: float = 0.1
    correct_above: float = 0.0


def settings_near(config: Any) -> Settings | None:
    """Read the ``vapo`` node beside ``config``, a child of verl's whole config; None where there is none.

    Raises:
        ValueError: If the node has a key that `Settings` has not.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        node = OmegaConf.select(config, "..vapo") if OmegaConf.is_config(config) else None
    except OmegaConfBaseException:  # A config without a parent.
        node = None
    if node is None:
        return None
    given, known = OmegaConf.to_container(node, resolve=True), [field.name for field in fields(Settings)]
    if not isinstance(given, dict) or not set(given) <= set(known):
        raise ValueError(f"vapo: expected keys among {', '.join(known)}, got {given}")
    return Settings(**given)


_settings: ContextVar[Settings | None] = ContextVar("vapo_settings", default=None)


def gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns for verl, by `padded_gae` (Eq. 5–9, 13–15).

    Unlike verl's own: λ_policy and λ_critic may differ; a masked token is never read; its reward, where a response
    ends on a tool's output, counts on the last sampled token; masked returns are 0.

    ``lam``, verl's ``algorithm.lam``, is both λ where the config has no ``vapo`` node, and else unused.

    Returns:
        Advantages, whitened unless the ``vapo`` node says otherwise, and returns; [B, T] float32, like all arguments.
    """
    settings = _settings.get() or Settings(lam_policy=lam, lam_critic=lam)
    out = padded_gae(
        sampled_rewards(token_level_rewards, response_mask),
        values,
        response_mask,
        gamma=gamma,
        lam_policy=settings.lam_policy,
        lam_critic=settings.lam_critic,
        alpha=settings.alpha,
    )
    advantages = masked_whiten(out.advantages, response_mask) if settings.whiten_advantages else out.advantages
    return advantages, out.returns


def sampled_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """Move the rewards of masked tokens to their row's last sampled token; NaN and inf there count as 0.

    Example:
        >>> sampled_rewards(torch.tensor([[0.0, 0.5, 1.0]]), torch.tensor([[1, 1, 0]]))
        tensor([[0.0000, 1.5000, 0.0000]])
    """
    mask = mask.bool()
    stray = rewards.masked_fill(mask, 0).nan_to_num(0, 0, 0).sum(1)
    return rewards.masked_fill(~mask, 0) + terminal_rewards(stray, mask)


def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The clipped surrogate (Eq. 3, 4) as verl's policy loss ``vapo``: this micro-batch's share of the global mean.

    Args:
        old_log_prob, log_prob, advantages, response_mask, rollout_is_weights: [B, T]; None for no weights.
        loss_agg_mode: ``token-mean`` or ``seq-mean-token-mean``.
        config: verl's actor config: its clip range, ``clip_ratio_c`` and ``global_batch_info`` are used.

    Returns:
        The loss and verl's metrics of this micro-batch; ``actor/ppo_kl`` is the k3 estimate.

    Raises:
        ValueError: If ``loss_agg_mode`` is another one.
    """
    info = config.global_batch_info
    own_tokens = response_mask.sum()
    num_tokens, weights = info.get("batch_num_tokens") or own_tokens, rollout_is_weights
    if loss_agg_mode == "seq-mean-token-mean":
        lengths = response_mask.sum(1, keepdim=True)
        num_sequences = info.get("global_batch_size") or (lengths > 0).sum()
        share = (num_tokens / (num_sequences * lengths.clamp(min=1))).expand_as(log_prob)
        weights = share if weights is None else share * weights
    elif loss_agg_mode != "token-mean":
        raise ValueError(f"loss_agg_mode: expected token-mean or seq-mean-token-mean, got {loss_agg_mode!r}")
    out = logprob_policy_loss(
        log_prob,
        old_log_prob,
        advantages,
        response_mask,
        clip_low=config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low,
        clip_high=config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high,
        dual_clip=config.clip_ratio_c,
        num_tokens=num_tokens,
        token_weights=weights,
    )
    # verl averages these two over micro-batches, so they are means over this one's tokens.
    own = num_tokens / own_tokens.clamp(min=1)
    metrics = {"actor/pg_clipfrac": (out.clip_fraction * own).item(), "actor/ppo_kl": (out.approx_kl * own).item()}
    return out.loss * (info.get("dp_size") or 1), metrics


def loss_with_positive_nll(
    config: Any, model_output: Any, data: Any, dp_group: Any = None, *, settings: Settings
) -> tuple[Tensor, dict[str, Any]]:
    """verl's ``ppo_loss`` plus μ times the NLL of correct responses (Eq. 16, 17), as a loss function of its actor.

    The denominator is the number of correct tokens of the whole mini-batch, over all ranks, as `count_correct_tokens`
    left it; the NLL is of the temperature-scaled logits, like all log-probs in verl.
    """
    from verl.utils.metric import AggregationType, Metric
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import no_padding_2_padding

    _expect_field(data, COUNT_KEY, "which the engine's train_batch counts")
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    logprobs = no_padding_2_padding(model_output["log_probs"], data)
    out = logprob_policy_loss(
        logprobs,
        logprobs.detach(),
        torch.zeros_like(logprobs),
        _padded(data["response_mask"]).bool(),
        is_correct=correct_tokens(data, settings),
        nll_weight=settings.nll_weight,
        num_tokens=data["batch_num_tokens"],
        num_correct_tokens=data[COUNT_KEY],
    )
    metrics["actor/nll_loss"] = Metric(AggregationType.SUM, out.positive_nll * data["dp_size"])
    metrics["actor/nll_tokens"] = Metric(AggregationType.SUM, out.num_correct_tokens * data["dp_size"])
    return loss + out.loss * data["dp_size"], metrics


def correct_tokens(data: Any, settings: Settings) -> Tensor:
    """[B, T] bool: the sampled tokens of responses whose ``rm_scores`` sum to more than ``correct_above``.

    Raises:
        ValueError: If ``data`` has no ``rm_scores``.
    """
    _expect_field(data, "rm_scores", "which say who was correct")
    is_correct = _padded(data["rm_scores"]).sum(1, keepdim=True) > settings.correct_above
    return _padded(data["response_mask"]).bool() & is_correct


def count_correct_tokens(engine: Any, settings: Settings) -> None:
    """Make an engine's ``train_batch`` count the mini-batch's correct tokens over all ranks before it cuts it up."""
    from verl.utils import device, tensordict_utils

    train_batch = engine.train_batch

    @functools.wraps(train_batch)
    def train_counted_batch(data, loss_function):
        count = correct_tokens(data, settings).sum()
        if torch.distributed.is_initialized():
            count = count.to(device.get_device_id())
            torch.distributed.all_reduce(count, group=engine.get_data_parallel_group())
        tensordict_utils.assign_non_tensor(data, **{COUNT_KEY: count.item()})
        return train_batch(data, loss_function)

    engine.train_batch = train_counted_batch


def _padded(x: Tensor) -> Tensor:
    return x.to_padded_tensor(0) if x.is_nested else x


def _expect_field(data: Any, name: str, purpose: str) -> None:
    if name not in data:
        raise ValueError(f"data: expected {name}, {purpose}, got {', '.join(sorted(data.keys()))}")


def _compute_advantage_with_settings(compute_advantage):
    signature = inspect.signature(compute_advantage)

    @functools.wraps(compute_advantage)
    def compute_advantage_with_settings(*args, **kwargs):
        settings = settings_near(signature.bind(*args, **kwargs).arguments.get("config"))
        _say_once(f"advantages of a run with {settings or 'no vapo node: λ is algorithm.lam for both'}")
        token = _settings.set(settings)
        try:
            return compute_advantage(*args, **kwargs)
        finally:
            _settings.reset(token)

    return compute_advantage_with_settings


def _init_model_with_nll(init_model):
    @functools.wraps(init_model)
    def init_model_with_nll(self):
        init_model(self)
        if "actor" in self.role and self.config.actor.policy_loss.get("loss_mode") == LOSS_MODE:
            add_positive_nll(self)

    return init_model_with_nll


def add_positive_nll(worker: Any) -> None:
    """Give a verl actor worker, its model built, the loss `loss_with_positive_nll`.

    Raises:
        ValueError: If the config has no ``vapo`` node, or the actor's loss is not verl's ``ppo_loss``.
    """
    settings = settings_near(worker.config)
    if settings is None:
        raise ValueError("loss_mode=vapo: expected a vapo node in the config, such as +vapo.alpha=0.05, got none")
    loss = getattr(worker, "loss_fn", None)
    if getattr(loss, "func", None) is not host_attribute("verl", "verl.workers.utils.losses:ppo_loss"):
        raise ValueError(f"loss_mode=vapo: expected an actor that trains with verl's ppo_loss, got {loss}")
    if settings.nll_weight:
        host_attribute("verl", "verl.workers.engine:BaseEngine.train_batch", ("self", "data", "loss_function"))
        count_correct_tokens(worker.actor.engine, settings)
        worker.set_loss_fn(functools.partial(loss_with_positive_nll, config=loss.keywords["config"], settings=settings))
    _say_once(f"actor trains with {settings}")


@functools.cache
def _say_once(sentence: str) -> None:
    logging.getLogger(__name__).warning("vapo: %s", sentence)


# What is replaced, and the parameters that it had in the supported version.
_HOST_FUNCTIONS = {
    "verl.trainer.ppo.core_algos:compute_gae_advantage_return": (
        "token_level_rewards", "values", "response_mask", "gamma", "lam",
    ),
    "verl.trainer.ppo.ray_trainer:compute_advantage": (
        "data", "adv_estimator", "gamma", "lam", "num_repeat", "norm_adv_by_std_in_grpo", "config",
    ),
    "verl.workers.engine_workers:ActorRolloutRefWorker.init_model": ("self",),
}  # fmt: skip
_replaced: dict[str, Any] = {}


def activate() -> None:
    """Put everything in place, once.

    Raises:
        UnsupportedHost: If verl is missing or is not what it was in the supported version; then nothing is changed.
    """
    if _replaced:
        return
    _, advantage, init_model = (host_attribute("verl", path, names) for path, names in _HOST_FUNCTIONS.items())
    host_attribute("verl", "verl.workers.utils.losses:ppo_loss", ("config", "model_output", "data", "dp_group"))
    register = host_attribute("verl", "verl.trainer.ppo.core_algos:register_policy_loss", ("name",))
    ours = (gae_advantage_return, _compute_advantage_with_settings(advantage), _init_model_with_nll(init_model))
    for path, replacement in zip(_HOST_FUNCTIONS, ours, strict=True):
        owner, _, name = path.replace(":", ".").rpartition(".")
        setattr(pkgutil.resolve_name(owner), name, replacement)
        _replaced[path] = replacement
    register(LOSS_MODE)(policy_loss)
    _say_once(f"replaced {', '.join(path.replace(':', '.') for path in _replaced)}; added policy loss {LOSS_MODE!r}")


def check() -> None:
    """Fail loudly unless verl runs with these ops, here and in every Ray worker started from here.

    verl swallows the errors of its plugins, so a recipe calls this before it trains.

    Raises:
        UnsupportedHost: If verl is missing or has changed.
        RuntimeError: If the plugin is not installed or is switched off, or something has replaced its functions.
    """
    activate()
    modules = os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    installed = [point for point in metadata.entry_points(group="verl.plugins") if point.value == __name__]
    allowed = [name.strip() for name in policy.split(",")]
    is_allowed = policy == "auto" or any(point.name in allowed for point in installed)
    if __name__ not in modules and not (installed and is_allowed):
        raise RuntimeError(
            f"expected verl to load {__name__} in its workers, got entry points {[point.name for point in installed]}"
            f" and VERL_USE_EXTERNAL_PLUGINS={policy}; reinstall vapo, or set VERL_USE_EXTERNAL_MODULES={__name__}"
        )
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    found = {path: host_attribute("verl", path) for path in _replaced} | {LOSS_MODE: get_policy_loss_fn(LOSS_MODE)}
    for path, ours in (_replaced | {LOSS_MODE: policy_loss}).items():
        if found[path] is not ours:
            raise RuntimeError(f"expected {path} to be vapo's, got {found[path]}")


activate()
