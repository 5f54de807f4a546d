"""Which layer to explain: names of layers, and the stages that choose one."""
