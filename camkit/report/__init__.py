"""What people and programs read: one file per form, each with functions from a result to text."""
