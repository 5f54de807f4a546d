# %% [markdown]
# # Words that need no picture
#
# A vision-language model writes a sentence about a picture. Which of its words come from the picture, and from where in it? And
# which would it have written anyway? This tutorial asks a tiny model that ships with camkit, about drawn scenes. It needs
# `pip install 'camkit[transformers]'`.
#
# ## The model and the pictures
#
# The model is a LLaVA with 0.8 million weights. It learned scenes with one or two toys, and sentences such as "one toy, a red ball
# on the sand near a tree." No scene has a tree, but every sentence of its training ends with one.

# %%
import torch
from IPython.display import display
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

import camkit

folder = camkit.scenes.words_model()
model = LlavaForConditionalGeneration.from_pretrained(
    folder, dtype=torch.float32
).eval()
processor = AutoProcessor.from_pretrained(folder)
picture, *others = camkit.scenes.words_pictures()
display(Image.open(picture).resize((256, 256)))

# %% [markdown]
# ## What it says, and what it needs the picture for
#
# camkit compares each word's probability with this picture and with the other pictures, after the same words.

# %%
found = camkit.words(
    model,
    picture,
    "what is here ?",
    processor=processor,
    references=others,
)
print(found.sentence)
for word in found:
    print(f"{word.text:10}{word.needs_picture:6.2f} nats  {word.verdict}")

# %% [markdown]
# The tree is not in the picture, and the model is sure of it all the same. The number shows it: with any other picture, "tree" is as
# probable, so this picture has no part in it. That is how a hallucination looks from outside.
#
# ## Where the evidence lies
#
# Each word has a heatmap. Its cells sum to how much the word needs the picture, but for a small residual.

# %%
found.save("words.html")  # a page: point at a word to see its heat
display(found)

# %% [markdown]
# ## Test it
#
# Heat is a claim about the model. Check it: cover the hottest fifth of the picture for one word with the colour around it, and ask
# for the same sentence again.

# %%
colour = next(word for word in found if word.explanation and word.text in
              ("red", "green", "blue", "yellow", "purple"))
heat = colour.explanation.heatmap_on_picture()
pixels = torch.from_numpy(colour.explanation.picture.copy())
hot = torch.from_numpy(heat >= sorted(heat.ravel())[-heat.size // 5])
pixels[hot] = pixels[~hot].float().median(0).values.to(torch.uint8)
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
for before, after in zip(found, again):
    if before.needs_picture > 0.69:
        print(f"{before.text:10}{before.probability:6.0%} -> {after.probability:.0%}")
