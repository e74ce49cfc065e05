"""Training with TorchTitan: nothing here imports it before it is used."""
