"""Builders: row + problem -> LaunchRecord. Pure; nothing is loaded and nothing launched here."""
