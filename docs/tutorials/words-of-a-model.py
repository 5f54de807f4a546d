# %% [markdown]
# # Words that need no picture
#
# A vision-language model writes a sentence about a picture. Which of its words come from the picture, and from where in it? Which
# words would it write about any picture? This tutorial asks a tiny model, which ships with camkit, about drawn scenes. It needs
# `pip install '.[transformers]'`.
#
# ## The model and the pictures
#
# The model is a LLaVA with 0.8 million weights. It learned scenes with one or two toys, and sentences such as "one toy, a red ball on
# the sand near a tree." No scene has a tree, but every sentence of its training ends with one.

# %%
import torch
from IPython.display import display
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

import camkit

folder = camkit.scenes.words_model()
model = LlavaForConditionalGeneration.from_pretrained(
    folder, dtype=torch.float32
)
processor = AutoProcessor.from_pretrained(folder)
picture, *others = camkit.scenes.words_pictures()
display(Image.open(picture).resize((256, 256)))

# %% [markdown]
# ## What it says
#
# camkit compares each word's probability with this picture and with the other eight, after the same words.

# %%
found = camkit.words(
    model,
    picture,
    "what is here ?",
    processor=processor,
    references=others,
)
print(found.sentence, "\n")
for word in found:
    print(f"{word.text:10}{word.needs_picture:6.2f} nats  {word.verdict}")

# %% [markdown]
# The model is sure of its tree, but no tree is in the picture. The comparison shows it: with the other pictures, "tree" is just as
# probable. So this picture is not why the model writes it. Words that are wrong *because* of the picture look different; see the last
# step.
#
# ## Where the evidence lies
#
# Words that need the picture have heat. The cells sum to about as much as the word needs the picture.

# %%
found.save("words.html")  # in this page, point at a word
display(Image.fromarray(found.sheet()))

# %% [markdown]
# The colour and the shape have their heat on the toy, and "sea" has it everywhere else. The heat of "one" lies where a second toy could
# be: an empty place is evidence too.
#
# ## Test it
#
# Heat is a claim about the model, so test it: cover the hottest fifth of the picture for "purple" with the colour of the rest, and
# score the same sentence again.

# %%
heat = torch.from_numpy(
    found.named("purple")[0].explanation.heatmap_on_picture()
)
hot = heat >= heat.quantile(0.8)
pixels = torch.from_numpy(found.named("purple")[0].explanation.picture.copy())
pixels[hot] = pixels[~hot].median(0).values
covered = Image.fromarray(pixels.numpy())
display(covered.resize((256, 256)))

again = camkit.words(
    model,
    covered,
    "what is here ?",
    processor=processor,
    words=found.sentence,
    references=others,
)
for before, after in zip(found, again, strict=True):
    if not before.needs_no_picture:
        print(
            f"{before.text:10}{before.probability:6.1%} -> {after.probability:.1%}"
        )

# %% [markdown]
# ## A sentence of your own
#
# Would the model have said "red"? Pass a sentence instead of letting it write. A negative number says that this picture speaks against
# the word.

# %%
wrong = camkit.words(
    model,
    picture,
    "what is here ?",
    processor=processor,
    words=found.sentence.replace("purple", "red"),
    references=others,
)
word = wrong.named("red")[0]
print(f"{word.text}: {word.needs_picture:.2f} nats, {word.verdict}")
