"""VAPO's advantages and loss in TRL 1.16: a GRPOTrainer whose advantages are per token.

TRL has no critic and trains one model. So the critic here is frozen, one that was trained elsewhere (`vapo train`
writes one as ``critic/``); without one, the value of every token is its group's mean reward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vapo.integrations import host_attribute
from vapo.rollout.rewards import terminal_rewards
from vapo_kernels import logprob_policy_loss, padded_gae

# Private parts of TRL that the subclass overrides or calls.
_PARAMETERS = {
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_get_per_token_logps_and_entropies": ("self", "model", "input_ids", "attention_mask", "logits_to_keep"),
    "_compute_loss": ("self", "model", "inputs"),
}
for _name, _names in _PARAMETERS.items():
    host_attribute("trl", f"trl:GRPOTrainer.{_name}", _names)
GRPOTrainer = host_attribute("trl", "trl:GRPOTrainer")


class VAPOTrainer(GRPOTrainer):
    """GRPOTrainer with GAE from a frozen critic, Clip-Higher and the NLL of correct completions (Eq. 3–9, 15–17).

    Means are over the tokens, and the correct tokens, of the generation batch, which TRL scales to one optimiser step;
    the two are the same with TRL's default ``steps_per_generation``. Clip range, β, entropy and temperature are those
    of the ``GRPOConfig``; its ``loss_type`` and ``scale_rewards`` are not used. Text only.

    Args:
        *args: As GRPOTrainer.
        critic: Maps ``input_ids`` and ``attention_mask``, [B, L], to an output whose ``logits`` are [B, L, 1], such as
            a token-classification model with one label; never trained here. None: V is the group's mean reward.
        alpha: α of Eq. 15.
        lam_policy: λ of the advantages; None: Eq. 15.
        nll_weight: μ of Eq. 17.
        correct_above: A completion is correct if its weighted sum of rewards is more than this.
        **kwargs: As GRPOTrainer.

    Raises:
        ValueError: If ``importance_sampling_level`` is not ``token``.
    """

    def __init__(
        self,
        *args,
        critic: nn.Module | None = None,
        alpha: float = 0.05,
        lam_policy: float | None = None,
        nll_weight: float = 0.1,
        correct_above: float = 0.0,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        if self.importance_sampling_level != "token":
            raise ValueError(f"importance_sampling_level: expected token, got {self.importance_sampling_level}")
        self.alpha, self.lam_policy, self.nll_weight, self.correct_above = alpha, lam_policy, nll_weight, correct_above
        self.critic = None if critic is None else critic.to(self.accelerator.device).eval().requires_grad_(False)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        scores = (rewards * self.reward_weights.to(rewards.device)).nansum(1)
        # Of all processes: groups may lie across them. NaN where no reward function gave a number.
        self._scores = scores.masked_fill(rewards.isnan().all(1), torch.nan)
        return rewards

    def _generate_and_score_completions(self, inputs) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        mask = _mask(out)
        mine = slice(self.accelerator.process_index * len(mask), (self.accelerator.process_index + 1) * len(mask))
        scores = self._scores[mine]
        num_generations = self.num_generations if self.model.training else self.num_generations_eval
        group_means = (
            self._scores.view(-1, num_generations).nanmean(1).nan_to_num(0).repeat_interleave(num_generations)[mine]
        )
        values = group_means[:, None].expand(mask.shape) if self.critic is None else self._values(out)
        rewards = terminal_rewards(scores.nan_to_num(0), mask)
        gae = padded_gae(rewards, values, mask, lam_policy=self.lam_policy, alpha=self.alpha)
        is_correct = scores > self.correct_above
        num_correct = (mask * is_correct[:, None]).sum()
        return out | {
            "advantages": gae.advantages.masked_fill(scores.isnan()[:, None], 0),
            "is_correct": is_correct,
            "num_correct_items_in_batch": self.accelerator.gather(num_correct).sum(),
        }

    @torch.no_grad()
    def _values(self, out: dict[str, Any]) -> Tensor:
        """V of the state before each completion token: the critic's output one position earlier."""
        input_ids = torch.cat([out["prompt_ids"], out["completion_ids"]], 1)
        attention_mask = torch.cat([out["prompt_mask"], out["completion_mask"]], 1)
        values = self.critic(input_ids=input_ids, attention_mask=attention_mask).logits.squeeze(-1)
        return values[:, -out["completion_ids"].shape[1] - 1 : -1].float()

    def _compute_loss(self, model, inputs):
        logprobs, entropy, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            inputs["completion_ids"].shape[1],
            compute_entropy=True,
        )
        mask = _mask(inputs)
        old_logprobs, weights = inputs.get("old_per_token_logps"), inputs.get("importance_sampling_ratio")
        share = self._share_of_generation_batch()
        out = logprob_policy_loss(
            logprobs,
            logprobs.detach() if old_logprobs is None else old_logprobs,
            inputs["advantages"],
            mask,
            entropy=entropy,
            is_correct=inputs["is_correct"][:, None].expand(mask.shape),
            clip_low=self.epsilon_low,
            clip_high=self.epsilon_high,
            nll_weight=self.nll_weight,
            num_tokens=inputs["num_items_in_batch"] * share,
            num_correct_tokens=inputs["num_correct_items_in_batch"] * share,
            ref_logprobs=inputs.get("ref_per_token_logps"),
            kl_weight=self.beta,
            entropy_weight=self.entropy_coef,
            token_weights=None if weights is None else weights.expand(mask.shape),
        )
        # Sums over the step's micro-batches, so the log shows their mean over micro-batches times their number.
        mode = "train" if self.model.training else "eval"
        for name, x in (("positive_nll", out.positive_nll), ("clip_ratio/region_mean", out.clip_fraction)):
            self._metrics[mode][name].append((self.accelerator.gather(x).mean() * self._parts(mode)).item())
        self._metrics[mode]["entropy"].append((self.accelerator.gather(out.entropy).mean() * self._parts(mode)).item())
        return out.loss

    def _share_of_generation_batch(self) -> float:
        """What one process's part of an optimiser step is of the generation batch, by which TRL's counts go."""
        share = 1 / self.accelerator.num_processes
        if self.model.training:
            share *= self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return share

    def _parts(self, mode: str) -> int:
        return self.current_gradient_accumulation_steps if mode == "train" else 1


def _mask(inputs: dict[str, Any]) -> Tensor:
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
