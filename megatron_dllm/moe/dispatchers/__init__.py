"""Token dispatchers: how rows get to their experts' ranks and back."""
