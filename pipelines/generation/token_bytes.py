"""The bytes that each token stands for."""

import json


class TokenBytes:
    """Bytes of single tokens, where text is not enough: many tokens are a part of a character.

    Byte-level tokenizers (GPT-2's) write a byte as a character of an alphabet of their own; sentencepiece's write a
    space as U+2581 and bytes without a character as <0xE4>.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        self.byte_level = "ByteLevel" in json.dumps(described(tokenizer.decoder))
        self.alphabet = byte_alphabet()

    def __call__(self, token: int) -> bytes:
        """Empty for an id that the tokenizer does not know, as a vocabulary padded for alignment has."""
        if token in self.added:
            return self.added[token].encode()
        name = self.tokenizer.id_to_token(token) or ""
        if self.byte_level and all(letter in self.alphabet for letter in name):
            return bytes(self.alphabet[letter] for letter in name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        return name.replace("\u2581", " ").encode()

    def text(self, token: int) -> str:
        """With U+FFFD where the token ends inside a character."""
        return self(token).decode("utf-8", "replace")


def described(part) -> dict:
    """The JSON of a part of a tokenizer, its decoder or normalizer; empty for none."""
    return json.loads(part.__getstate__()) if part else {}


def byte_alphabet() -> dict[str, int]:
    """The byte of each letter; source: bytes_to_unicode of GPT-2's encoder.py."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
