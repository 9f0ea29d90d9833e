"""Which version this is. Standard library only, and imports even of that only when asked: it starts a ctl."""


def version() -> str:
    """The version of the installed distribution; "0+unknown" in a bare checkout."""
    from importlib import metadata

    try:
        return metadata.version("prfaas")
    except metadata.PackageNotFoundError:
        return "0+unknown"
