"""Input at random: whatever comes from outside is read, or refused in one line."""
