"""Everything that training changes, which is everything that a checkpoint holds."""

from __future__ import annotations

import base64
import random
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vapo.config import Config
from vapo.models.auto import resolve_auto
from vapo.models.checkpoint import load_checkpoint, read_state, save_checkpoint
from vapo.models.load import (
    copy_parameters,
    critic_from_policy,
    load_critic,
    load_policy,
    max_positions,
    reference_of,
    stop_token_ids,
    value_head,
)
from vapo.models.output_head import plain_head
from vapo.models.sharding import device_mesh, gather_objects, rank, shard, world_size
from vapo.models.weights import save_model
from vapo.rollout.sampling import Sampling, sampling_of, with_engine
from vapo.tasks import Task
from vapo.types import PHASES

HELD_OUT_SEED = 0
_ORDER = tuple(PHASES)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True)
class Generators:
    """One source of randomness for each purpose, so that changing one use leaves the others alone."""

    data: random.Random
    sampling: torch.Generator
    shuffling: torch.Generator

    def state_dict(self) -> dict[str, Any]:
        """The generators' states, fit for JSON."""
        states = {"sampling": self.sampling.get_state(), "shuffling": self.shuffling.get_state()}
        encoded = {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}
        return {"data": self.data.getstate(), **encoded}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Restore the generators that ``states`` names, from `state_dict` by way of JSON."""
        for name, state in states.items():
            if name == "data":
                version, numbers, gauss = state
                self.data.setstate((version, tuple(numbers), gauss))
            else:
                content = bytearray(base64.b64decode(state))
                getattr(self, name).set_state(torch.frombuffer(content, dtype=torch.uint8))


@dataclass(slots=True)
class Learner:
    """Models, optimisers, generators, and how far the run is.

    Attributes:
        policy: The policy.
        critic: The critic; None with group advantages.
        reference: The policy before RL, frozen; None without a KL term.
        tokenizer: The policy's.
        task: Prompts and verifier, with the data cursor.
        sampling: How training rollouts are sampled.
        policy_optimizer: AdamW of the policy in the present phase.
        critic_optimizer: AdamW of the critic in the present phase.
        generators: Those of the present phase.
        phase: One of ``PHASES``, or "" before the first.
        step: Steps of the phase that are done.
        phase_is_over: The phase has reached its target before its last step.
        before: Held-out metrics before RL, once they are known.
        after: The newest held-out metrics.
        skips: By "actor" and "critic", how many optimiser steps in a row were skipped. Not in a checkpoint: a run that
            ended for too many of them goes on with other data and a new count.
    """

    policy: PreTrainedModel
    critic: PreTrainedModel | None
    reference: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase
    task: Task
    sampling: Sampling
    policy_optimizer: torch.optim.Optimizer | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    generators: Generators | None = None
    phase: str = ""
    step: int = 0
    phase_is_over: bool = False
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    skips: Counter[str] = field(default_factory=Counter)

    @property
    def models(self) -> dict[str, PreTrainedModel]:
        """The models that there are, by name."""
        models = {"policy": self.policy, "critic": self.critic, "reference": self.reference}
        return {name: model for name, model in models.items() if model is not None}

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimisers of the present phase, by the name of their model."""
        optimizers = {"policy": self.policy_optimizer, "critic": self.critic_optimizer}
        return {name: optimizer for name, optimizer in optimizers.items() if optimizer is not None}

    def is_past(self, phase: str) -> bool:
        """Whether the run has left a phase for a later one."""
        return bool(self.phase) and _ORDER.index(self.phase) > _ORDER.index(phase)

    def steps_of(self, phase: str) -> int:
        """Steps of the present phase that are done; 0 for another one."""
        return self.step if self.phase == phase else 0

    def begin(self, phase: str, config: Config) -> None:
        """Enter a phase with fresh optimisers and generators.

        Moments of earlier phases do not fit its gradients, and no rollout of an earlier phase is repeated.
        """
        if self.phase == "warm_start" and self.critic is not None and not config.critic:
            copy_parameters(self.policy.base_model, self.critic.base_model)
        self.phase, self.step, self.phase_is_over = phase, 0, False
        self.generators = make_generators(f"{phase} {config.seed}", self.policy.device)
        self.policy_optimizer = self.critic_optimizer = None
        decay = config.weight_decay
        if phase == "warm_start":
            self.policy_optimizer = adamw(self.policy, lr=config.warm_start_lr, betas=(0.9, 0.98), weight_decay=decay)
        if phase == "vapo":
            if self.reference is not None:
                copy_parameters(self.policy, self.reference)
            self.policy_optimizer = adamw(self.policy, lr=config.actor_lr, weight_decay=decay)
        if phase != "warm_start" and self.critic is not None:
            self.critic_optimizer = adamw(self.critic, lr=config.critic_lr, weight_decay=decay)

    def save(self, folder: Path, config: Config) -> None:
        """Write a checkpoint."""
        state = {
            "phase": self.phase,
            "step": self.step,
            "phase_is_over": self.phase_is_over,
            "before": self.before,
            "after": self.after,
            "task": self.task.state_dict(),
            "device": self.policy.device.type,
            "generators": gather_objects(self.generators.state_dict()),
        }
        save_checkpoint(
            folder,
            f"{_ORDER.index(self.phase)}-{self.phase}-{self.step:06d}",
            models=self.models,
            optimizers=self.optimizers,
            state=state,
            keep=config.keep_checkpoints,
        )

    def restore(self, checkpoint: Path, config: Config) -> None:
        """Go on from a checkpoint."""
        state = read_state(checkpoint)
        self.begin(state["phase"], config)
        load_checkpoint(checkpoint, models=self.models, optimizers=self.optimizers)
        self.step, self.phase_is_over = state["step"], state["phase_is_over"]
        self.before, self.after = state["before"], state["after"]
        self.task.load_state_dict(state["task"])
        generators = state["generators"][rank() % len(state["generators"])]
        if len(state["generators"]) != world_size() or state["device"] != self.policy.device.type:
            # With another number of ranks no two may sample the same; another device has another kind of generator.
            purpose = f"sampling {self.phase} {config.seed} resumed at {self.step}"
            self.generators.sampling.manual_seed(seed_for(purpose, rank()))
            del generators["sampling"]
        self.generators.load_state_dict(generators)

    def export(self, folder: Path) -> None:
        """Write ``policy/``, with its tokenizer, and ``critic/`` as folders that ``from_pretrained`` loads."""
        export(self.policy, folder / "policy")
        if rank() == 0:
            self.tokenizer.save_pretrained(folder / "policy")
        if self.critic is not None:
            export(self.critic, folder / "critic")


def adamw(model: PreTrainedModel, **settings: Any) -> torch.optim.AdamW:
    """AdamW of a model's parameters; on a GPU one kernel for many of them."""
    return torch.optim.AdamW(model.parameters(), fused=True if model.device.type == "cuda" else None, **settings)


def make_learner(config: Config, task: Task, device: torch.device) -> Learner:
    """Load or build the models that a run needs, place them and, with several ranks, shard them."""
    mesh = device_mesh(device, config.shard_ranks)
    config, _ = resolve_auto(config, device)
    check_engine(config, device)
    options = {"attention": config.attention, "gradient_checkpointing": config.gradient_checkpointing}
    policy, tokenizer = load_policy(config.model, task, seed=seed_for("init", config.seed), **options)
    critic = reference = None
    if config.has_critic:
        critic = load_critic(config.critic, **options) if config.critic else critic_from_policy(policy)
    check_models(config, policy, critic, tokenizer)
    if config.has_reference:
        reference = reference_of(policy)
    learner = Learner(policy, critic, reference, tokenizer, task, sampling_of(config, policy, tokenizer))
    for model in learner.models.values():
        shard(model, DTYPES[config.dtype], device, exact=value_head(critic) if model is critic else None, mesh=mesh)
        if model is not critic:
            plain_head(model)
    learner.sampling = with_engine(learner.sampling, policy, config)
    return learner


def choose_device(config: Config) -> torch.device:
    """Resolve ``config.device``.

    Raises:
        ValueError: If it is "cuda" where PyTorch sees no GPU.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ValueError("device must be auto or cpu where PyTorch sees no GPU; got 'cuda'")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def check_engine(config: Config, device: torch.device) -> None:
    """Refuse importance weights where the engine tells no log-probs to weigh with.

    Raises:
        ValueError: If it does not.
    """
    if config.used_importance_cap and config.engine == "transformers" and device.type == "cpu":
        raise ValueError(
            "importance_cap must be auto or None with engine transformers on a CPU, which tells no log-probs;"
            f" got {config.importance_cap}"
        )


def check_models(
    config: Config, policy: PreTrainedModel, critic: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check that models, with weights or without, fit each other and the settings.

    Raises:
        ValueError: If the policy has too few positions, a stop string is not one token, or the critic embeds another
            number of tokens.
    """
    if config.max_new_tokens >= max_positions(policy):
        raise ValueError(
            f"max_new_tokens must be below the model's {max_positions(policy)} positions; got {config.max_new_tokens}"
        )
    if config.stop:
        stop_token_ids(policy, tokenizer, config.stop)
    if critic is not None:
        check_vocabulary(critic, policy)


def check_vocabulary(critic: PreTrainedModel, policy: PreTrainedModel) -> None:
    """Refuse a critic that does not embed the policy's tokens.

    Raises:
        ValueError: If it has another number of embeddings.
    """
    found, expected = (model.get_input_embeddings().num_embeddings for model in (critic, policy))
    if found != expected:
        raise ValueError(f"the critic must embed the policy's {expected} tokens; got {found}")


def make_generators(purpose: str, device: torch.device) -> Generators:
    """Seed one generator for each use; all ranks have the same data and shuffles, and each its own samples."""
    return Generators(
        data=random.Random(seed_for(f"data {purpose}", 0)),
        sampling=torch.Generator(device).manual_seed(seed_for(f"sampling {purpose}", rank())),
        shuffling=torch.Generator().manual_seed(seed_for(f"shuffling {purpose}", 0)),
    )


def seed_for(purpose: str, seed: int) -> int:
    """Derive the seed of one purpose from a number."""
    return zlib.crc32(f"{purpose} {seed}".encode())


def export(model: PreTrainedModel, folder: Path) -> None:
    """Write a model as transformers' folder, a tensor at a time; every rank takes part, the first one writes.

    Raises:
        OSError: If it cannot be written.
    """
    try:
        save_model(model, folder)
    except SafetensorError as error:
        raise OSError(None, f"{folder} could not be written: {error}") from error
