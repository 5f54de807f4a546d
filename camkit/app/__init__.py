"""``camkit app``: look at a model's answers in a browser. Gradio, the extra ``camkit[app]``, is imported only here."""
