"""A model's weights, or its gradient, as one vector: two models are compared at once."""

import torch
from torch import Tensor, nn


def weights(model: nn.Module) -> Tensor:
    """A copy of every parameter; tied ones once."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def gradient(model: nn.Module) -> Tensor:
    """A copy of the gradient of every parameter."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
