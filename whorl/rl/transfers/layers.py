"""prime-rl's form: a number of parts; of each a table of its tensors, and the values of each dtype in one tensor."""

from collections.abc import Iterator

import torch
from torch import Tensor

from whorl.rl.pickles import MAX_BYTES, tensor_table

from .group import Wire
from .tensors import DTYPES, Batch, TransferError

_MOST_PARTS = 1 << 16


class LayersTransfer:
    """Parts of a model, such as its layers, that rank 0 of a group broadcasts without announcing them."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def receive(self) -> Iterator[Batch]:
        for _ in range(self._number("parts", _MOST_PARTS)):
            table = torch.empty(self._number("bytes of a table", MAX_BYTES), dtype=torch.uint8, device=self.wire.device)
            self.wire.receive(table)
            for dtype, entries in tensor_table(table.cpu().numpy().tobytes()):
                if dtype not in DTYPES:
                    raise ValueError(f"weights come in {dtype}, expected one of {', '.join(DTYPES)}")
                counts = [count for _, _, count in entries]
                values = torch.empty(sum(counts), dtype=DTYPES[dtype], device=self.wire.device)
                self.wire.receive(values)
                parts: tuple[Tensor, ...] = values.split(counts)
                yield [(name, part.view(shape)) for (name, shape, _), part in zip(entries, parts, strict=True)]

    def _number(self, thing: str, most: int) -> int:
        value = torch.zeros(1, dtype=torch.int64, device=self.wire.device)
        self.wire.receive(value)
        number = int(value.item())
        if not 0 <= number <= most:
            raise TransferError(f"the sender announces {number} {thing}, expected at most {most}")
        return number

    def close(self) -> None:
        self.wire.close()
