"""The commands of `whorl`, by what they do. Heavy modules are imported inside them."""
