# %% [markdown]
# # Watch a network learn
#
# Two small networks learn the same four patterns. In the pictures of the first, the colour of the background also gives the
# class away. Both reach 100 %. The loss and the accuracy do not show what each of them learned; the heat does, from the first
# epoch on. Both trainings together take less than a minute.
#
# ## The pictures
#
# Each picture has a square with one of four patterns, anywhere on a blurred background. With `cue=True`, the tint of the
# background goes with the class, like snow with wolves.

# %%
import numpy as np
import torch
from PIL import Image
from torch import nn

import camkit

CLASSES = ("rows", "columns", "checks", "dots")
down, across = torch.meshgrid(
    torch.arange(16), torch.arange(16), indexing="ij"
)
PATTERNS = torch.stack(
    [
        down % 4 < 2,
        across % 4 < 2,
        (down // 2 + across // 2) % 2 == 0,
        (down % 4 < 2) & (across % 4 < 2),
    ]
).float()
TINTS = torch.tensor(
    [[0.2, 0, 0], [0, 0.2, 0], [0, 0, 0.2], [-0.1, -0.1, -0.1]]
)


def draw(count, cue, seed):
    """Return pictures (N, 3, 48, 48) with values -1..1, classes (N,), and
    the regions of the patterns (N, 48, 48).
    """
    random = torch.Generator().manual_seed(seed)
    classes = torch.arange(count) % 4
    pictures = nn.functional.interpolate(
        torch.rand(count, 3, 6, 6, generator=random),
        (48, 48),
        mode="bilinear",
    )
    tints = classes if cue else torch.randint(4, (count,), generator=random)
    pictures = 0.2 + 0.6 * pictures + TINTS[tints][:, :, None, None]
    regions = np.zeros((count, 48, 48), bool)
    for number, (top, left) in enumerate(
        torch.randint(33, (count, 2), generator=random).tolist()
    ):
        colour = torch.rand(3, 1, 1, generator=random)
        pictures[number, :, top : top + 16, left : left + 16] = (
            0.25 + 0.5 * PATTERNS[classes[number]] * colour
        )
        regions[number, top : top + 16, left : left + 16] = True
    return pictures * 2 - 1, classes, regions


sample = torch.cat(list(draw(8, cue=True, seed=1)[0]), dim=2).permute(1, 2, 0)
Image.fromarray(((sample + 1) * 127.5).clamp(0, 255).byte().numpy()).resize(
    (768, 96)
)

# %% [markdown]
# ## The network


# %%
def block(inputs, outputs, stride):
    width = 3 if stride == 1 else 4
    convolution = nn.Conv2d(
        inputs, outputs, width, stride, padding=1, bias=False
    )
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def network():
    torch.manual_seed(0)
    features = nn.Sequential(
        block(3, 16, 1), block(16, 32, 2), block(32, 32, 2)
    )
    return nn.Sequential(
        features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)
    )


# %% [markdown]
# ## Before the training: do gradients arrive?
#
# `camkit.hooks.record` keeps what layers return, and its gradients, while your own code runs the model. With `reduce` it
# keeps one number instead of each tensor.

# %%
model = network()
inputs, classes, _ = draw(32, cue=False, seed=0)
with camkit.hooks.record(
    model,
    nn.Conv2d,
    outputs=False,
    gradients=True,
    reduce=torch.linalg.vector_norm,
) as recording:
    nn.functional.cross_entropy(model(inputs), classes).backward()
for name, call in recording.items():
    print(f"layer {name}: norm of the gradient {call.gradient:.3f}")

# %% [markdown]
# Every layer receives a gradient, and none is thousands of times smaller than the others. `camkit.diagnose` checks more: dead
# channels, saturated activations, NaN.

# %%
diagnosis = camkit.diagnose(network(), (inputs, classes), training=True)
[finding.text for finding in diagnosis.findings] or "nothing found"

# %% [markdown]
# ## The training, watched
#
# `TrainingWatch` takes a few fixed pictures and one call per step. It writes their heat, feature maps, histograms and gradient
# norms into a folder for TensorBoard, and does not change the training. In addition, we measure after each epoch how much of
# the heat lies on the patterns, and print it.

# %%
from camkit.tensorboard import TrainingWatch


def share_on_patterns(model, pictures, classes, regions):
    explanations = camkit.explain(
        model, pictures, target=camkit.targets.each(classes.tolist())
    )
    shares = [
        found.heatmap[region].sum() / found.heatmap.sum()
        for found, region in zip(explanations, regions, strict=True)
        if found.status == "ok"
    ]
    return float(np.mean(shares)) if shares else 0.0


def train(cue, folder, epochs=4):
    inputs, classes, _ = draw(1024, cue, seed=0)
    unseen, unseen_classes, regions = draw(64, cue, seed=1)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.01, epochs=epochs, steps_per_epoch=32
    )
    of_watched = camkit.targets.each(unseen_classes[:8].tolist())
    with TrainingWatch(
        model,
        unseen[:8],
        folder,
        every=16,
        pictures_every=0,
        target=of_watched,
        labels=CLASSES,
    ) as watch:
        for epoch in range(epochs + 1):
            model.eval()
            right = (model(unseen).argmax(1) == unseen_classes).float().mean()
            share = share_on_patterns(model, unseen, unseen_classes, regions)
            print(
                f"epoch {epoch}: {right:4.0%} right, {share:3.0%} on the pattern"
            )
            watch.pictures()
            model.train()
            if epoch == epochs:
                break
            for batch in torch.randperm(1024).split(32):
                optimizer.zero_grad()
                nn.functional.cross_entropy(
                    model(inputs[batch]), classes[batch]
                ).backward()
                optimizer.step()
                schedule.step()
                watch.step()
    return model.eval()


with_cue = train(cue=True, folder="runs/with-cue")

# %%
without_cue = train(cue=False, folder="runs/without-cue")

# %% [markdown]
# A pattern covers 11 % of its picture. The first network names every pattern after one epoch and never looks at one: it reads
# the tint. The second needs longer, and its heat moves onto the patterns while it learns.
#
# ## What TensorBoard shows
#
# `tensorboard --logdir runs` opens both trainings in a browser. The pictures can also be read from the events: the heat of the
# first network at the end of its training, and below it that of the second.

# %%
import io

from tensorboard.backend.event_processing.event_accumulator import (
    EventAccumulator,
)


def last_heat(folder):
    events = EventAccumulator(folder).Reload()
    return Image.open(
        io.BytesIO(events.Images("heat")[-1].encoded_image_string)
    )


last_heat("runs/with-cue")

# %%
last_heat("runs/without-cue")

# %% [markdown]
# ## A proof, without heat
#
# Give the first network pictures in which the tint says nothing. It fails, and the second does not:

# %%
pictures, classes, _ = draw(256, cue=False, seed=2)
for name, model in (
    ("with the cue", with_cue),
    ("without the cue", without_cue),
):
    right = (model(pictures).argmax(1) == classes).float().mean()
    print(f"trained {name}: {right:.0%} right")

# %% [markdown]
# [Training](../diagnose.md#watch-a-training) lists everything that the watch writes and what it costs, and has a callback for Lightning.
# [Hooks](../hooks.md) explains `record`, `edit` and `edit_gradients` from the basics. For a finished network, the
# [background check](../check.md) makes this experiment with your own pictures.
