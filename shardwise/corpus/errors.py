"""The one error of this room."""


class CorpusError(ValueError):
    """A fault in the user's data or in the `[data]` section: one line naming the file or key and the mend."""
