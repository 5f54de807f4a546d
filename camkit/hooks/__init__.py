"""The hook toolbox: record what layers compute, change it, and change gradients, while your own code runs the model.

    >>> import torch, camkit
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(inplace=True), torch.nn.Linear(3, 1))
    >>> with camkit.hooks.record(net, torch.nn.Linear, gradients=True) as recording:
    ...     net(torch.ones(2, 4)).sum().backward()
    >>> recording["0"].output.shape, recording["0"].gradient.shape
    (torch.Size([2, 3]), torch.Size([2, 3]))

Here is every PyTorch hook camkit sets: on for a while, in the thread that set it, and off again whatever happens. The
engine uses the same pieces.
"""

from camkit.hooks.attach import ForwardHook as ForwardHook
from camkit.hooks.attach import forward_hooks as forward_hooks
from camkit.hooks.attach import ordinary_gradients as ordinary_gradients
from camkit.hooks.attach import starts as starts
from camkit.hooks.calls import Call, Recording
from camkit.hooks.changes import clip_norm, clip_value, noise, scale
from camkit.hooks.cutting import EntangledError as EntangledError
from camkit.hooks.cutting import Saved as Saved
from camkit.hooks.cutting import Tape as Tape
from camkit.hooks.cutting import cut as cut
from camkit.hooks.editing import edit, edit_gradients
from camkit.hooks.parameters import parameter_gradients as parameter_gradients
from camkit.hooks.recording import record
from camkit.hooks.resizing import resized_input as resized_input
from camkit.hooks.resizing import resizing as resizing

__all__ = ["Call", "Recording", "clip_norm", "clip_value", "edit", "edit_gradients", "noise", "record", "scale"]
