"""Tells a model's thinking from its answer while the text arrives in pieces."""

START, END = "<think>", "</think>"


class ThinkingSplitter:
    """Splits text at the think marks, which are left out, as are the line breaks behind them."""

    def __init__(self, *, is_thinking: bool = False) -> None:
        self.is_thinking = is_thinking
        self._held = ""
        self._after_mark = is_thinking

    @classmethod
    def after(cls, prompt: str) -> "ThinkingSplitter":
        """For what follows a prompt: some templates open the thinking themselves."""
        return cls(is_thinking=prompt.rstrip("\n").endswith(START))

    def add(self, text: str) -> list[tuple[bool, str]]:
        """Pieces as (is thinking, text). What may yet become a mark is held back."""
        self._held += text
        pieces = []
        while (at := self._held.find(mark := END if self.is_thinking else START)) >= 0:
            pieces += self._take(at)
            self._held = self._held[len(mark) :]
            self.is_thinking, self._after_mark = not self.is_thinking, True
        sizes = range(min(len(mark) - 1, len(self._held)), 0, -1)
        num_held = next((n for n in sizes if mark.startswith(self._held[-n:])), 0)
        return pieces + self._take(len(self._held) - num_held)

    def finish(self) -> list[tuple[bool, str]]:
        return self._take(len(self._held))

    def _take(self, end: int) -> list[tuple[bool, str]]:
        text, self._held = self._held[:end], self._held[end:]
        if self._after_mark:
            text = text.lstrip("\n")
            self._after_mark = not text
        return [(self.is_thinking, text)] if text else []
