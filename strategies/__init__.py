"""Lightning strategies that launch processes, build the mesh and create the engines."""

from __future__ import annotations

if __name__ != "lightning_rlhf.strategies":
    raise ImportError(
        f"This package was imported as {__name__!r}. Import it as 'lightning_rlhf.strategies': "
        "the folder at the top of the repository is reached through a link inside the package."
    )
