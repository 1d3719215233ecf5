"""The wire: messages, arrays, side channels and demonstration files."""
