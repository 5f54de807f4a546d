"""The background check: does a classifier need the object, or is the background enough for it?

How a labelled folder becomes a verdict, step by step:

- ``check``: the whole way, in the order of the steps below; ``journal`` keeps what is finished.
- ``data``, ``regions``, ``classes``: the labelled pictures, their annotated objects, and the outputs of the model that
  belong to each class. ``plan`` joins them with the model and the settings, and draws the sample.
- ``heat``, ``sanity``: where the heat of each picture lies, and whether it can be trusted.
- ``edits``, ``cues``, ``experiment``: what is changed in the pictures of the sample, and what the model answers.
- ``pictures``, ``effects``: a row of measures for each picture, and what follows for each class and for all together.
- ``rule``, ``reasons``: the verdict, and why.
- ``kinds``: the accuracy of each class on each place that the data names. ``baseline`` compares with an earlier check.
- ``result``, ``report``, ``showcase``: what leaves.
"""
