"""The page at `/`: a chat in one document, which loads nothing but the server's own API."""
