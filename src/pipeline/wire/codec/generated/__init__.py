"""Message classes made from `messages.proto`; see tools/generate_messages.py."""
