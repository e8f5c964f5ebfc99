"""A model's weights, or its gradient, as one vector: two models are compared at once."""

import torch
from torch import Tensor, nn


def weights(model: nn.Module) -> Tensor:
    """A copy of everything in the model's state."""
    return torch.cat([each.detach().flatten().clone() for each in model.state_dict().values()])


def gradient(model: nn.Module) -> Tensor:
    """A copy of the gradient of every parameter."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
