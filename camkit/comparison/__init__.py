"""Which method to trust: several methods side by side on one sheet, and judged over a sample of pictures."""
