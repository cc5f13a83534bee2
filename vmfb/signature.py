"""Signatures of bundles: Ed25519 (RFC 8032) over the bytes of manifest.json, which has the sha256 of every other file.

Keys are PEM files as `openssl genpkey -algorithm ed25519` writes them; a signature is its 64 bytes, which openssl checks too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from castiron.vmfb.manifest import BundleError

SIGNATURE, SIGNATURE_BYTES = "manifest.sig", 64


def sign(data: bytes, key: Path | str) -> bytes:
    """The signature of `data` by the private key in a file; BundleError if there is none in it."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    made = "openssl genpkey -algorithm ed25519 -out FILE makes one"
    return _key(key, lambda pem: load_pem_private_key(pem, None), Ed25519PrivateKey, f"no private Ed25519 key: {made}").sign(
        data
    )


def check_signature(place: Path, data: bytes, signature: bytes | None, key: Path | str) -> None:
    """BundleError unless `signature` of the manifest `data` is by the owner of the public key in a file."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    made = "openssl pkey -in FILE -pubout gives that of a private one"
    public = _key(key, load_pem_public_key, Ed25519PublicKey, f"no public Ed25519 key: {made}")
    if signature is None:
        raise BundleError(f"{place} is not signed: castiron pack --sign signs a bundle")
    try:
        public.verify(signature, data)
    except InvalidSignature:
        raise BundleError(f"{place} is not signed by the owner of {key}: do not use it") from None


def _key(place: Path | str, load: Any, kind: type, lacks: str) -> Any:
    try:
        found = load(Path(place).read_bytes())
    except (ValueError, TypeError) as error:
        raise BundleError(f"{place} has {lacks}" + " (this one has a password)" * isinstance(error, TypeError)) from None
    if not isinstance(found, kind):
        raise BundleError(f"{place} has {lacks}")
    return found
