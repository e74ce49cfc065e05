"""LoRA for each request: adapters as PEFT writes them, read and kept in slots."""
