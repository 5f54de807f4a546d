# %% [markdown]
# # Mend a refused network
#
# A network that reads the background has often learned the object too, and only its last layer ignores it. Then you do not
# need new pictures or another training run. This tutorial trains such a network, refuses it, mends it, and checks it again.
#
# ## The pictures
#
# Each picture has a square with one of four patterns. In nine of ten pictures, the tint of the background goes with the class,
# like snow with wolves. In the others it is drawn at random.

# %%
from pathlib import Path

import torch
from PIL import Image
from torch import nn
from torchvision.transforms import v2

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


def draw(count, tied, seed):
    """Return pictures (N, 3, 48, 48) with values 0..1, classes (N,), and
    the regions of the patterns (N, 48, 48).
    """
    random = torch.Generator().manual_seed(seed)
    classes = torch.arange(count) % 4
    is_tied = torch.rand(count, generator=random) < tied
    tints = torch.where(
        is_tied, classes, torch.randint(4, (count,), generator=random)
    )
    pictures = nn.functional.interpolate(
        torch.rand(count, 3, 6, 6, generator=random),
        (48, 48),
        mode="bilinear",
    )
    pictures = 0.2 + 0.6 * pictures + TINTS[tints][:, :, None, None]
    regions = torch.zeros(count, 48, 48, dtype=torch.bool)
    for number, (top, left) in enumerate(
        torch.randint(33, (count, 2), generator=random).tolist()
    ):
        colour = torch.rand(3, 1, 1, generator=random)
        pictures[number, :, top : top + 16, left : left + 16] = (
            0.25 + 0.5 * PATTERNS[classes[number]] * colour
        )
        regions[number, top : top + 16, left : left + 16] = True
    return pictures.clamp(0, 1), classes, regions


def write(folder, count, seed):
    """Write a folder per class, and the masks beside it."""
    pictures, classes, regions = draw(count, 0.9, seed)
    pixels = (pictures * 255).byte().permute(0, 2, 3, 1).numpy()
    masks = regions.numpy()
    for number, name in enumerate(classes.tolist()):
        for kind, content in (("pictures", pixels), ("masks", masks)):
            file = Path(folder, kind, CLASSES[name], f"{number:03}.png")
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(content[number]).save(file)
    return f"{folder}/pictures"


sample = torch.cat(list(draw(8, 0.9, seed=1)[0]), dim=2).permute(1, 2, 0)
Image.fromarray((sample * 255).byte().numpy()).resize((768, 96))

# %% [markdown]
# ## The network
#
# It is trained on 1,024 such pictures. It is right for nearly all pictures of this kind, and for fewer than half if the tints are
# drawn at random.


# %%
def block(inputs, outputs, stride):
    width = 3 if stride == 1 else 4
    convolution = nn.Conv2d(
        inputs, outputs, width, stride, padding=1, bias=False
    )
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


torch.manual_seed(0)
model = nn.Sequential(
    block(3, 16, 1),
    block(16, 32, 2),
    block(32, 32, 2),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 4),
)
inputs, classes, _ = draw(1024, 0.9, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
schedule = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, 0.01, total_steps=4 * 32
)
for _ in range(4):
    for rows in torch.randperm(1024).split(32):
        loss = nn.functional.cross_entropy(
            model(inputs[rows] * 2 - 1), classes[rows]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
model.eval()


def accuracy(model, tied):
    pictures, classes, _ = draw(1000, tied, seed=5)
    with torch.inference_mode():
        answers = model(pictures * 2 - 1).argmax(1)
    return (answers == classes).float().mean().item()


print(f"tints as in training: {accuracy(model, 0.9):.0%} right")
print(f"tints at random:      {accuracy(model, 0.0):.0%} right")

# %% [markdown]
# ## Check, and refuse
#
# The check sees a folder of pictures in which the tints go with the classes, as in training.

# %%
options = {
    "preprocess": v2.Compose(
        [
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.5] * 3),
        ]
    ),
    "labels": CLASSES,
}
refused = camkit.check(model, write("validation", 200, seed=2), **options)
refused

# %% [markdown]
# ## Mend
#
# `mend` pastes the patterns of half of the pictures on the backgrounds of all classes, and trains the last layer anew. The
# other half of the pictures gives the figures before and after. `problem` is empty if mending helped.

# %%
mended = camkit.mend(model, "validation/pictures", **options)
print(f"problem:    {mended.problem or 'none'}")
for name, result, gap, pair in (
    ("before", mended.before, mended.gaps[0], mended.worst_before),
    ("after", mended.after, mended.gaps[1], mended.worst_after),
):
    right = result.overall.accuracy.value
    print(f"{name:6} {right:.0%} right, gap {gap:.2f}, worst pair: {pair}")

# %% [markdown]
# ## Check again
#
# The proof is a check on pictures that mending has never seen. Here we can also measure the truth, because we can draw the tints
# at random.

# %%
again = camkit.check(mended.model, write("others", 200, seed=3), **options)
again

# %%
print(f"tints as in training: {accuracy(mended.model, 0.9):.0%} right")
print(f"tints at random:      {accuracy(mended.model, 0.0):.0%} right")
mended.save("mended.pth")

# %% [markdown]
# ## When it does not work
#
# A network that has never seen a class without its background has not learned the object, so no last layer can use it. The
# network `demo-biased` is such a case:

# %%
hopeless = camkit.mend(
    "demo-biased",
    camkit.scenes.labelled_scenes(),
)
hopeless.problem

# %% [markdown]
# Train such a network on the pictures that `camkit mend --export` writes.
# [Mend a refused model](../check.md#mend-a-refused-model) shows the command.
