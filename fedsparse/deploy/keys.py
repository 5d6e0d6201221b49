"""Certificates and keys of a federation: a private CA, the server's certificate, one key for each node."""

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedsparse.errors import ConfigError
from fedsparse.run.folder import write_bytes

CA_DAYS, SERVER_DAYS, SOON_DAYS = 3650, 825, 30
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def make_ca(certificate: Path, key: Path, name: str) -> None:
    """Make a private certificate authority; whoever has its key can stand in for the server."""
    private = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fedsparse {name}"[:64])])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    signed = (
        _builder(subject, subject, private.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(private.public_key()), critical=False)
        .sign(private, hashes.SHA256())
    )
    write_secret(key, _pem(private))
    certificate.write_bytes(signed.public_bytes(form.Encoding.PEM))


def make_server(certificate: Path, key: Path, ca_certificate: Path, ca_key: Path, host: str, days: int) -> None:
    """Make the server's key and certificate, valid for `host` and for this machine itself.

    Raises
    ------
    ValueError, TypeError
        The authority's files are damaged, or do not belong together.
    """
    ca = _load(ca_certificate)
    ca_private = form.load_pem_private_key(ca_key.read_bytes(), None)
    if not isinstance(ca_private, ec.EllipticCurvePrivateKey) or ca_private.public_key() != ca.public_key():
        raise ValueError("not the authority's key")
    private = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])])
    names = [general_name(name) for name in dict.fromkeys((host, *LOOPBACK))]
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_private.public_key())
    signed = (
        _builder(subject, ca.subject, private.public_key(), days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(authority, critical=False)
        .sign(ca_private, hashes.SHA256())
    )
    write_secret(key, _pem(private))
    write_bytes(certificate, signed.public_bytes(form.Encoding.PEM))


def make_node(key: Path) -> bytes:
    """Make a node's private key, in the form that Flower reads, and return the public one."""
    private = ec.generate_private_key(ec.SECP384R1())
    write_secret(key, private.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()))
    return private.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)


def public_key(key: Path) -> bytes:
    """Return a node's public key as Flower knows it, from its private key.

    Raises
    ------
    ConfigError
        Where the file cannot be read, or is no such key.
    """
    try:
        private = form.load_ssh_private_key(key.read_bytes(), None)
    except OSError as error:
        raise ConfigError(f"cannot read the node's key {key}: {error.strerror}.") from None
    except ValueError:
        private = None
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{key} is no node key: copy the node's folder from the server again.")
    return flower_form(private.public_key())


def from_openssh(text: bytes) -> bytes:
    """Return a public key as Flower knows it, from its OpenSSH line."""
    public = form.load_ssh_public_key(text)
    assert isinstance(public, ec.EllipticCurvePublicKey)
    return flower_form(public)


def flower_form(public: ec.EllipticCurvePublicKey) -> bytes:
    """Write a public key as it stands in Flower's requests."""
    return public.public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)


def is_pair(certificate: Path, key: Path) -> bool:
    """Whether a private key is that of a certificate.

    Raises
    ------
    OSError, ValueError, TypeError
        One of them cannot be read, or is damaged.
    """
    private = form.load_pem_private_key(key.read_bytes(), None)
    return private.public_key() == _load(certificate).public_key()


def is_for(certificate: Path, host: str) -> bool:
    """Whether a certificate names a host.

    Raises
    ------
    OSError, ValueError
        It cannot be read, or is damaged.
    """
    signed = _load(certificate)
    try:
        names = signed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    return general_name(host) in names


def is_signed_by(certificate: Path, authority: Path) -> bool:
    """Whether a certificate is signed by an authority.

    Raises
    ------
    OSError, ValueError
        One of them cannot be read, or is damaged.
    """
    ca = _load(authority)
    signed = _load(certificate)
    try:
        signed.verify_directly_issued_by(ca)
        return True
    except (InvalidSignature, ValueError, TypeError):
        return False


def expiry(certificate: Path) -> tuple[datetime, int]:
    """Return when a certificate expires, and the days until then; below 0 they are over."""
    end = _load(certificate).not_valid_after_utc
    return end, (end - datetime.now(UTC)).days


def general_name(name: str) -> x509.GeneralName:
    """Return a host's name or address as certificates have it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _load(certificate: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(certificate.read_bytes())


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read; it never exists with other permissions."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(partial, path)


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    # An hour early: devices without a battery-backed clock are often a little behind.
    start = datetime.now(UTC) - timedelta(hours=1)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(start).not_valid_after(start + timedelta(days=days, hours=1))


def _pem(private: ec.EllipticCurvePrivateKey) -> bytes:
    return private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
