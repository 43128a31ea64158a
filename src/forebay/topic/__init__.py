"""Topics: opening, appending, reading, uploading and deleting, and read-only views of them."""
