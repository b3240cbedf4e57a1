"""Write the page of what you have built: `make finish`."""

from shared import progress

progress.finish()
