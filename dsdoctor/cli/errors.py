"""The one way for a command to say that it cannot do its work."""


class CannotWork(Exception):
    """Usage or unreadable input: the message is one line for the user, the exit code 2."""
