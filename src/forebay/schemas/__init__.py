"""The schema registry: subjects and their versions, compatibility, and checks of payloads."""
