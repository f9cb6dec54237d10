"""Lightning callbacks: rollout, weight sync, progress and records."""

from __future__ import annotations

if __name__ != "lightning_rlhf.callbacks":
    raise ImportError(
        f"This package was imported as {__name__!r}. Import it as 'lightning_rlhf.callbacks': "
        "the folder at the top of the repository is reached through a link inside the package."
    )
