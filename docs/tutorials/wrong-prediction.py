# %% [markdown]
# # Explain a wrong prediction
#
# A network calls a plane a bird. You want to know why, and what to do about it. This takes four steps: look at the heat,
# compare it with the right class, test what it suggests, and decide what to fix.
#
# The network and the picture ship with camkit, so nothing is downloaded. To use your own, pass a module or a name such
# as `"resnet50"` instead of `"demo-biased"`, and the path of your picture.

# %%
import numpy as np
from PIL import Image

import camkit

path = camkit.scenes.scene_paths()["plane-wood"]
found = camkit.explain("demo-biased", path)
found

# %% [markdown]
# In a shell, the same picture comes from one command:
#
# ```sh
# camkit image.jpg --model demo-biased
# ```
#
# ## Where the heat lies
#
# The plane is white and stands out, yet the heat is on the trees. A number is more precise than the eye. Here the region of
# the plane is known. For your own picture, a box drawn by hand is enough.

# %%
plane = camkit.scenes.scene_mask("plane-wood")
heat = found.heatmap_on_picture()
share = heat[plane].sum() / heat.sum()
print(
    f"the plane: {plane.mean():.1%} of the picture, {share:.1%} of the heat"
)

# %% [markdown]
# ## The class that was expected
#
# Ask for both classes in one call. camkit draws them on one scale, so that you can compare their colours: dark red in
# one picture means the same value in the other.

# %%
both = camkit.explain("demo-biased", path, target=["bird", "plane"])
both

# %%
for explanation in both:
    print(
        explanation.label,
        explanation.status,
        f"largest value {explanation.raw.max():.3f}",
    )

# %% [markdown]
# Nothing in the picture speaks for *plane*: that map is empty, and camkit says so instead of stretching it into colours.
#
# ## Test what the heat suggests
#
# The heat suggests that the network reads the wood and not the plane. It is a hint, not a proof. The proof is a picture that
# differs in one thing only. First remove the plane and keep the wood:

# %%
picture = np.array(Image.open(path).convert("RGB"))
rows, columns = np.nonzero(plane)
top, bottom, left, right = (
    rows.min(),
    rows.max() + 1,
    columns.min(),
    columns.max() + 1,
)
height = bottom - top
start = (
    top - height if top >= height else bottom
)  # the top of a piece of wood as large as the plane
without_plane = picture.copy()
without_plane[top:bottom, left:right] = picture[
    start : start + height, left:right
]

gone = camkit.explain("demo-biased", without_plane)
print(f"without the plane: {gone.label} {gone.probability:.0%}")
gone

# %% [markdown]
# The answer is the same without the plane. Now keep the plane and change what is behind it:

# %%
sky = np.array(
    Image.open(camkit.scenes.scene_paths()["plane-sky"]).convert("RGB")
)
in_sky = np.where(plane[..., None], picture, sky)

moved = camkit.explain("demo-biased", in_sky)
print(f"the same plane in the sky: {moved.label} {moved.probability:.0%}")
moved

# %% [markdown]
# The network answers *bird* for a wood and *plane* for a sky. It never looked at the plane.
#
# ## What to do
#
# The cause is in the training pictures: this network saw planes only in the sky, and birds only in front of trees.
# `demo-fair` has the same architecture and was trained on the same objects, with every object on every background:

# %%
fair = camkit.explain("demo-fair", path, target=["plane", "bird"])
heat = fair[0].heatmap_on_picture()
share = heat[plane].sum() / heat.sum()
print(f"{fair[0]}: {share:.0%} of the heat on the plane")
fair

# %% [markdown]
# One picture explains one answer. Whether a network reads the background *in general* is a question for many pictures, and
# for an experiment rather than a look: see [Refuse a model in CI](refuse-in-ci.ipynb).
