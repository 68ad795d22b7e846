"""A compiled call to watch."""

import torch

kernel = torch.compile(lambda x: x * 2, backend="eager")


def attention(x):
    return kernel(x)


class Layer:
    def forward(self, x):
        return kernel(x)

    @staticmethod
    def helper(x):
        return x
