# %% [markdown]
# # Refuse a model in CI
#
# A network can reach 100 % on its validation pictures and still not look at the objects. This tutorial builds the gate that
# refuses such a network: a folder of labelled pictures, one call, and a test that fails.
#
# ## The pictures
#
# The check needs a folder per class, and the regions of the objects. camkit ships drawn pictures with masks; take 32 per class.
# Every object stands on its usual background, as in many real data sets.

# %%
import textwrap
from pathlib import Path

import numpy as np
from PIL import Image

import camkit

camkit.scenes.write_scenes(Path("validation"), 32)

samples = sorted(Path("validation/pictures").rglob("000.jpg"))
samples += sorted(Path("validation/masks").rglob("000.png"))
sheet = Image.new("RGB", (4 * 128, 2 * 128))
for place, sample in enumerate(samples):
    sheet.paste(
        Image.open(sample).convert("RGB"), (place % 4 * 128, place // 4 * 128)
    )
sheet

# %% [markdown]
# ## Accuracy sees nothing
#
# Both networks that ship with camkit are right on all these pictures, or nearly. By accuracy alone, both would ship.

# %%
pictures = sorted(Path("validation/pictures").rglob("*.jpg"))
for name in ("demo-biased", "demo-fair"):
    answers = camkit.explain_many(name, pictures)
    right = np.mean(
        [
            answer.label == Path(answer.source).parent.name
            for answer in answers
        ]
    )
    print(f"{name}: {right:.0%} right")

# %% [markdown]
# ## The check
#
# The check pastes each object on other backgrounds, removes it, and lets the network answer again. `pastes = 1` takes one
# background of each kind for every picture, which is faster; leave it out for a release.

# %%
settings = {"check": {"pastes": 1}}
biased = camkit.check(
    "demo-biased", "validation/pictures", out="report/biased", config=settings
)
biased

# %%
print(biased.verdict, "with exit code", biased.exit_code())
for name, measures in biased.classes.items():
    gap = max(
        measures.gap.by_fill.values(), key=lambda fill: fill.effect.value
    ).effect
    interval = f"{gap.low:.2f} to {gap.high:.2f}"
    print(f"{name:6} loses {gap.value:.2f} of its accuracy ({interval})")

# %%
fair = camkit.check(
    "demo-fair", "validation/pictures", out="report/fair", config=settings
)
fair

# %% [markdown]
# The report is one HTML file that needs no network. Open it to see the pictures behind each number.

# %%
sorted(file.name for file in Path("report/biased").iterdir())

# %% [markdown]
# ## As a test
#
# `assert_ok` does nothing if the network may ship, and raises otherwise. The message names the worst class:

# %%
fair.assert_ok()

try:
    biased.assert_ok()
except AssertionError as error:
    print(textwrap.fill(str(error), 78))

# %% [markdown]
# So the gate is a test file of five lines:
#
# ```python
# import camkit
#
#
# def test_the_network_looks_at_the_objects():
#     camkit.check("mine.py:build", "validation/", out="report/").assert_ok()
# ```
#
# or one step of a pipeline. Its exit code is 0 if the network may ship, 1 for FAIL, and 3 if the check could not
# decide:
#
# ```sh
# camkit check validation/ --model mine.py:build --out report/
# ```
#
# [The background check](../check.md) explains what is measured and how the verdict follows;
# [Put it into CI](../check.md#put-it-into-ci) has a workflow to copy.
