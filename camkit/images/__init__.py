"""From files, pictures, arrays and tensors to a model's input, and which part of the picture it shows."""
