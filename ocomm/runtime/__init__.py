"""The background thread and what it shares with the user's threads: tensor queue, handles, process sets."""
