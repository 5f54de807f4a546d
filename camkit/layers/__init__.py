"""Which layer to explain: names of layers, and the steps that choose one."""
