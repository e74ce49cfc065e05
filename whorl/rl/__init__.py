"""The rollout engine of a trainer: routes that replace the weights of a running server, and the trainer's side of them.

`routes` serves them, `transfers` has the ways on which weights come, `client` and `trl` are for trainers. docs/rl.md.
"""
