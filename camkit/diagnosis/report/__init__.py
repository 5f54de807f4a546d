"""A diagnosis for people and programs: one file per form."""
