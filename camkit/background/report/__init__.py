"""The check's verdict for people and programs: one file per form."""
