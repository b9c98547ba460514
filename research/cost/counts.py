"""FLOPs and bytes of a Qwen3 with adapters, by arithmetic: each formula is a line below."""

from dataclasses import dataclass

VOCAB = 151_936


@dataclass(frozen=True)
class Counts:
    """A shape. A multiply-add is 2 FLOPs; attention looks back."""

    width: int
    layers: int
    mlp: int
    queries: int  # width of all query heads together
    kv: int
    vocab: int = VOCAB
    kind: int = 2  # bytes of a weight
    rank: int = 64

    @property
    def projections(self) -> int:
        attention = 2 * self.width * (self.queries + self.kv)
        return self.layers * (attention + 3 * self.width * self.mlp)

    @property
    def adapters(self) -> int:
        attention = 2 * (self.width + self.queries) + 2 * (self.width + self.kv)
        return self.layers * self.rank * (attention + 3 * (self.width + self.mlp))

    @property
    def weights(self) -> int:
        """Bytes that a forward reads; adapters are fp32."""
        return self.kind * (self.projections + self.vocab * self.width) + 4 * self.adapters

    def attention(self, n: int) -> int:
        """FLOPs of n tokens that look back at each other."""
        return 2 * self.layers * self.queries * n * n

    def forward(self, n: int, predicted: int) -> int:
        """FLOPs of n tokens of a row, with the head on those that predict."""
        products = 2 * (self.projections + self.adapters) * n
        return products + self.attention(n) + 2 * self.vocab * self.width * predicted

    def backward(self, n: int, predicted: int) -> int:
        """FLOPs: everything once more, then the gradients of all inputs and of the adapters."""
        return 2 * self.forward(n, predicted) + self.attention(n) + 2 * self.adapters * n

    def fp32(self, n: int) -> int:
        """Those FLOPs of a forward that run in fp32: the adapters'. A backward has three times as
        many, with the second forward."""
        return 2 * self.adapters * n

    @property
    def place(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.kind * self.layers * self.kv

    def token(self, places: float) -> float:
        """FLOPs of a decoded token that looks back at so many places."""
        products = 2 * (self.projections + self.adapters + self.vocab * self.width)
        return products + 4 * self.layers * self.queries * places

    def cache(self, prompt: int, new: int) -> float:
        """Bytes of a row's cache, summed over the tokens that read it."""
        return self.place * (prompt * new + new * new / 2)

    def decoding(self, prompt: int, new: int, rows: float, steps: float) -> tuple[float, float]:
        """FLOPs and bytes of `rows` completions of `new` tokens in `steps` steps.

        Each step reads all weights, each token its row's cache.
        """
        flops = self.forward(prompt + new, new) - self.forward(prompt, 0)
        return rows * flops, steps * self.weights + rows * self.cache(prompt, new)


QWEN3 = {
    "Qwen3-1.7B": Counts(2048, 28, 6144, 2048, 1024),
    "Qwen3-4B": Counts(2560, 36, 9728, 4096, 1024),
    "Qwen3-8B": Counts(4096, 36, 12288, 4096, 1024),
}
