"""PPO with a critic in one file of plain PyTorch: your loop, your model, these ops.

The task: the prompt says n, the response must be n ticks and a stop. Responses differ in length, so they are packed end
to end, N tokens of S responses, and nothing is padded. The reward says how near the response came; whether it is
correct is another matter, and that is what the NLL goes by.

    python examples/plain_ppo.py --steps 40
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from vapo_kernels import linear_policy_loss, linear_token_logprobs, packed_gae, value_loss

TICK, STOP, LARGEST, MAX_LENGTH = 0, 1, 8, 12
PROMPT = 2  # The prompt for n is token PROMPT + n; the policy says ticks and stops.


class ActorCritic(nn.Module):
    """A recurrent network; ``head`` is a language model's [V, H] matrix, ``value`` its scalar head."""

    def __init__(self, hidden_size: int = 64):
        super().__init__()
        self.embedding = nn.Embedding(PROMPT + LARGEST + 1, hidden_size)
        self.rnn = nn.GRU(hidden_size, hidden_size, batch_first=True)
        self.head = nn.Linear(hidden_size, PROMPT, bias=False)
        self.value = nn.Linear(hidden_size, 1)

    def forward(self, token_ids: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.rnn(self.embedding(token_ids), state)


@torch.no_grad()
def sample(model: ActorCritic, numbers: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Prompt and response of each row, [S, 1 + MAX_LENGTH], and where the sampled tokens are, [S, MAX_LENGTH]."""
    ids, running, state = [PROMPT + numbers], [torch.ones_like(numbers, dtype=torch.bool)], None
    for _ in range(MAX_LENGTH):
        hidden, state = model(ids[-1][:, None], state)
        probabilities = model.head(hidden[:, 0]).softmax(-1)
        ids.append(torch.multinomial(probabilities, 1, generator=generator)[:, 0])
        running.append(running[-1] & (ids[-1] != STOP))
    return torch.stack(ids, 1), torch.stack(running[:-1], 1)


def train(steps: int, seed: int = 0, num_responses: int = 128, epochs: int = 2) -> list[float]:
    """Train from nothing; returns the share of correct responses at every step."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    accuracy = []
    for _ in range(steps):
        numbers = torch.randint(1, LARGEST + 1, (num_responses,), generator=generator)
        ids, sampled = sample(model, numbers, generator)
        # From here on packed: [N] tokens, the state before each of them in `hidden`.
        token_ids, lengths = ids[:, 1:][sampled], sampled.sum(1)
        cu_seqlens = nn.functional.pad(lengths.cumsum(0), (1, 0))
        last = cu_seqlens[1:] - 1
        is_correct = (lengths == numbers + 1) & (token_ids[last] == STOP)
        nearness = 1 - (lengths - 1 - numbers).abs() / MAX_LENGTH
        rewards = torch.zeros(len(token_ids)).index_copy(0, last, nearness)

        with torch.no_grad():
            hidden = model(ids[:, :-1])[0][sampled]
            old_logprobs = linear_token_logprobs(hidden, model.head.weight, token_ids).logprobs
            old_values = model.value(hidden)[:, 0]
        # λ by each response's length for the policy, λ = 1 for the critic. The responses are short, so α is large.
        advantages, returns = packed_gae(rewards, old_values, cu_seqlens, alpha=1.0)

        mask = torch.ones_like(token_ids, dtype=torch.bool)
        for _ in range(epochs):
            hidden = model(ids[:, :-1])[0][sampled]
            policy = linear_policy_loss(
                hidden,
                model.head.weight,
                token_ids,
                old_logprobs,
                advantages,
                mask,
                is_correct=is_correct.repeat_interleave(lengths),
                nll_weight=0.1,
            )
            critic = value_loss(model.value(hidden)[:, 0], returns, mask)
            optimizer.zero_grad()
            (policy.loss + critic.loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        accuracy.append(is_correct.float().mean().item())
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    history = train(arguments.steps, arguments.seed)
    for step in range(0, len(history), 5):
        print(f"step {step:3d}  correct {sum(history[step : step + 5]) / len(history[step : step + 5]):.2f}")
