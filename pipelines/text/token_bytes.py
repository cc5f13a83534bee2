"""Convert token ids to the bytes of their text."""


class TokenBytes:
    """A function from a token id to the token's bytes, which may be only a part of a character.

    In a tokenizer file, a byte-level tokenizer, such as GPT-2's, writes a byte as a character of its
    own alphabet. SentencePiece writes a space as U+2581, and a byte without a character as <0xE4>.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        self.byte_level = b"ByteLevel" in (tokenizer.decoder.__getstate__() if tokenizer.decoder else b"")
        self.alphabet = byte_alphabet()

    def __call__(self, token: int) -> bytes:
        """Return the bytes of a token; empty for an unused id, such as padding."""
        if token in self.added:
            return self.added[token].encode()
        name = self.tokenizer.id_to_token(token) or ""
        if self.byte_level and all(letter in self.alphabet for letter in name):
            return bytes(self.alphabet[letter] for letter in name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        return name.replace("\u2581", " ").encode()

    def text(self, token: int) -> str:
        """Return the text of a token, with U+FFFD where it ends inside a character."""
        return self(token).decode("utf-8", "replace")


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's byte-level alphabet (`bytes_to_unicode`)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
