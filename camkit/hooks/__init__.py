"""The hook toolbox: record what layers compute, change it, and change gradients, while your own code runs the model.

    >>> import torch, camkit
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(inplace=True), torch.nn.Linear(3, 1))
    >>> with camkit.hooks.record(net, torch.nn.Linear, gradients=True) as recording:
    ...     net(torch.ones(2, 4)).sum().backward()
    >>> recording["0"].output.shape, recording["0"].gradient.shape
    (torch.Size([2, 3]), torch.Size([2, 3]))

Hooks exist only inside a ``with`` block and act only in the thread that opened it. They are removed at its end, also
after an error.
"""

from camkit.hooks.changes import clip_norm, clip_value, noise, scale
from camkit.hooks.editing import edit, edit_gradients
from camkit.hooks.recording import Call, Recording, record

__all__ = ["Call", "Recording", "clip_norm", "clip_value", "edit", "edit_gradients", "noise", "record", "scale"]
