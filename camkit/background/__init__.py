"""The background check: does a classifier need the object, or is the background enough for it?

How a labelled folder becomes a verdict, step by step:

- ``check``: runs the steps below in order; ``kit.store`` saves each finished row.
- ``data``, ``rows``, ``regions``: the labelled pictures of a folder or a dataset, their annotated objects, and the
  outputs of the model that belong to each class. ``plan`` joins them with the model and the settings, and draws the
  sample.
- ``edits``: what is changed in the pictures of the sample. ``experiment``: what the model answers to every picture, and
  to its edits, and where the heat lies.
- ``effects``: the measures of each picture, and what follows from them for each class and for all classes together.
- ``rule``: the verdict, and why.
- ``kinds``: the accuracy of each class on each place that the data names.
- ``result``, ``report``, ``showcase``: what leaves, also a comparison with an earlier check.

``mend`` trains a last layer anew, and ``outlines`` makes masks of boxes.
"""
