"""The contracts between rooms: the one folder to read before adding a back end."""
