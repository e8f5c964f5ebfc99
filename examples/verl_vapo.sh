#!/usr/bin/env bash
# VAPO on verl 0.9.1: Ray, FSDP and vLLM are verl's; the advantages, the policy loss and the NLL are this package's.
#
#   pip install verl==0.9.1 vllm && pip install .
#   MODEL=Qwen/Qwen2.5-7B TRAIN=train.parquet TEST=test.parquet GPUS=8 bash examples/verl_vapo.sh
#
# Further settings go behind it as they would behind verl's own command: `… examples/verl_vapo.sh trainer.logger=wandb`.
#
# What differs from the paper (arXiv 2504.05118), beside the model and the data:
# - Value pretraining is the first critic-only steps of the same run. `critic_warmup=N` means N − 1 of them, so 51 is 50.
#   It samples each batch once; the critic keeps its optimiser when the policy starts.
# - The critic is a token-classification head on MODEL; the paper starts it from a reward model.
# - Advantages are whitened over the batch, as verl always does: `+vapo.whiten_advantages=false` leaves them.
# - "Correct" is a score above 0 (`+vapo.correct_above`): a reward function that gives partial credit needs another bound.
# - A truncated response counts as finished (V = 0 after it), and no overlong penalty is applied.
# - verl cannot switch off the value clip nor the dual clip, so both bounds are set out of reach.
# - Batch and lengths are small: the paper samples 512 prompts × 16 and updates on 512 responses (= 32 prompts) at a time.
set -euo pipefail

MODEL="${MODEL:-Qwen/Qwen2.5-7B}"
TRAIN="${TRAIN:-train.parquet}"
TEST="${TEST:-test.parquet}"
GPUS="${GPUS:-8}"
PROMPTS="${PROMPTS:-512}"
RESPONSE="${RESPONSE:-8192}"

python3 -c 'from vapo.integrations.verl import check; check()'

exec python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    algorithm.gamma=1.0 \
    +vapo.alpha=0.05 \
    +vapo.lam_critic=1.0 \
    +vapo.nll_weight=0.1 \
    actor_rollout_ref.actor.policy_loss.loss_mode=vapo \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=1000.0 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.entropy_coeff=0.0 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=32768 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.use_remove_padding=True \
    critic.model.path="$MODEL" \
    critic.model.use_remove_padding=True \
    critic.optim.lr=2e-6 \
    critic.cliprange_value=1000.0 \
    critic.ppo_max_token_len_per_gpu=32768 \
    data.train_files="$TRAIN" \
    data.val_files="$TEST" \
    data.train_batch_size="$PROMPTS" \
    data.max_prompt_length=2048 \
    data.max_response_length="$RESPONSE" \
    trainer.critic_warmup=51 \
    trainer.n_gpus_per_node="$GPUS" \
    trainer.project_name=vapo \
    trainer.experiment_name=vapo \
    "$@"
